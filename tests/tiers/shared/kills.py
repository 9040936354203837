"""Processes that are killed at random moments, one after the other, while others continue.

They are forked by a helper process that has opened nothing, so that each starts in milliseconds: an
open database must not be used after a fork.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
HELPER = """
import ctypes, importlib, os, random, signal, sys, time
module, function, count, seed, *arguments = sys.argv[1:]
live = getattr(importlib.import_module(module), function)
rng = random.Random(int(seed))
for turn in range(int(count)):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it never ends by itself
        try:
            live(turn, lambda: os.write(writing, b"b"), *arguments)
        except BaseException as error:  # the child must not return into the parent's code
            print(repr(error), flush=True)
        finally:
            os._exit(code)
    os.close(writing)
    if rng.random() < 0.8:  # else it may be killed while it begins
        os.read(reading, 1)
    time.sleep(rng.random() ** 2 * 0.1)
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(reading)
    if code != -signal.SIGKILL:
        sys.exit(1)
"""


@contextmanager
def killed(live: str, count: int, seed: int, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Call ``live``, a ``module:function``, with its turn, ``begun`` and ``arguments`` in ``count``
    processes, one after the other. Each calls ``begun`` when it has begun, continues without end
    and is killed. Then the helper ends; it ends early, with 1, if a process ends by itself."""
    command = [sys.executable, "-c", HELPER, *live.split(":"), str(count), str(seed)]
    command += [str(argument) for argument in arguments]
    helper = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with helper:
        try:
            yield helper
            assert helper.wait(PATIENCE_S) == 0, helper.communicate()[0]
        finally:
            helper.kill()
