"""Runs the probes of ``schedule.toml`` one after the other, most important first.

    python scripts/gpu_box/run.py OUT [--budget SECONDS] [--resume FILE] [--again] [NAMES ...]

Each probe is a process with its own time limit, in a separate session: a probe that hangs is killed
with all processes that it started, and a probe that crashes does not affect the others. A probe
writes its numbers to the file $PROBE_RESULT.

After each probe, ``OUT/results.json`` has the results of all probes, and ``OUT/logs.zip`` their
output, so that few files have to be brought back from the machine. ``--resume`` names a file with
earlier results, for example of another machine; it is kept up to date. A probe with a result is not
run again, unless it was cut off because the budget was spent, or waits for something that has not
arrived; ``--again`` repeats failed probes. Exits with 0 if every probe has succeeded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contents import HERE, NOT_YET

ROOT = HERE.parents[1]
RESULTS = "results.json"
LOGS = "logs.zip"
TAIL_BYTES = 4000
LOG_BYTES = 2 << 20
"""Maximum size of a kept log. Of a longer log, only the end is kept."""
GRACE_S = 5.0
"""A probe that is stopped has this much time to end by itself, and after it was killed as much
again to disappear."""
UNFINISHED = ("cut off", "not yet")
"""The beginnings of the status of probes that a later run repeats."""

Result = dict[str, Any]
Results = dict[str, Result]


@dataclass(frozen=True)
class Probe:
    """One entry of the schedule. The probe is skipped unless all probes in ``needs`` have
    succeeded. A probe that may harm the GPU is ``last``: unless it is named, it runs only when all
    other probes have a result."""

    name: str
    command: list[str]
    limit_s: float
    about: str
    needs: list[str] = field(default_factory=list)
    last: bool = False


def schedule(path: Path) -> list[Probe]:
    """The probes of a file, in its order. Raises ``ValueError`` for a schedule that cannot run."""
    probes = [Probe(**entry) for entry in tomllib.loads(path.read_text())["probe"]]
    seen: set[str] = set()
    for probe in probes:
        if probe.name in seen or not set(probe.needs) <= seen:
            raise ValueError(f"{path}: {probe.name} occurs twice, or needs a later probe")
        seen.add(probe.name)
    return probes


def run(probe: Probe, out: Path, left_s: float) -> Result:
    """Run one probe for at most ``left_s`` seconds, and return its result."""
    numbers, log_path = out / "numbers.json", out / f"{probe.name}.txt"
    numbers.unlink(missing_ok=True)
    limit_s = min(probe.limit_s, left_s)
    began = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable if word == "python" else word for word in probe.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"PROBE_RESULT": str(numbers), "PYTHONPATH": _python_path()},
            start_new_session=True,
        )
        try:
            status = _status(process.wait(limit_s))
        except subprocess.TimeoutExpired:
            how = "stopped" if limit_s == probe.limit_s else "cut off"
            status = f"{how} after {limit_s:.0f} s"
        finally:
            left = _end(process, numbers)
    if left:
        status += f"; {left} of its processes cannot be killed"
    output = log_path.read_bytes()
    _archive(out / LOGS, log_path)
    return {
        "name": probe.name,
        "about": probe.about,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "numbers": _read(numbers),
        "tail": output[-TAIL_BYTES:].decode(errors="replace"),
    }


def _status(code: int) -> str:
    if code == 0:
        return "ok"
    if code == NOT_YET:
        return "not yet"
    return f"exit {code}" if code > 0 else f"signal {-code}"


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _end(process: subprocess.Popen[bytes], numbers: Path) -> int:
    """End all processes of a probe, because they would hold GPU memory that the next probe needs.
    Returns how many are left: a process inside a driver that hangs cannot be killed."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE_S)
    left = kill_all(numbers)
    process.poll()
    return left


