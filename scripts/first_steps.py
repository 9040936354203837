"""Times the first steps of a new user, in a fresh clone, and prints a Markdown table:

    python scripts/first_steps.py [FOLDER]

The steps are those of the README and of the guide for policies: clone, ``./run demo``, a custom
policy, ``./run serve`` with the demo's model, two requests, and ``kvtiers top``. They run one after
the other, as they are printed there, except that the server has a free port and its disk tier is in
the script's folder. The clone gets its own virtual environment of about 4 GiB and is removed at the
end. ``docs/guides/serve.md`` shows the result of one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDE = "docs/guides/write-a-policy.md"
MODEL = ".demo/model"
START_MAX_S = 1800.0
PROMPT = "The cache keeps what the next request needs. " * 12


class Clock:
    """The times of the steps, in seconds."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Time one step, and print its name and its time on stderr."""
        print(f"first_steps: {what}", file=sys.stderr, flush=True)
        start = time.monotonic()
        yield
        self.steps.append((what, time.monotonic() - start))
        print(f"first_steps: {shown(self.steps[-1][1])}", file=sys.stderr, flush=True)

    def table(self) -> str:
        """All steps in Markdown."""
        rows = [f"| {what} | {shown(seconds)} |" for what, seconds in self.steps]
        rows.append(f"| all steps | {shown(sum(seconds for _, seconds in self.steps))} |")
        return "\n".join(["| step | time |", "|---|---|", *rows])


def shown(seconds: float) -> str:
    """A duration in minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def environment() -> dict[str, str]:
    """The caller's environment without an active virtual environment and without module paths."""
    lost = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHON")
    found = {name: value for name, value in os.environ.items() if name not in lost}
    inside = os.environ.get("VIRTUAL_ENV")
    if inside:
        parts = [part for part in found["PATH"].split(":") if not part.startswith(inside)]
        found["PATH"] = ":".join(parts)
    return found


def run(*command: object, folder: Path, **more: str) -> str:
    """Run a command to its end, and return its output."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment() | more,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def own_policy(clone: Path, folder: Path) -> None:
    """Follow the guide for policies: write its files, run its tests, simulate it."""
    text = (clone / GUIDE).read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        named = re.match(r"# (\w+\.py)\n", block)
        if named:
            (folder / named[1]).write_text(block, encoding="utf-8")
    [words] = re.findall(r"^kvtiers simulate (.*?)```", text, re.DOTALL | re.MULTILINE)
    programs = clone / ".venv/bin"
    run(programs / "pytest", "-q", "test_my_policy.py", folder=folder)
    run(programs / "python", "make_trace.py", folder=folder)
    arguments = words.replace("\\\n", " ").split()
    print(run(programs / "kvtiers", "simulate", *arguments, folder=folder), file=sys.stderr)


def serve_command(readme: str, disk: Path, port: int) -> list[str]:
    """The command in the README that serves the demo's model, with this folder and this port."""
    [line] = re.findall(rf"^\./run serve {re.escape(MODEL)} .*$", readme, re.MULTILINE)
    command = [re.sub(r"^/.*(?=:)", str(disk), word) for word in shlex.split(line)]
    return [*command, "--port", str(port)]


@contextlib.contextmanager
def served(clone: Path, folder: Path) -> Iterator[str]:
    """``./run serve`` with the model that the demo has made; yields its address when it answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    readme = (clone / "README.md").read_text(encoding="utf-8")
    command = serve_command(readme, folder / "kv", port)
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(
        command, cwd=clone, env=environment(), stdout=log, stderr=log, start_new_session=True
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, folder / "server.log")
        yield f"127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        log.close()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers. Raises ``RuntimeError`` with its log if it ends before."""
    end = time.monotonic() + START_MAX_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"the server does not answer:\n{log.read_text()[-4000:]}")


def ask(address: str, model: str) -> None:
    """Send one request, as a client does."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=START_MAX_S).close()


def take_the_steps(clock: Clock, folder: Path) -> None:
    """Every step of the table."""
    clone, work = folder / "kvtiers", folder / "work"
    work.mkdir()
    run("git", "clone", "--quiet", ROOT, clone, folder=folder)
    with clock.step("`./run setup`: the environment (about 4 GiB)"):
        run("./run", "setup", folder=clone)
    with clock.step("`./run demo`: hits from the CPU tier and, after a restart, from disk"):
        print(run("./run", "demo", folder=clone, COLUMNS="100"), file=sys.stderr)
    with clock.step("write a policy as in the guide, run the conformance kit, simulate it"):
        own_policy(clone, work)
    with contextlib.ExitStack() as stack:
        with clock.step("`./run serve` with the demo's model, until it answers"):
            address = stack.enter_context(served(clone, work))
        with clock.step("two requests, and why they missed (`kvtiers top`)"):
            for _ in range(2):
                ask(address, MODEL)
            top = [clone / ".venv/bin/kvtiers", "top", address, "--once", "--interval", "0"]
            answer = run(*top, folder=work)
    print(answer, file=sys.stderr)
    if "because" not in answer:
        raise RuntimeError("kvtiers top does not say why the requests missed")


def main() -> int:
    """Take all steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="where to clone (default: a temporary folder)")
    place = Path(tempfile.mkdtemp(prefix="first-steps-", dir=parser.parse_args().folder))
    clock = Clock()
    load = os.getloadavg()[0]
    try:
        take_the_steps(clock, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    commit = run("git", "rev-parse", "--short", "HEAD", folder=ROOT).strip()
    print(clock.table())
    print(f"\nCommit `{commit}`, {os.cpu_count()} processors, load {load:.0f} at the beginning.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
