"""``kvtiers check``: reports the same problems as a server's start, quickly and without vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    for words in ("4 problems", 'kv_role: loads and stores (got "kv_producer")', "$.cpu.capacity",
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
        ("/no/such/file", "/no/such/file: does not exist. Name a file"),
        ("/proc", "/proc: is not a file. Name a file"),
        ('{"kv_connector": "LMCacheConnectorV1"}', f'Use "kv_connector": "{NAME}".'),
    ],
)
def test_bad_input_is_reported(where: str, words: str) -> None:
    found = kvtiers("check", where)
    assert (found.code, found.out) == (2, "")
    assert words in found.err


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
