"""More than forty bad inputs: each gets one clear message, before vLLM or torch is imported, which
takes many seconds. ``scripts/bad_inputs.py`` measures how soon each message is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.offload.cli.rank_folders import ROOT
from tests.scripts import load_script

WRONG_TRANSFER = json.dumps(
    {
        "kv_connector": "KvTiersConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tires": []},
    },
    separators=(",", ":"),
)
ENVIRONMENT = {"COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
BAD: list[tuple[int, str, str]] = [
    (2, "inspct kv", "No such command 'inspct'. Did you mean 'inspect'?"),
    (2, "top ftp://x --once", "Write localhost:8000"),
    (2, "top host:port --once", "is not the address of a server"),
    (2, "top localhost:8000 --interval nan", "Invalid value for '--interval'"),
    (2, "top localhost:8000 --interval=-1", "(got -1)"),
    (1, "top 127.0.0.1:1 --once", "/metrics does not answer: Connection refused"),
    (1, "top 127.0.0.1 --once", "Did you mean 127.0.0.1:8000?"),
    (2, "why /no/such.jsonl", "/no/such.jsonl: does not exist"),
    (2, "why /proc/version --last 0", "--last: must be at least 1"),
    (2, "why /proc/version --reason nothing", '--reason: "nothing" is unknown. Known: '),
    (2, "why text", "text: is not a file of record_requests. Start the server with"),
    (2, "why config.json", "config.json: is not a file of record_requests"),
    (2, "inspect ", "the path is empty"),
    (2, "clear  --all --yes", "the path is empty"),
    (2, "inspect /no/such", "/no/such: does not exist. Give the path of a tier"),
    (2, "inspect /proc/version", "/proc/version: is not a folder"),
    (2, "inspect . --server a:b", "--server: is not the address of a server"),
    (2, "verify . --rate 8G", "--rate: has an ambiguous unit"),
    (2, "verify . --key-file /no/key", "/no/key: does not exist. Give --key-file"),
    (2, "clear .", "is required because there is no terminal to ask on"),
    (2, "clear . --unused-for soon --yes", '--unused-for: is not a time (got "soon")'),
    (2, "clear . --all --json", "--yes: is required with --json"),
    (2, "export . /no/such/file.kvt", "Name a file in a folder that exists"),
    (2, "import /no/such.kvt kv", "/no/such.kvt: does not exist"),
    (2, "import /proc/version kv --type tape", '(got "tape"). Use lmdb or file'),
    (2, "import text kv --capacity 0", '--capacity: must be positive (got "0")'),
    (3, "doctor /no/such/model", "/no/such/model does not exist"),
    (
        2,
        "doctor llama --kv-cpu 1GiB",
        "--kv-cpu is an option of kvtiers serve. Give the tiers with",
    ),
    (1, "top 127.0.0.1:1/grüße --once", "does not answer: Connection refused"),
    (2, "doctor --port 8000 m", "the model comes first"),
    (3, "doctor /proc", "/proc has no config.json"),
    (3, "doctor /proc/version", "/proc/version is a file"),
    (2, "doctor llama --kv-transfer-config {", "Refused  --kv-transfer-config: is not JSON: "),
    (2, "doctor llama --kv-transfer-config=" + WRONG_TRANSFER, "Refused  $.tires: unknown option"),
    (3, "doctor a/b/c", "a/b/c is neither a folder nor a possible name on the hub"),
    (3, "doctor a/b", "a/b is not a folder and has no local copy, and HF_HUB_OFFLINE is set"),
    (3, "plan /no/such/model --cpu 1GiB", "MODEL /no/such/model: "),
    (2, "plan", "--cpu: is required"),
    (2, "plan m --cpu 1GiB --dsik 1TiB", "Did you mean --disk?"),
    (2, "plan ./llama --cpu 1GiB --disk 10", "--disk: a capacity of 10 bytes leaves no space for"),
    (2, "plan --token-bytes x --cpu 1GiB", "--token-bytes: is not a size"),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --mix user=3", '--mix: has "user=3"'),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --link 0", '--link: must be positive (got "0")'),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --gpu-tflops 9", "--gpu-tflops: needs --parameters"),
    (2, "plan llama --cpu 1GiB --kv-transfer-config {", "plan: --kv-transfer-config: is not JSON"),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --trace /no/such", "--trace: cannot be read"),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --policy lur", "--policy: "),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --disk-read 3GB", "--disk-read: has no effect without"),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --endurance 3TB", "--endurance: has no effect without"),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --disk-policy lru", "--disk-policy: has no effect"),
    (
        2,
        "plan --token-bytes 1KiB --cpu 1GiB --mix prompt=0,answer=0,system=0",
        "makes no prompt of",
    ),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --mix users=99999999", "Give fewer users or hours"),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --years inf", "--years: must be a finite number"),
    (2, "plan --token-bytes 1KiB --cpu 1GiB --gpu-tflops inf --parameters 9", "(got inf)"),
    (1, "simulate own.jsonl --jobs 1 --csv /dev/full", "/dev/full: cannot be written: No space"),
    (2, "simulate /no/such.jsonl", "/no/such.jsonl: does not exist. Name a trace"),
    (2, "simulate /proc", "/proc: is a folder. Name a trace in it"),
    (2, "simulate text", "text: not JSON lines, at line 1: "),
    (2, "simulate hashes.jsonl", "line 1: TypeError('hash_ids is not a list of numbers')"),
    (2, "simulate t --block-tokens 0", "(got 0)"),
    (2, "simulate t --block-bytes 0", '--block-bytes: must be a size like 2MiB (got "0")'),
    (2, "simulate t --jobs 100000", "(got 100000)"),
    (2, "simulate t --look-ahead 0.2", "--look-ahead: has no effect without arrival times"),
    (2, "simulate t --mode write-back", '--mode: is unknown (got "write-back")'),
    (2, "simulate t --mode exclusive", "--mode: exclusive needs a lower tier"),
    (2, "simulate t --lower-policy lru", "--lower-policy: has no effect without a lower tier"),
    (2, "simulate own.jsonl --format mooncake", 'own.jsonl: line 1: has no "input_length"'),
    (1, "simulate own.jsonl --policy broken:Broken", "policy broken:Broken raised ValueError('no"),
    (1, "simulate own.jsonl --policy broken:Broken --jobs 1", "broken.py, line 4"),
    (2, "simulate own.jsonl --policy keyless:K", "keyless:K\": it raised KeyError('absent')"),
    (2, "simulate t --hints some", "Use one of: none, end, all."),
    (2, "serve m --kv-cpu 8G", "--kv-cpu: has an ambiguous unit"),
    (2, "serve m --kv-disk /data", "--kv-disk: must be PATH:SIZE"),
    (2, "serve m --kv-disk kv:1GiB", "--kv-disk kv:1GiB: must be absolute"),
    (3, "serve /no/such --kv-cpu 64MiB --dry-run", "/no/such: does not exist. Give a folder"),
    (3, "serve /proc --kv-cpu 64MiB --dry-run", "/proc: has no config.json. Give a folder"),
    (3, "serve a/b --kv-cpu 64MiB", "a/b: is not a folder and has no local copy, and HF_HUB"),
    (2, "serve m --dry-run --kv-transfer-config {", "--kv-transfer-config: is not JSON: "),
    (2, "serve m --dry-run --kv-transfer-config=" + WRONG_TRANSFER, "$.tires: unknown option"),
    (2, "serve m --kv_cpu 64MiB --dry-run", "--kv_cpu: is not an option of kvtiers serve. Did"),
    (2, "serve m --kv-extra /no/such", "--kv-extra /no/such: does not exist. Name a file"),
    (2, "serve m --kv-dsik /data:1GiB", "Did you mean --kv-disk?"),
    (2, "check /no/such.json", "/no/such.json: does not exist"),
    (2, "check ", "FILE|JSON: is empty. Name a file, or write"),
    (2, 'check {"cpu":{},"cpu":{}}', 'the JSON: has "cpu" twice in one object. Remove one'),
    (2, "check {", "the JSON: is not JSON: "),
    (2, "check large.json", "large.json: is larger than 1MiB. Name a file"),
    (1, "check " + WRONG_TRANSFER.replace("kv_both", "kv"), 'kv_role: must be "kv_both", because'),
    (1, "check " + WRONG_TRANSFER.replace("kv_role", "kv_rol"), "kv_role: is missing. Use"),
    (1, 'check {"cpu":{"capacity":1}}', "$.cpu.capacity: 1B is too small for any chunk"),
    (1, 'check {"record_trace":"~/t"}', "$.record_trace: must be absolute"),
    (1, 'check {"cpu":{"capacity":"8G"}}', "$.cpu.capacity: has an ambiguous unit"),
    (1, 'check {"cpu":{"capacity":"900TiB"}}', "does not fit into the memory limit"),
    (1, 'check {"tires":[]}', '$.tires: unknown option. Did you mean "tiers"?'),
    (1, 'check {"tiers":[{"type":"lmbd"}]}', '(got "lmbd"). Did you mean "lmdb"?'),
    (1, 'check {"cpu":{"policy":"lur"}}', "$.cpu.policy: "),
]

PROGRAM = """
import json, sys
from tests.offload.cli.rank_folders import kvtiers
found = []
for line in json.load(sys.stdin):
    result = kvtiers(*line.split(" "))
    found.append([result.code, result.out, result.err])
