"""The processors on which our threads may run if OpenMP has bound a worker's main thread to a
core."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from offload.connector.worker.cpu_affinity import threads_unbound
from tests.patience import PATIENCE_S

CPUS = frozenset(os.sched_getaffinity(0))
ONE = frozenset({min(CPUS)})

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two processors")


def _masks() -> list[frozenset[int]]:
    """The processors of a thread started now, and of the calling thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(frozenset(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    return [*found, frozenset(os.sched_getaffinity(0))]


def _worker(results: multiprocessing.Queue, variable: str) -> None:
    """A worker as vLLM starts it, bound to a core by environment variables."""
    os.sched_setaffinity(0, ONE)
    if variable:
        os.environ[variable] = str(min(CPUS))
    with threads_unbound():
        results.put(_masks()[0])
    results.put(_masks())


def _in_worker(variable: str) -> tuple[frozenset[int], list[frozenset[int]]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_worker, args=(results, variable))
    process.start()
    inside, after = results.get(timeout=PATIENCE_S), results.get(timeout=PATIENCE_S)
    process.join()
    return inside, after


def test_threads_of_a_bound_worker_may_use_its_parents_processors() -> None:
    inside, after = _in_worker("GOMP_CPU_AFFINITY")
    assert inside == CPUS
    assert after == [ONE, ONE]  # the model's own thread stays bound


def test_a_mask_that_openmp_has_not_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _in_worker("") == (ONE, [ONE, ONE])
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    with threads_unbound():  # not a worker
        assert _masks() == [CPUS, CPUS]
