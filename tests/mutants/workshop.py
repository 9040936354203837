"""Copies of the tree in which faults are planted, and test runs in these copies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tests.mutants.catalogue import ROOT, Mutant
from tests.mutants.outcomes import TO

NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".cache", ".hypothesis", ".demo", "__pycache__", "*.egg-info"
)
NEED_VLLM = ("tests/offload/connector/", "tests/oracle/", "tests/vllm/")
IMPORTS = {
    "torch": ["torch"],
    "vllm": [
        "torch",
        "vllm.v1.core.sched.scheduler",
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
    ],
}
"""Modules that take longer to import than most tests take to run."""
LEAST_LIMIT_S = 120.0
LIMIT_FACTOR = 20.0
"""A run may take this many times the duration of its tests without a fault, but at least the limit
above: only a run that hangs is stopped."""


class Verdict(Enum):
    """The result of a planted fault."""

    KILLED = "killed"
    HUNG = "hung"
    SURVIVED = "survived"
    SKIPPED = "skipped"
    BROKEN = "broken"

    @property
    def seen(self) -> bool:
        """True if a test has detected the fault."""
        return self in (Verdict.KILLED, Verdict.HUNG)


@dataclass(frozen=True, slots=True)
class Result:
    """One fault's verdict, the test or error that decided it (``by``), and the duration."""

    mutant: Mutant
    verdict: Verdict
    by: str
    seconds: float


@dataclass(slots=True)
class Run:
    """One run of pytest. ``seconds`` and ``outcomes`` are by test, ``last`` is the test that began
    last; ``code`` is ``None`` if the run was stopped at its limit."""

    code: int | None
    output: str
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    last: str = ""

    def of(self, tests: Sequence[str]) -> list[str]:
        """The outcomes whose ids these ids select."""
        return [one for one in self.outcomes if any(_selects(test, one) for test in tests)]


def _selects(wanted: str, test: str) -> bool:
    return test == wanted or test.startswith((f"{wanted}[", f"{wanted}::"))


class Workshop:
    """One copy of the tree in which a fault is planted, the tests run, and the file put back."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self._folder = folder
        self._plants = 0
        self._servers: dict[str, subprocess.Popen[str]] = {}
        shutil.copytree(ROOT, self.tree, ignore=NOT_COPIED, symlinks=True)

    def close(self) -> None:
        """End the processes that run tests."""
        for server in self._servers.values():
            server.kill()
            server.communicate()

    def _server(self, tests: Sequence[str]) -> subprocess.Popen[str]:
        """A process that has imported the modules that these tests need and that are slow to
        import."""
        needed = "vllm" if any(test.startswith(NEED_VLLM) for test in tests) else "torch"
        if needed not in self._servers:
            with (self._folder / "server").open("ab") as log:
                self._servers[needed] = subprocess.Popen(
                    [sys.executable, "-m", "tests.mutants.server", *IMPORTS[needed]],
                    cwd=self.tree,
                    env=os.environ | {"PYTHONPATH": str(self.tree), TO: str(self._outcomes)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        return self._servers[needed]

    @property
    def _outcomes(self) -> Path:
        return self._folder / "outcomes"

    def run(self, tests: Sequence[str], limit_s: float, *, stop_at_first: bool) -> Run:
        """Run these tests; ``limit_s`` ends a run that hangs."""
        output = self._folder / "output"
        for path in (self._outcomes, output):
            path.unlink(missing_ok=True)
        arguments = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "tests.mutants.outcomes"]
        arguments += [f"--basetemp={self._folder / 'scratch'}", f"--timeout={limit_s:.0f}"]
        arguments += ["--hypothesis-seed=0", *(["-x"] if stop_at_first else []), *tests]
        order: dict[str, object] = {"arguments": arguments, "output": str(output)}
        code = self._serve(self._server(tests), order, limit_s + 30)
        run = Run(code, output.read_text(errors="replace") if output.exists() else "")
        return self._read(run)

    def _serve(
        self, server: subprocess.Popen[str], order: dict[str, object], limit_s: float
    ) -> int | None:
        """The exit code of an order; ``None`` if it was stopped at the limit."""
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        child, late = server.stdout.readline(), threading.Event()
        if not child:
            log = (self._folder / "server").read_text(errors="replace")
            raise RuntimeError(f"the process that runs the tests has ended: {log[-2000:]}")

        def stop() -> None:
            late.set()
            kill_group(int(child))

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            code = int(server.stdout.readline())
        finally:
            timer.cancel()
            kill_group(int(child))  # files that the tests have left behind
        return None if late.is_set() else code

    def _read(self, run: Run) -> Run:
        lines = self._outcomes.read_text().splitlines() if self._outcomes.exists() else []
        for record in map(json.loads, lines):
            test, outcome = record["id"], record["outcome"]
            if outcome == "began":
                run.last = test
            elif run.outcomes.get(test) != "failed":
                run.outcomes[test] = outcome
                run.seconds[test] = run.seconds.get(test, 0.0) + record["seconds"]
        return run

    def try_out(self, mutant: Mutant, seconds: Mapping[str, float]) -> Result:
        """Plant a fault and run the tests that should detect it. ``seconds`` are the times of tests
        without a fault."""
        path = self.tree / mutant.file
        sound, stamp = path.read_bytes(), path.stat().st_mtime
        usual = sum(
            s for test, s in seconds.items() if any(_selects(t, test) for t in mutant.tests)
        )
        limit_s = max(LEAST_LIMIT_S, LIMIT_FACTOR * usual)
        began = time.monotonic()
        try:
            path.write_text(mutant.plant(self.tree))
            # Compiled files are identified by size and time in whole seconds, which must differ
            # each time.
            self._plants += 1
            os.utime(path, (stamp, stamp + self._plants))
            run = self.run(mutant.tests, limit_s, stop_at_first=True)
            if judge(run)[0] is Verdict.HUNG:  # perhaps suspended; a fault hangs twice
                run = self.run(mutant.tests, limit_s, stop_at_first=True)
        finally:
            path.write_bytes(sound)
            os.utime(path, (stamp, stamp))
        verdict, by = judge(run)
        return Result(mutant, verdict, by, time.monotonic() - began)


def kill_group(group: int) -> None:
    """End all processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def judge(run: Run) -> tuple[Verdict, str]:
    """The verdict of a run with a planted fault, and the test or the reason."""
    failed = [test for test, outcome in run.outcomes.items() if outcome == "failed"]
    if run.code is None:
        hung = Verdict.HUNG, run.last
        return hung if run.last else (Verdict.BROKEN, "no test had begun at the time limit")
    if run.code < 0:
        return Verdict.KILLED, f"{run.last} (signal {-run.code})"
    if run.code == 1 and failed:
        hung = "Timeout (>" in run.output
        return (Verdict.HUNG if hung else Verdict.KILLED), failed[0]
    if run.code == 0:
        passed = any(outcome == "passed" for outcome in run.outcomes.values())
        return (Verdict.SURVIVED if passed else Verdict.SKIPPED), ""
    lines = [line for line in run.output.splitlines() if line.strip()]
    return Verdict.BROKEN, f"pytest ended with {run.code}: {lines[-1] if lines else ''}"
