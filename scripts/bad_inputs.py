"""Times how soon each bad input is answered, and prints the slowest:

    python scripts/bad_inputs.py [--rounds 3] [--slowest 10] [--json]

The inputs are those of ``tests/offload/cli/test_bad_inputs.py``, every wrong configuration of
``tests/offload/config/test_schema.py``, and servers that do not answer. Each one is a process, as
in a shell. An input is answered when its message has been printed; the time is the longest of all
rounds. Mistakes in vLLM's own flags are shown separately: only vLLM knows its flags, and importing
it takes long. The exit code is 1 if a message is missing, an exit code is wrong, or another input
was answered after more than two seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402  # the root must be on the path
from tests.offload.cli.rank_folders import make_rank_folder
from tests.offload.cli.test_bad_inputs import BAD, ENVIRONMENT, make_files
from tests.offload.config.test_schema import REFUSED

ANSWER_MAX_S = 2.0
MESSAGES = ROOT / "tests/data/messages"


@dataclass(frozen=True, slots=True)
class BadInput:
    """The arguments of ``kvtiers``, the expected exit code, and a part of the expected message."""

    words: tuple[str, ...]
    code: int
    text: str
    needs_vllm: bool = False

    def __str__(self) -> str:
        line = " ".join(self.words)
        return line if len(line) <= 70 else f"{line[:67]}..."


@dataclass(slots=True)
class Refusal:
    """The output of a bad input. ``answered_s`` is ``None`` if the message was never printed."""

    line: str
    answered_s: float | None
    ended_s: float
    code: int
    fault: str = ""
    needs_vllm: bool = False


def all_inputs(silent: str) -> Iterator[BadInput]:
    """Every bad input. ``silent`` is the address of a server that never answers."""
    for code, line, text in BAD:
        yield BadInput(tuple(line.split(" ")), code, text)
    for name, config in REFUSED.items():
        if isinstance(config, dict):
            shown = (MESSAGES / f"config-{name}.txt").read_text(encoding="utf-8").splitlines()
            yield BadInput(("check", json.dumps(config)), 1, shown[1].strip())
    waits = "has not answered for 1 s; waiting up to 10 s"
    yield BadInput(("top", silent, "--once"), 1, waits)
    yield BadInput(("inspect", "kv", "--server", silent), 1, waits)
    for command in (("doctor", "llama"), ("plan", "llama", "--cpu", "1GiB")):
        words = (*command, "--max-modle-len", "512")
        yield BadInput(words, 2, "Did you mean --max-model-len?", needs_vllm=True)


def refuse(bad: BadInput, folder: Path, environment: dict[str, str]) -> Refusal:
    """Run one process to its end."""
    command = [sys.executable, "-P", "-m", "offload.cli", *bad.words]
    answered_s, shown = None, b""
    start = time.monotonic()
    with (
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
        selectors.DefaultSelector() as ready,
    ):
        assert process.stdout is not None
        ready.register(process.stdout, selectors.EVENT_READ)
        while ready.select() and (part := os.read(process.stdout.fileno(), 1 << 16)):
            shown += part
            if answered_s is None and bad.text in shown.decode(errors="replace"):
                answered_s = time.monotonic() - start
        code = process.wait()
    ended_s = time.monotonic() - start
    found = Refusal(str(bad), answered_s, ended_s, code, needs_vllm=bad.needs_vllm)
    found.fault = fault_of(bad, found)
    return found


def fault_of(bad: BadInput, found: Refusal) -> str:
    """Why this refusal is not as it should be, or an empty text."""
    if found.answered_s is None:
        return f'"{bad.text}" was not printed'
    if found.code != bad.code:
        return f"exit code {found.code} instead of {bad.code}"
    if found.answered_s > ANSWER_MAX_S and not bad.needs_vllm:
        return f"answered after {found.answered_s:.1f} s"
    return ""


def worst(rounds: list[Refusal]) -> Refusal:
    """The round that counts: one with a fault, else the slowest."""
    return max(rounds, key=lambda found: (bool(found.fault), found.answered_s or 0.0))


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """The address of a port that accepts connections but never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def run_all(rounds: int) -> list[Refusal]:
    """Run every input several times, slowest first."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | ENVIRONMENT
    with tempfile.TemporaryDirectory() as name, silent_server() as silent:
        folder = Path(name)
        make_files(folder)
        make_rank_folder(folder / "kv", range(2))
        inputs = list(all_inputs(silent))
        seen: dict[BadInput, list[Refusal]] = {bad: [] for bad in inputs}
        for number in range(rounds):
            for place, bad in enumerate(inputs, 1):
                progress = f"round {number + 1} of {rounds}, input {place} of {len(inputs)}"
                print(f"\rbad_inputs: {progress}", end="", file=sys.stderr, flush=True)
                seen[bad].append(refuse(bad, folder, environment))
        print(file=sys.stderr)
    found = [worst(each) for each in seen.values()]
    return sorted(found, key=lambda each: -(each.answered_s or float("inf")))


def table(found: list[Refusal]) -> str:
    """The refusals as a Markdown table."""
    rows = ["| input | answered after | ended after |", "|---|---|---|"]
    for each in found:
        answer = "-" if each.answered_s is None else f"{each.answered_s:.2f} s"
        rows.append(f"| `kvtiers {each.line}` | {answer} | {each.ended_s:.2f} s |")
    return "\n".join(rows)


def main() -> int:
    """Run everything and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each input")
    parser.add_argument("--slowest", type=int, default=10, help="number of inputs to print")
    parser.add_argument("--json", action="store_true", help="print all inputs as JSON")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    found = run_all(max(1, arguments.rounds))
    faults = [each for each in found if each.fault]
    if arguments.json:
        inputs = [asdict(each) for each in found]
        print(json.dumps({"load": load, "faults": len(faults), "inputs": inputs}, indent=1))
        return 1 if faults else 0
    own = [each for each in found if not each.needs_vllm]
    print(table(own[: arguments.slowest]))
    print(f"\n{len(own)} bad inputs, {len(faults)} faults, load {load:.1f} at the beginning.\n")
    print("Mistakes in vLLM's own flags:\n")
    print(table([each for each in found if each.needs_vllm]))
    for each in faults:
        print(f"fault: kvtiers {each.line}: {each.fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
