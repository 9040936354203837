"""``kvtiers check``: reports the same problems as a server's start, quickly and without vLLM."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from offload.cli.path_hints import CONFIG_BYTES_MAX
from offload.config.kv_transfer_config import NAME, transfer_config
from tests.offload.cli.rank_folders import ROOT, kvtiers

GOOD = {"cpu": {"capacity": "64MiB"}}


def disk(tmp_path: Path, **more: object) -> dict:
    tier = {"type": "lmdb", "path": str(tmp_path / "kv"), "capacity": "16MiB", "reserve": 0}
    return GOOD | {"tiers": [tier | more]}


def test_text_or_file_with_or_without_vllms_enclosing_object(tmp_path: Path) -> None:
    config = disk(tmp_path)
    file = tmp_path / "config.json"
    for inside in (config, transfer_config(config), {"kv_transfer_config": transfer_config(config)},
                   {"kv_connector_extra_config": config}):  # fmt: skip
        file.write_text(json.dumps(inside))
        for where in (file, json.dumps(inside)):
            found = kvtiers("check", where)
            assert found.code == 0, found.err
            path = tmp_path / "kv"
            assert (
                found.out
                == f"cpu: 64MiB\nlmdb {path}: 16MiB\nthe configuration fits this machine\n"
            )
    assert not (tmp_path / "kv").exists(), "a check must not create anything"


def test_the_earlier_name_and_vllms_multi_connector_are_accepted(tmp_path: Path) -> None:
    one = transfer_config(disk(tmp_path, capacity="1KiB"))
    two = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
           "kv_connector_extra_config": {"connectors": [one]}}  # fmt: skip
    for transfer in (one, one | {"kv_connector": "OffloadConnector"}, two):
        found = kvtiers("check", json.dumps(transfer))
        assert found.code == 1
        assert "$.tiers[0].capacity: 1KiB is too small for any chunk" in found.err


def test_all_problems_at_once_and_as_json(tmp_path: Path) -> None:
    wrong = disk(tmp_path, polcy="lru", path="/proc/kv") | {"cpu": {"capacity": "forty"}}
    transfer = json.dumps(transfer_config(wrong) | {"kv_role": "kv_producer"})
    found = kvtiers("check", transfer)
    assert (found.code, found.out) == (1, "")
    for words in ("4 problems in --kv-transfer-config", 'kv_role: must be "kv_both", because',
                  'loads and stores (got "kv_producer")', "$.cpu.capacity",
                  'Did you mean "policy"?', "/proc/kv"):  # fmt: skip
        assert words in found.err, words
    report = kvtiers("check", transfer, "--json").json
    assert report["ok"] is False
    assert report["problems"][0]["where"] == "kv_role"
    good = kvtiers("check", json.dumps(GOOD), "--json").json
    assert good["ok"] is True
    assert good["tiers"] == [{"tier": "cpu", "capacity_bytes": 64 << 20}]
    assert good["notes"] == [note for note in good["notes"] if note.startswith("no disk tier")]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("{", "the JSON: is not JSON: "),
        ("[]", "the JSON: is not an object. Write "),
        ('{"kv_transfer_config": 1}', "kv_transfer_config: is not an object. Write "),
        ("[" * 100_000, "the JSON: is not JSON: maximum recursion depth"),
        ('{"kv_conector": "x", "cpu": {}}', 'kv_conector: is unknown. Write "kv_connector".'),
        ("/no/such/file", "/no/such/file: does not exist. Name a file"),
        ("/proc", "/proc: is not a file. Name a file"),
        ('{"kv_connector": "LMCacheConnectorV1"}', f'Use "kv_connector": "{NAME}".'),
    ],
)
def test_bad_input_is_reported(where: str, words: str) -> None:
    found = kvtiers("check", where)
    assert (found.code, found.out) == (2, "")
    assert words in found.err


def test_a_file_that_is_too_large_is_not_cut(tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    file.write_text(json.dumps(GOOD) + " " * CONFIG_BYTES_MAX)
    found = kvtiers("check", file)
    assert (found.code, found.out) == (2, "")
    assert f"{file}: is larger than 1MiB. Name a file with a configuration." in found.err


def test_standard_input_that_is_closed(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m offload.cli check - <&-"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "kvtiers check: -: cannot be read: standard input is closed. Name a file of JSON.\n"
    )


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found = kvtiers("check", tmp_path / "pipe")
    assert found.code == 2
    assert "is not a file" in found.err


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    """A shell replaces ``<(command)`` by the name of a pipe."""
    ours, theirs = os.pipe()
    os.write(theirs, json.dumps(GOOD).encode())
    os.close(theirs)
    found = kvtiers("check", f"/dev/fd/{ours}")
    os.close(ours)
    assert found.code == 0, found.err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"cpu": {"capacity": 1}}, "$.cpu.capacity: 1B is too small for any chunk. Give at least"),
        (
            {"cpu": {"capacity": "64MiB", "pin": 1}},
            'must be "require", "prefer" or "off" (got 1)\n',
        ),
        (GOOD | {"recent_requests": 0}, "must be between 1 and 100,000 (got 0)"),
        (GOOD | {"record_trace": "~/t"}, f'for example "{Path("~/t").expanduser()}".'),
    ],
)
def test_values_are_refused(extra: dict, words: str) -> None:
    found = kvtiers("check", json.dumps(extra))
    assert (found.code, found.out) == (1, "")
    assert words in found.err


def test_a_name_that_no_file_system_allows(tmp_path: Path) -> None:
    found = kvtiers("check", json.dumps(disk(tmp_path, path=f"/var/cache/{'k' * 256}/kv")))
    assert found.code == 1
    assert "$.tiers[0].path: has a name of 256 bytes; file systems allow 255." in found.err


@pytest.mark.parametrize(
    ("tiers", "look_ahead", "why"),
    [(1, 0, "look_ahead is 0"), (0, 0.25, "there is no lower tier"), (0, 0, "there is no lower")],
)
def test_an_option_without_effect_is_a_warning(
    tiers: int, look_ahead: float, why: str, tmp_path: Path
) -> None:
    extra = (disk(tmp_path) if tiers else GOOD) | {"look_ahead": look_ahead}
    found = kvtiers("check", json.dumps(extra | {"wait_for_reads": "auto"}))
    assert found.code == 0
    assert f'warning: $.wait_for_reads: "auto" has no effect, because {why}' in found.out
    assert found.out.endswith("the configuration fits this machine, with 1 warning\n")


@pytest.mark.parametrize("role", [{}, {"kv_role": None}, {"kv_role": "kv_bot"}])
def test_the_role_is_required(role: dict) -> None:
    transfer = transfer_config(GOOD)
    del transfer["kv_role"]
    found = kvtiers("check", json.dumps(transfer | role))
    assert found.code == 1
    assert found.err.startswith("kvtiers: 1 problem in --kv-transfer-config:\n")
    what = 'must be "kv_both"' if role.get("kv_role") else "is missing"
    assert f"kv_role: {what}" in found.err


def test_an_option_of_ours_beside_the_extra_config_is_found() -> None:
    """vLLM refuses it; a check of the options alone would check the defaults."""
    transfer = transfer_config(GOOD)
    tiers = transfer["kv_connector_extra_config"].pop("tiers", [])
    found = kvtiers("check", json.dumps(transfer | {"tiers": tiers, "chunk_blocks": 2}))
    assert found.code == 1
    for name in ("tiers", "chunk_blocks"):
        problem = f'{name}: is in the wrong place. Move it to "kv_connector_extra_config".'
        assert problem in found.err


@pytest.mark.parametrize("module", ["offload.conector", "offload", "no_such_module", "", 1])
def test_a_wrong_module_of_the_connector_is_found(module: object) -> None:
    transfer = transfer_config(GOOD) | {"kv_connector_module_path": module}
    found = kvtiers("check", json.dumps(transfer))
    assert found.code == 1
    what = f"kv_connector_module_path: is not the connector's module (got {json.dumps(module)})."
    assert f'{what} Write "offload.connector".' in found.err


@pytest.mark.parametrize(
    "module", [None, "offload.connector", "offload.connector.connector", "json.decoder", "__main__"]
)
def test_the_module_may_be_left_out_or_that_of_another_package(module: str | None) -> None:
    transfer = transfer_config(GOOD) | {"kv_connector_module_path": module}
    assert kvtiers("check", json.dumps(transfer)).code == 0


def test_mistakes_in_vllms_own_fields_are_found() -> None:
    """vLLM refuses them, too, but only after it has imported everything."""
    transfer = transfer_config(GOOD)
    extra = transfer.pop("kv_connector_extra_config")
    wrong = transfer | {"kv_connector_extra_confg": extra, "kv_load_failure_policy": "recomput"}
    found = kvtiers("check", json.dumps(wrong))
    assert found.code == 1
    assert 'kv_connector_extra_confg: is unknown. Write "kv_connector_extra_config".' in found.err
    assert 'kv_load_failure_policy: must be "recompute" or "fail" (got "recomput")' in found.err
    found = kvtiers("check", json.dumps(transfer | {"kv_connector_extra_config": []}))
    assert found.code == 1
    assert "kv_connector_extra_config: must be an object (got [])" in found.err
    later = transfer_config(GOOD) | {"a_field_of_a_later_version": 1}
    assert kvtiers("check", json.dumps(later)).code == 0


@pytest.mark.parametrize("command", ["serve {model} --kv-cpu 64MiB", "plan {model} --cpu 64MiB"])
def test_a_missing_vllm_is_named(command: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    words = command.format(model=model).split()
    program = (
        f"import sys; sys.modules['vllm'] = None; sys.argv = {['kvtiers', *words]!r}\n"
        "from offload.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (1, 2), done.stderr
    assert "vLLM" in done.stderr
    assert "is not installed in this Python environment" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_imports_neither_torch_nor_vllm() -> None:
    """Importing them takes seconds, and the whole check takes less than two."""
    program = (
        "import sys; sys.argv = ['kvtiers', 'check', '{}', '--json']\n"
        "from offload.cli import main\n"
        "try: main()\n"
        "finally:\n"
        "    found = {'torch', 'vllm', 'llvmlite'} & sys.modules.keys()\n"
        "    print(sorted(found), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
