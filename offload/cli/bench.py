"""``kvtiers bench``: runs the benchmarks of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

import offload
from offload.cli.common import give_up, make_app

app = make_app()

PASS_ALL_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": list[str](),
}


@app.command(context_settings=PASS_ALL_ON)
def bench(context: typer.Context) -> None:
    """Run a benchmark of this project, like python -m bench in a checkout."""
    checkout = Path(offload.__file__).resolve().parents[1]
    if not (checkout / "bench" / "__main__.py").is_file():
        give_up(
            "bench",
            f"the benchmarks are not installed beside {Path(offload.__file__).parent}. Run "
            "python -m bench in a checkout of the source",
        )
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "bench", *context.args]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, env=env) as process:
        while (code := _ended(process)) is None:
            pass
    raise SystemExit(code if code >= 0 else 128 - code)


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Wait for the benchmark's exit code. After Ctrl-C, which reaches the benchmark as well, it
    waits for the benchmark to clean up and returns ``None``."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        return None
