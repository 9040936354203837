"""Chooses the processors on which this project's threads of a worker may run.

vLLM's CPU platform binds the OpenMP threads of a worker to cores and leaves other cores free, one
of them for connectors. GNU's and Intel's OpenMP bind the main thread to the first of these cores,
and the threads that it starts inherit this binding. Without this module, all of this project's
threads would share the core of the model's first thread, for which all others wait at the end of
every loop. See docs/decisions/0072.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Iterator

logger = logging.getLogger(__name__)

BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")
"""Environment variables that make OpenMP bind threads to cores."""


@contextlib.contextmanager
def threads_unbound() -> Iterator[None]:
    """Inside the context, let new threads run wherever this worker's parent process may run.

    This applies only if OpenMP binds threads and ``multiprocessing`` started this process. In all
    other cases nothing is changed, because the user has chosen the processors on purpose.
    """
    own = wide = frozenset[int]()
    parent = multiprocessing.parent_process()
    if parent is not None and any(os.environ.get(name) for name in BINDING):
        try:
            own, wide = (frozenset(os.sched_getaffinity(pid or 0)) for pid in (0, parent.pid))
            os.sched_setaffinity(0, wide)
        except (OSError, AttributeError) as error:
            # not Linux, or not permitted: this only costs speed
            logger.debug("kvtiers: threads stay on the processors %s: %s", sorted(own), error)
            own = wide
    if own != wide:
        logger.info(
            "kvtiers: OpenMP has bound this thread to processor %s; the threads of kvtiers may "
            "use %s",
            ",".join(map(str, sorted(own))),
            ",".join(map(str, sorted(wide))),
        )
    try:
        yield
    finally:
        if own != wide:
            os.sched_setaffinity(0, own)
