"""The checks of MODEL before vLLM is imported, with a real hub on localhost."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from offload.cli import doctor, model_names, vllm_flags
from offload.cli.model_names import wrong_name, wrong_path
from tests.offload.cli.rank_folders import ROOT, kvtiers

NO_CONFIG = "has no config.json"


ERRORS = {"org/hidden": "RepoNotFound", "org/gated": "GatedRepo"}
"""The hub's error codes by the names of models."""


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does; ``GATE`` holds back the answer for ``org/slow``."""

    GATE = threading.Event()

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/")
        if name == "org/slow":
            self.GATE.wait()
        error = ERRORS.get(name)
        self.send_response(500 if name == "org/broken" else 401 if error else 200)
        if error:
            self.send_header("X-Error-Code", error)
        body = b"" if error else b'{"id": "org/model", "siblings": []}'
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub_here() -> Iterator[dict[str, str]]:
    """The environment in which a hub on localhost is asked."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    finally:
        Hub.GATE.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    monkeypatch.setattr(Hub, "GATE", threading.Event())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # long enough for the test's hub to answer, however busy the machine is
    monkeypatch.setattr(model_names, "HUB_PATIENCE_S", 60.0)
    with hub_here() as environment:
        yield environment


NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}


def what(found: tuple[str, str] | None) -> str:
    assert found is not None
    return found[0]


def test_a_model_is_a_folder_with_a_readable_configuration(tmp_path: Path) -> None:
    assert what(wrong_path(str(tmp_path / "no"), [])) == "does not exist"
    assert what(wrong_path(str(tmp_path), [])) == NO_CONFIG
    for name in ("config.json", "params.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("{}")
        assert wrong_path(str(folder), []) is None
        (folder / name).write_text('{"model_type": ')
        assert what(wrong_path(str(folder), [])).startswith(f"has a {name} that is not JSON (")


def test_a_file_is_not_a_model_unless_it_may_be_one(tmp_path: Path) -> None:
    for name, expected in (("config.json", "is a file"), ("model.gguf", None)):
        (tmp_path / name).write_text("{}")
        found = wrong_path(str(tmp_path / name), [])
        assert (found and found[0]) == expected


@pytest.mark.parametrize("flag", ["--hf-config-path=x", "--config-format", "--config"])
def test_a_configuration_may_be_elsewhere(tmp_path: Path, flag: str) -> None:
    assert wrong_path(str(tmp_path), [flag, "x"]) is None


def test_the_intended_folder_is_named(tmp_path: Path) -> None:
    for below in ("llama", "snapshots/4f1a"):
        folder = tmp_path / below.replace("/", "-") / below
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        asked = str(tmp_path / below.replace("/", "-"))
        assert wrong_path(asked, []) == (NO_CONFIG, f"Did you mean {folder}?")
    (tmp_path / "adapter_config.json").write_text("{}")
    found = wrong_path(str(tmp_path), [])
    assert found is not None
    assert found[1].startswith("It is an adapter: give its base model")


def test_a_relative_folder_is_not_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/llama").mkdir(parents=True)
    assert what(wrong_path("models/llama", [])) == NO_CONFIG
    assert wrong_name("models/llama", [], NOWHERE) is None, "the hub is not asked"
    assert wrong_path("models/qwen", []) is None, "it may be a name on the hub"


def test_the_hub_is_asked_about_a_name(hub: dict[str, str]) -> None:
    for name in ("org/model", "org/gated", "org/broken"):
        assert wrong_name(name, [], hub) is None, name
    hidden = wrong_name("org/hidden", [], hub)
    assert what(hidden) == f"is not a folder, and {hub['HF_ENDPOINT']} lists no such model"
    assert what(wrong_name("a/b/c", [], hub)).endswith("a possible name on the hub")


def test_a_hub_that_cannot_be_reached_is_named(hub: dict[str, str]) -> None:
    found = what(wrong_name("org/model", [], NOWHERE))
    assert found.startswith("is not a folder and has no local copy, and http://127.0.0.1:9 cannot")
    assert "Connection refused" in found


def test_a_local_copy_needs_no_hub(hub: dict[str, str], tmp_path: Path) -> None:
    for name, asked in (("model", NOWHERE), ("hidden", hub)):
        copy = tmp_path / f"cache/models--org--{name}/snapshots/4f1a"
        copy.mkdir(parents=True)
        found = wrong_name(f"org/{name}", [], asked)
        assert found is not None, "an empty folder is no copy"
        (copy / "config.json").write_text("{}")
        assert wrong_name(f"org/{name}", [], asked) is None


@pytest.mark.parametrize("model", ["s3://bucket/model", "org/model:Q4_K_M"])
def test_names_of_other_places_are_left_to_vllm(hub: dict[str, str], model: str) -> None:
    assert wrong_name(model, [], NOWHERE) is None


@pytest.mark.parametrize("flag", ["--hf-token=x", "--download_dir", "--config"])
def test_flags_that_change_the_search_leave_it_to_vllm(hub: dict[str, str], flag: str) -> None:
    assert wrong_name("org/model", [flag, "x"], NOWHERE) is None
    for name in ("VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH"):
        assert wrong_name("org/model", [], NOWHERE | {name: "1"}) is None


def test_a_hub_that_does_not_answer_is_named_and_left_to_vllm(
    hub: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_names, "HUB_PATIENCE_S", 0.05)
    assert wrong_name("org/slow", [], hub) is None
    said = capsys.readouterr().err
    assert said.startswith(f"kvtiers: {hub['HF_ENDPOINT']} has not answered for 0.05 s; vLLM waits")


@pytest.mark.parametrize("command", ["doctor MODEL", "plan MODEL --cpu 1GiB", "serve MODEL"])
def test_no_command_asks_vllm_about_a_folder_without_a_model(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_vllm(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(doctor, "_examine", ask_vllm)
    monkeypatch.setattr("os.execv", ask_vllm)
    result = kvtiers(*command.replace("MODEL", str(tmp_path)).split())
    assert result.code == 3
    assert NO_CONFIG in result.out + result.err
    assert "ive a folder with a config.json" in result.out + result.err


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ([], []),
        (["--port", "1"], []),
        (["--kv-a"], []),
        (["--kv-a", "x", "--port", "1", "--kv_a=y=z"], ["x", "y=z"]),
        (["--kv-a.b", "x"], []),
    ],
)
def test_the_values_of_a_flag(flags: list[str], values: list[str]) -> None:
    assert vllm_flags.flag_values(flags, "--kv-a") == values


IMPORTED = """
import sys
from offload.cli import model_names
names = {"huggingface_hub.hf_api", "huggingface_hub.errors"}
model_names._query_hub = lambda *_: print(sorted(names - sys.modules.keys()))
model_names.wrong_name("a/b", [], {})
"""


def test_the_time_for_the_hub_does_not_include_imports() -> None:
    """If imports counted, vLLM would be imported on a slow machine for an impossible name."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