def kill_all(numbers: Path) -> int:
    """Kill the processes that have this $PROBE_RESULT, in whatever session they are, and wait for
    them. Returns how many are left."""
    end = time.monotonic() + GRACE_S
    while found := _processes(f"PROBE_RESULT={numbers}".encode()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            return len(found)
        time.sleep(0.01)
    return 0


def _processes(variable: bytes) -> list[int]:
    """The processes with this variable in their environment. Ended processes have an empty
    environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _archive(archive: Path, log: Path) -> None:
    """Move a log into the archive. The archive is replaced at once, so it is always complete."""
    part = archive.with_suffix(".part")
    if archive.exists():
        shutil.copyfile(archive, part)
    with zipfile.ZipFile(part, "a", zipfile.ZIP_DEFLATED) as whole:
        earlier = sum(name.startswith(f"{log.stem}.") for name in whole.namelist())
        whole.writestr(f"{log.stem}.{earlier + 1}.txt", log.read_bytes()[-LOG_BYTES:])
    part.replace(archive)
    log.unlink()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write(path: Path, results: Results) -> None:
    """Write the whole file or nothing: the machine may disappear at any moment."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def read_results(path: Path | None) -> Results:
    """The results in a file; none if there is no file yet."""
    found = _read(path) if path is not None else None
    return found if isinstance(found, dict) else {}


def is_open(result: Result | None) -> bool:
    """True if the probe has no result yet that counts."""
    return result is None or result["status"].startswith(UNFINISHED)


def still_open(probes: list[Probe], results: Results) -> list[str]:
    """The names of the probes that can still get a result, except those that are ``last``. A probe
    cannot get one if a probe that it needs has failed."""
    failed: set[str] = set()
    found = []
    for probe in probes:
        done = results.get(probe.name)
        if not is_open(done):
            failed |= {probe.name} if done and done["status"] != "ok" else set()
        elif failed & set(probe.needs):
            failed.add(probe.name)
        elif not probe.last:
            found.append(probe.name)
    return found


def why_not(probe: Probe, probes: list[Probe], results: Results, left_s: float) -> str:
    """The reason why a probe is skipped, or an empty text."""
    for name in probe.needs:
        if results.get(name, {}).get("status") != "ok":
            return f"{name} has not succeeded"
    if left_s < probe.limit_s / 2:
        return "no time left"
    if probe.last and (before := still_open(probes, results)):
        return f"comes last, after {', '.join(before)}"
    return ""


def run_all(options: argparse.Namespace, probes: list[Probe], results: Results) -> int:
    """Run the chosen probes, and return how many have not succeeded."""
    end = time.monotonic() + options.budget
    chosen = [probe for probe in probes if not options.names or probe.name in options.names]
    good = 0
    for probe in chosen:
        done = results.get(probe.name)
        left_s = end - time.monotonic() - 2 * GRACE_S  # to end it
        others = [] if options.names else probes
        if done is not None and not is_open(done) and (done["status"] == "ok" or not options.again):
            text = f"{done['status']} (from before)"
        elif reason := why_not(probe, others, results, left_s):
            text = f"skipped: {reason}"
        else:
            results[probe.name] = done = run(probe, options.out, left_s)
            for path in filter(None, (options.out / RESULTS, options.resume)):
                write(path, results)
            text = f"{done['status']} in {done['seconds']} s"
        good += done is not None and done["status"] == "ok"
        print(f"{probe.name:24} {text}", flush=True)
    print(f"{good} of {len(chosen)} succeeded")
    return len(chosen) - good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("names", nargs="*", help="probes; all of the schedule if none is named")
    parser.add_argument("--schedule", type=Path, default=HERE / "schedule.toml")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds in total")
    parser.add_argument("--resume", type=Path, help="file with the results of an earlier run")
    parser.add_argument("--again", action="store_true", help="also repeat probes that have failed")
    options = parser.parse_intermixed_args(arguments)  # names may also come after options
    probes = schedule(options.schedule)
    if unknown := sorted(set(options.names) - {probe.name for probe in probes}):
        parser.error(f"{options.schedule} has no probe {', '.join(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    # A command that is stopped must not leave a probe behind that holds the GPU's memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    kill_all(options.out / "numbers.json")
    results = read_results(options.resume) | read_results(options.out / RESULTS)
    write(options.out / RESULTS, results)
    return int(run_all(options, probes, results) > 0)


if __name__ == "__main__":
    sys.exit(main())