print(json.dumps({"found": found, "imported": sorted({"torch", "vllm"} & sys.modules.keys())}))
"""


def make_files(folder: Path) -> None:
    """The files that the bad inputs name."""
    (folder / "llama").mkdir()
    (folder / "llama/config.json").write_text("{}")  # so that vLLM would be queried about it
    (folder / "text").write_text("no newline at the end")
    (folder / "config.json").write_text('{"cpu": {}}')
    (folder / "large.json").write_text(" " * (2 << 20))
    own = '{"meta": {"block_tokens": 16}}\n{"t": 0, "in": 32, "r": [[0, 2]]}\n'
    (folder / "own.jsonl").write_text(own)
    broken = "from policies.eviction.lru import LruPolicy\nclass Broken(LruPolicy):\n"
    broken += "    def insert(self, key, info):\n        raise ValueError('no\\nroom')\n"
    (folder / "broken.py").write_text(broken)
    (folder / "keyless.py").write_text("{}['absent']\n")
    row = {"timestamp": 0, "input_length": 1024, "hash_ids": "abc"}
    (folder / "hashes.jsonl").write_text(json.dumps(row) + "\n")


def test_forty_bad_inputs(tmp_path: Path) -> None:
    assert len({line for _, line, _ in BAD}) >= 40
    make_files(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([line for _, line, _ in BAD]),
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"} | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["imported"] == []
    for (code, line, text), (found, out, err) in zip(BAD, answer["found"], strict=True):
        shown = out + err
        assert found == code, f"{line}: {shown}"
        assert text in shown, f"{line}: {shown}"
        assert "Traceback" not in shown, line


@pytest.mark.parametrize("words", ["simulate {0}/own.jsonl", "import {0}/text new"])
def test_a_current_folder_that_was_deleted_is_named(tmp_path: Path, words: str) -> None:
    make_files(tmp_path)
    (tmp_path / "gone").mkdir()
    program = f"{sys.executable} -m offload.cli {words.format(tmp_path)}"
    done = subprocess.run(
        f"cd {tmp_path}/gone && rmdir ../gone && exec {program}",
        shell=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"} | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    message = "kvtiers: the current folder was deleted. Change to another one\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_the_measurement_finds_faults(tmp_path: Path) -> None:
    script = load_script("bad_inputs")
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"} | ENVIRONMENT

    def refuse(code: int, text: str) -> Any:
        bad = script.BadInput(("why", "/no/such.jsonl"), code, text)
        return script.refuse(bad, tmp_path, environment)

    assert refuse(2, "something else").fault == '"something else" was not printed'
    assert refuse(1, "does not exist").fault == "exit code 2 instead of 1"
    found = refuse(2, "does not exist")
    assert 0 < found.answered_s <= found.ended_s
    bad = script.BadInput(("why", "/no/such.jsonl"), 2, "does not exist")
    for answered_s, fault in ((1.9, ""), (2.1, "answered after 2.1 s")):
        found.answered_s = answered_s
        assert script.fault_of(bad, found) == fault


def test_the_slowest_round_counts_and_a_faulty_one_before_it() -> None:
    script = load_script("bad_inputs")
    rounds = [script.Refusal("x", answered_s, 1.0, 2) for answered_s in (0.3, 0.5, 0.4)]
    assert script.worst(rounds).answered_s == 0.5
    rounds[0].fault = "exit code 1 instead of 2"
    assert script.worst(rounds).answered_s == 0.3
    rounds[1].answered_s = None
    assert "| `kvtiers x` | - | 1.00 s |" in script.table(rounds)


def test_all_inputs_have_different_arguments() -> None:
    script = load_script("bad_inputs")
    found = [bad.words for bad in script.all_inputs("127.0.0.1:9")]
    assert len(found) > len(BAD) + 40
    assert len(set(found)) == len(found)
