"""Runs the probes of ``schedule.toml`` one after the other, most important first.

    python scripts/gpu_box/run.py OUT [--budget SECONDS] [--again] [NAMES ...]

Each probe is a process with its own time limit, in a separate session: a probe that hangs is killed
with all processes that it started, and a probe that crashes does not affect the others. After each
probe, ``OUT/NAME.json`` contains its result and ``OUT/NAME.txt`` its output. A probe with a result
is not run again; ``--again`` repeats failed probes. Exits with 0 if every probe has succeeded.

A probe writes its numbers to the file $PROBE_RESULT.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TAIL_BYTES = 4000
GRACE_S = 5.0
"""A probe that is stopped has this much time to end by itself."""


@dataclass(frozen=True)
class Probe:
    """One entry of the schedule. The probe is skipped unless all probes in ``needs`` have
    succeeded."""

    name: str
    command: list[str]
    limit_s: float
    about: str
    needs: list[str] = field(default_factory=list)


def schedule(path: Path) -> list[Probe]:
    """The probes of a file, in its order. Raises ``ValueError`` for a schedule that cannot run."""
    probes = [Probe(**entry) for entry in tomllib.loads(path.read_text())["probe"]]
    seen: set[str] = set()
    for probe in probes:
        if probe.name in seen or not set(probe.needs) <= seen:
            raise ValueError(f"{path}: {probe.name} occurs twice, or needs a later probe")
        seen.add(probe.name)
    return probes


def run(probe: Probe, out: Path, left_s: float) -> dict[str, Any]:
    """Run one probe and return its result."""
    numbers = out / f"{probe.name}.numbers.json"
    numbers.unlink(missing_ok=True)
    limit_s = min(probe.limit_s, left_s)
    began = time.monotonic()
    with (out / f"{probe.name}.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable if word == "python" else word for word in probe.command],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"PROBE_RESULT": str(numbers), "PYTHONPATH": _python_path()},
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            status = "ok" if code == 0 else f"signal {-code}" if code < 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:.0f} s"
        finally:
            _end(process)
    return {
        "name": probe.name,
        "about": probe.about,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "numbers": _read(numbers),
        "tail": (out / f"{probe.name}.txt").read_bytes()[-TAIL_BYTES:].decode(errors="replace"),
    }


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """No process of a probe may be left, because it would hold GPU memory that the next probe
    needs."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the whole file or nothing: the machine may disappear at any moment."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def why_not(probe: Probe, out: Path) -> str:
    """The reason why a probe is skipped, or an empty text."""
    for name in probe.needs:
        needed = _read(out / f"{name}.json")
        if needed is None or needed["status"] != "ok":
            return f"{name} has not succeeded"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--schedule", type=Path, default=HERE / "schedule.toml")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds in total")
    parser.add_argument("--again", action="store_true", help="also repeat probes that have failed")
    options = parser.parse_args(arguments)
    probes = schedule(options.schedule)
    chosen = [probe for probe in probes if not options.names or probe.name in options.names]
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget
    good = 0
    for probe in chosen:
        path = options.out / f"{probe.name}.json"
        done = _read(path)
        left_s = end - time.monotonic()
        if done is not None and (done["status"] == "ok" or not options.again):
            text = f"{done['status']} (from before)"
            good += done["status"] == "ok"
        elif reason := why_not(probe, options.out):
            text = f"skipped: {reason}"
        elif left_s < min(probe.limit_s, 10.0):
            text = "skipped: no time left"
        else:
            result = run(probe, options.out, left_s)
            write(path, result)
            good += result["status"] == "ok"
            text = f"{result['status']} in {result['seconds']} s"
        print(f"{probe.name:24} {text}", flush=True)
    print(f"{good} of {len(chosen)} succeeded")
    return int(good < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
