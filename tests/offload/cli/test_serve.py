"""``kvtiers serve``: what it adds to ``vllm serve``, and what it refuses.
``tests/vllm/test_server.py`` starts a real server in this way."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

import offload
from offload.cli import model_names
from offload.cli.vllm_flags import has_flag
from offload.config.kv_transfer_config import transfer_config
from offload.config.memory_limits import memory_limit
from tests.offload.cli.rank_folders import Result, kvtiers, writer
from tests.patience import PATIENCE_S

HASHING = ["--prefix-caching-hash-algo", "sha256_cbor"]


def serve(*words: object) -> Result:
    return kvtiers("serve", *words, "--dry-run")


def added(found: Result) -> tuple[dict, list[str]]:
    """The configuration and the other flags of the printed command."""
    assert found.code == 0, found.err
    program, command, model, *flags = shlex.split(found.out)
    assert (program, command, model) == ("vllm", "serve", "m")
    assert flags[0] == "--kv-transfer-config"
    assert found.err == f"kvtiers serve: added {shlex.join(flags[: 2 + len(HASHING)])}\n"
    return json.loads(flags[1]), flags[2:]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVTIERS_CPU", "KVTIERS_DISK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # no warning about this machine's memory


def test_two_flags_give_a_configuration(tmp_path: Path) -> None:
    disks = ["--kv-disk", f"{tmp_path}/a:16MiB", "--kv-disk", f"{tmp_path}/b:32MiB"]
    transfer, flags = added(serve("m", "--port", "8000", "--kv-cpu", "64MiB", *disks, "-tp", "2"))
    assert transfer == {
        "kv_connector": "KvTiersConnector",
        "kv_connector_module_path": "offload.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cpu": {"capacity": "64MiB"},
            "tiers": [
                {"type": "lmdb", "path": f"{tmp_path}/a", "capacity": "16MiB"},
                {"type": "lmdb", "path": f"{tmp_path}/b", "capacity": "32MiB"},
            ],
        },
    }
    assert flags == [*HASHING, "--port", "8000", "-tp", "2"]


def test_environment_variables_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIERS_CPU", "64MiB")
    monkeypatch.setenv("KVTIERS_DISK", f"{tmp_path}/a:16MiB, {tmp_path}/b:32MiB,")
    extra = added(serve("m"))[0]["kv_connector_extra_config"]
    assert extra["cpu"] == {"capacity": "64MiB"}
    assert [tier["path"] for tier in extra["tiers"]] == [f"{tmp_path}/a", f"{tmp_path}/b"]
    extra = added(serve("m", "--kv-cpu", "32MiB", "--kv-disk", f"{tmp_path}/c:16MiB"))[0]
    extra = extra["kv_connector_extra_config"]
    assert extra["cpu"] == {"capacity": "32MiB"}, "a flag takes precedence over a variable"
    assert [tier["path"] for tier in extra["tiers"]] == [f"{tmp_path}/c"]


def test_further_options_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"record_requests": f"{tmp_path}/requests.jsonl", "cpu": {"policy": "lru"}}
    file = tmp_path / "options.json"
    file.write_text(json.dumps(options))
    disks = ["--kv-cpu", "64MiB", "--kv-disk", f"{tmp_path}/a:16MiB"]
    for given in (file, json.dumps(options)):
        extra = added(serve("m", *disks, "--kv-extra", given))[0]["kv_connector_extra_config"]
        assert extra == {
            "cpu": {"policy": "lru", "capacity": "64MiB"},
            "tiers": [{"type": "lmdb", "path": f"{tmp_path}/a", "capacity": "16MiB"}],
            "record_requests": f"{tmp_path}/requests.jsonl",
        }
    monkeypatch.setenv("KVTIERS_CPU", "64MiB")
    both = serve("m", "--kv-extra", '{"cpu": {"capacity": "1GiB"}}')
    assert '--kv-extra: sets "cpu.capacity", and so does KVTIERS_CPU.' in both.err


def test_without_flags_the_machine_decides_the_size_of_the_cpu_tier() -> None:
    transfer, flags = added(serve("m"))
    assert (transfer["kv_connector_extra_config"], flags) == ({}, HASHING)


@pytest.mark.parametrize(
    "flag", ["--kv-transfer-config={}", "--kv_transfer_config={}", "--kv-transfer-config.kv_role=x"]
)
def test_the_users_own_configuration_is_left_alone(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve("m", flag).out == f"vllm serve m {shlex.quote(flag)}\n"
    assert serve("m", "--config", "f.yaml").out == "vllm serve m --config f.yaml\n"
    monkeypatch.setenv("KVTIERS_CPU", "64MiB")
    assert "KVTIERS_CPU is ignored because --kv-transfer-config" in serve("m", flag).err
    found = serve("m", flag, "--kv-cpu", "64MiB")
    assert found.code == 2
    assert "--kv-transfer-config: is given together with --kv-cpu. Give one of them" in found.err
    assert serve("m", flag, "--kv-extra", "{}").code == 2


def test_the_users_own_configuration_is_checked(tmp_path: Path) -> None:
    disk = {"type": "lmdb", "path": f"{tmp_path}/kv", "capacity": -1}
    extra = {"cpu": {"capacity": "64MiB"}, "tiers": [disk]}
    for text, words in (
        (json.dumps(transfer_config(extra)), "$.tiers[0].capacity: is negative (got -1)"),
        (json.dumps(transfer_config({}) | {"kv_role": "kv_bot"}), 'kv_role: must be "kv_both"'),
        ("{bad}", "--kv-transfer-config: is not JSON: "),
        ("[1]", "--kv-transfer-config: is not an object. Write"),
    ):
        found = serve("m", "--kv-transfer-config", text)
        assert (found.code, found.out) == (2, "")
        assert words in found.err
    disk["capacity"] = "16MiB"
    assert serve("m", "--kv-transfer-config", json.dumps(transfer_config(extra))).code == 0
    with writer(tmp_path / "kv"):  # vLLM waits for a server that may be about to end
        assert serve("m", "--kv-transfer-config", json.dumps(transfer_config(extra))).code == 0


def test_the_hub_is_asked_about_the_name_before_vllm_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(model_names, "HUB_PATIENCE_S", PATIENCE_S)
    assert serve("nobody/none", "--kv-cpu", "64MiB").code == 0, "a dry run must not ask the hub"

    def started(*command: object) -> None:
        raise SystemExit(99)

    monkeypatch.setattr("os.execv", started)
    found = kvtiers("serve", "nobody/none", "--kv-cpu", "64MiB")
    assert (found.code, found.out) == (3, "")
    assert kvtiers("serve", "nobody/none", "--kv-cpu", "64").code == 2, "two problems"
    assert "kvtiers serve: nobody/none: is not a folder and has no local copy" in found.err
    monkeypatch.setenv("VLLM_MODEL_REDIRECT_PATH", "names.txt")
    assert kvtiers("serve", "nobody/none", "--kv-cpu", "64MiB").code == 99


def test_the_users_own_hash_function_takes_precedence() -> None:
    flags = ["--prefix-caching-hash-algo", "xxhash_cbor"]
    assert shlex.split(serve("m", *flags).out)[-2:] == flags
    assert serve("m", *flags).out.count("hash-algo") == 1


def test_all_spellings_of_vllm_flags_are_recognized() -> None:
    for flags in (["--a-b", "1"], ["--a_b=1"], ["--a-b.c", "1"], ["--a_b.c=1"]):
        assert has_flag(flags, "--a-b")
    assert not has_flag(["--a-bc"], "--a-b")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--kv-cpu", "8G"], ["--kv-cpu: has an ambiguous unit"]),
        (["--kv-cpu", "900TiB"], ["--kv-cpu: 900TiB does not fit into the memory limit"]),
        (["--kv-disk", "/data"], ['--kv-disk: must be PATH:SIZE (got "/data"). Write /data/kv']),
        (
            ["--kv-cpu", "8G", "--kv-disk", "/data", "--kv-disk", "kv:1GiB"],
            ["3 problems", "--kv-cpu: has an", "--kv-disk: must be PATH:SIZE", "kv:1GiB: must be"],
        ),
        (["--kv-disk", "kv:1GiB"], ["--kv-disk kv:1GiB: must be absolute"]),
        (["--kv-disk", "/proc/kv:1GiB"], ["--kv-disk /proc/kv:1GiB: "]),
        (["--kv-disk", "/tmp/k:9EiB", "--kv-cpu", "x"], ["2 problems", "--kv-cpu: is not a size"]),
        (
            ["--kv-disk", "/tmp/a:1GiB", "--kv-disk", "/tmp/a:2GiB"],
            ['--kv-disk /tmp/a:2GiB: "/tmp/a" is also the folder of another tier. Give every tier'],
        ),
        (["--kv-extra", "{"], ["--kv-extra: is not JSON: "]),
        (["--kv-extra", "[1]"], ['--kv-extra: is not an object. Write {"record_requests": ']),
        (["--kv-extra", " "], ["--kv-extra: is empty. Name a file, or write "]),
        (["--kv-extra", "/no/such"], ["--kv-extra /no/such: does not exist. Name a file"]),
        (
            ["--kv-extra", '{"recent_request": 1}'],
            ['--kv-extra $.recent_request: unknown option. Did you mean "recent_requests"?'],
        ),
        (["--kv-extra", '{"cpu": 8}'], ["--kv-extra $.cpu: "]),
        (
            ["--kv-cpu", "64MiB", "--kv-extra", '{"cpu": {"capacity": "1GiB"}}'],
            ['--kv-extra: sets "cpu.capacity", and so does --kv-cpu. Give one of them.'],
        ),
        (
            ["--kv-disk", "/tmp/a:1GiB", "--kv-extra", '{"tiers": []}'],
            ['--kv-extra: sets "tiers", and so does --kv-disk. Give one of them.'],
        ),
    ],
)
def test_bad_input_is_reported(words: list[str], texts: list[str]) -> None:
    found = serve("m", *words)
    assert (found.code, found.out) == (2, "")
    for text in texts:
        assert text in found.err


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu"])
def test_a_cpu_build_of_vllm_gets_a_warning_about_memory(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    installed = tmp_path / "vllm-0.32.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = serve("m", "--kv-cpu", most_memory())
    assert found.code == 0, found.err
    is_warned = "kvtiers serve: warning: without a GPU, vLLM takes 92.0% of the memory" in found.err
    assert is_warned == (version == "0.32.0+cpu")
    assert "warning" not in serve("m", "--kv-cpu", most_memory(), "--config", "f.yaml").err


def most_memory() -> str:
    """The largest CPU tier that ``kvtiers check`` accepts."""
    return str(int(memory_limit().limit_bytes * 0.875))


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    """The folder may contain anything; this vLLM reports that it has been started."""
    vllm = tmp_path / "installed/vllm/entrypoints/cli"
    vllm.mkdir(parents=True)
    for package in (vllm, vllm.parent, vllm.parents[1]):
        (package / "__init__.py").touch()
    (vllm / "main.py").write_text("import sys\ndef main(): print('started', *sys.argv[1:])\n")
    here = tmp_path / "here"
    here.mkdir()
    for name in ("vllm", "offload", "json"):
        (here / f"{name}.py").write_text("raise SystemExit('imported from the current folder')\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    program = [sys.executable, "-P", "-m", "offload.cli", "serve", model, "--kv-cpu", "64MiB"]
    path = f"{tmp_path / 'installed'}:{Path(offload.__file__).parents[1]}"
    done = subprocess.run(
        program,
        cwd=here,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"started serve {model} --kv-transfer-config")


def test_flags_before_the_model() -> None:
    found = serve("--max-model-len", "512")
    assert found.code == 2
    assert "Write kvtiers serve MODEL [flags]" in found.err
