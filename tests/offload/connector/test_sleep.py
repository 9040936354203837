"""The parts of sleep mode: the question whether the weights have changed, their digest, and epochs
that are taken back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from offload.connector import compat
from offload.connector.compat import worker_sleep
from offload.connector.metadata import OffloadWorkerMetadata, WeightsAnswer
from offload.connector.model.loaded_weights import LoadedWeights
from offload.connector.scheduler.cache_resets import HeldResets
from offload.connector.scheduler.pending_epochs import PendingEpochs
from offload.connector.worker.weights_watch import WeightsWatch
from offload.messages.plan import StoreJob
from offload.messages.report import JobResult, StepReport
from offload.namespaces.epoch_file import read_epoch
from offload.namespaces.epochs import TierEpochs
from offload.namespaces.folders import claim_rank_folder, replica_folder
from offload.worker.copy_pause import CopyPause
from offload.worker.fences import Fences
from offload.worker.open_loads import OpenLoads
from tests.offload.namespaces.test_epochs import NAMESPACE
from tests.patience import PATIENCE_S
from tiers.copy.base import TransferError


def asked(held: HeldResets, *, sleeps: int, same: bool, ranks: int = 2) -> bool | None:
    return held.answered(WeightsAnswer(held.question, ranks, sleeps, same), 2)


def test_a_reset_of_a_sleep_keeps_the_tiers_if_the_weights_are_the_same() -> None:
    held = HeldResets()
    assert asked(held, sleeps=0, same=False) is None  # the first answer only records the weights
    held.reset()
    assert asked(held, sleeps=1, same=True) is True
    assert held.question == 0


@pytest.mark.parametrize(
    ("resets", "answer"),
    [
        (1, {"sleeps": 1, "same": False}),  # other weights
        (1, {"sleeps": 0, "same": True}),  # a reset that a client requested
        (2, {"sleeps": 1, "same": True}),  # the same, and then a sleep
        (1, {"sleeps": 1, "same": True, "ranks": 1}),  # a rank that has not answered
    ],
)
def test_any_other_reset_clears_the_tiers(resets: int, answer: dict[str, Any]) -> None:
    held = HeldResets()
    for _ in range(resets):
        held.reset()
    assert asked(held, **answer) is False


def test_an_answer_to_an_older_question_is_ignored() -> None:
    held = HeldResets()
    old = WeightsAnswer(held.question, 2, 1, is_same=True)
    held.reset()
    assert held.answered(old, 2) is None
    assert asked(held, sleeps=1, same=True) is True


def test_the_weights_are_unchanged_only_if_every_rank_says_so() -> None:
    def meta(same: bool, sleeps: int = 1) -> OffloadWorkerMetadata:
        return OffloadWorkerMetadata(StepReport(), weights=WeightsAnswer(3, 1, sleeps, same))

    assert meta(True).aggregate(meta(True)).weights == WeightsAnswer(3, 2, 1, is_same=True)
    for one, other in ((True, False), (False, True)):
        merged = meta(one).aggregate(meta(other)).weights
        assert merged is not None
        assert not merged.is_same
    merged = meta(True).aggregate(meta(True, sleeps=2)).weights
    assert merged is not None
    assert not merged.is_same
    silent = OffloadWorkerMetadata(StepReport())
    assert silent.aggregate(meta(True)).weights == meta(True).aggregate(silent).weights


def test_a_worker_answers_each_question_once_and_by_its_weights() -> None:
    weights = [b"one"]
    watch = WeightsWatch(lambda: weights[0])
    watch.begin()
    watch.fell_asleep()
    assert watch.answer(0) is None
    assert watch.answer(1) == WeightsAnswer(1, 1, 1, is_same=True)
    assert watch.answer(1) is None
    weights[0] = b"two"
    assert watch.answer(2) == WeightsAnswer(2, 1, 0, is_same=False)
    assert watch.answer(3) == WeightsAnswer(3, 1, 0, is_same=True)


def test_weights_that_cannot_be_digested_count_as_changed() -> None:
    def fail() -> bytes:
        raise RuntimeError("the device is away")

    for digest in (fail, lambda: None):
        watch = WeightsWatch(digest)
        watch.begin()
        answer = watch.answer(1)
        assert answer is not None
        assert not answer.is_same


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1, 1000, dtype=torch.bfloat16))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])
        self.register_buffer("odd", torch.zeros(13, dtype=torch.uint8))
        self.head = nn.Linear(7, 3)


def test_the_digest_sees_every_weight_of_the_model_and_of_no_other() -> None:
    model, other = Outer(), Outer()
    loaded = LoadedWeights({"layer": model.layers[1]})
    first = loaded.digest()
    assert first is not None
    assert loaded.digest() == first
    with torch.no_grad():
        for tensor in (model.head.weight, model.head.bias, model.layers[0].weight, model.odd):
            before = tensor.clone()
            tensor.view(-1)[-1] = 7
            assert loaded.digest() != first, tensor.shape
            tensor.copy_(before)
            assert loaded.digest() == first
        other.head.weight += 1
        swapped = model.layers[0].weight[:2].clone()
        model.layers[0].weight[:2] = swapped.flip(0)
    assert loaded.digest() != first, "two swapped weights must change the digest"
    assert LoadedWeights({"layer": nn.Linear(1, 1).weight}).digest() is None


# -- copies ----------------------------------------------------------------------------------


def test_stores_that_have_not_begun_fail_and_others_end_first() -> None:
    fences = Fences()
    futures = fences.add([StoreJob(job, 0, (1,), (1,)) for job in (1, 2)])
    futures[1].set_running_or_notify_cancel()
    sleep = CopyPause(OpenLoads(), fences, None)
    ended = threading.Timer(0.05, futures[1].set_result, [None])
    ended.start()
    sleep.begin(PATIENCE_S)
    assert futures[1].done()
    assert futures[2].cancelled()
    assert sleep.reason
    assert not fences.end_store(1, JobResult()).failed
    assert fences.end_store(2, JobResult()).failed
    sleep.end()
    assert not sleep.reason


def test_a_copy_that_hangs_refuses_the_sleep() -> None:
    fences = Fences()
    hanging: Future[None] = fences.add([StoreJob(1, 0, (1,), (1,))])[1]
    hanging.set_running_or_notify_cancel()
    sleep = CopyPause(OpenLoads(), fences, None)
    with pytest.raises(TransferError, match="have not ended within"):
        sleep.begin(0.0)
    assert not sleep.reason, "the server must stay awake"


# -- epochs ----------------------------------------------------------------------------------


def test_an_unused_epoch_is_taken_back(tmp_path: Path) -> None:
    path = str(tmp_path)
    claim_rank_folder(path, NAMESPACE, replica=0, rank=0, engine="test", starts=True).close()
    epochs = TierEpochs([path], NAMESPACE, 0)
    owed = PendingEpochs(1, epochs.begin, take_back_one=epochs.take_back)
    folder = replica_folder(path, NAMESPACE)
    assert owed.reset(PATIENCE_S)
    assert read_epoch(folder) == 1  # until the meaning of the reset is known
    owed.withdraw()
    end = time.monotonic() + PATIENCE_S
    while read_epoch(folder) and time.monotonic() < end:
        time.sleep(0.005)
    assert read_epoch(folder) == 0
    assert owed.take() == {}
    assert owed.reset(PATIENCE_S)
    while not (taken := owed.take()) and time.monotonic() < end:
        time.sleep(0.005)
    assert taken == {0: 1}
    epochs.take_back(0, 5)  # another one has been begun since
    assert read_epoch(folder) == 1
    owed.close()


def test_a_sleep_does_not_take_back_the_epoch_of_new_weights() -> None:
    """The disk records the epoch of the new weights only after the server has slept."""
    begun, disk_answers = threading.Event(), threading.Event()

    def begin(_tier: int, _noted: Callable[[], None]) -> int:
        begun.set()
        disk_answers.wait(PATIENCE_S)
        return 7

    back: list[int] = []
    epochs = PendingEpochs(1, begin, take_back_one=lambda _tier, epoch: back.append(epoch))
    assert not epochs.reset(0.0)
    assert begun.wait(PATIENCE_S)
    assert epochs.take() == {}  # the weights have changed: the tiers wait for the epoch
    assert not epochs.reset(0.0)  # the server sleeps
    epochs.withdraw()  # it has woken up with the same weights
    disk_answers.set()
    end = time.monotonic() + PATIENCE_S
    while not (taken := epochs.take()) and not back and time.monotonic() < end:
        time.sleep(0.005)
    epochs.close()
    assert (taken, back) == ({0: 7}, [])


# -- vLLM 0.32 -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_beside_another", [False, True])
def test_the_worker_of_032_calls_the_hooks_in_the_order_of_033(
    is_beside_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    connector = SimpleNamespace(
        unregister_kv_caches=lambda: said.append("unregister"),
        restore_kv_caches=lambda: said.append("restore"),
    )
    if is_beside_another:
        group: Any = MultiConnector.__new__(MultiConnector)
        group._connectors = [SimpleNamespace(), connector]
    else:
        group = connector
    monkeypatch.setattr(worker_sleep, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(worker_sleep, "get_kv_transfer_group", lambda: group)

    def sleep(worker: Any, level: int = 1) -> None:
        said.append(f"sleep {level}")

    def wake_up(worker: Any, tags: list[str] | None = None) -> None:
        said.append(f"wake {tags}")

    def discard(worker: Any, tags: tuple[str, ...]) -> None:
        said.append(f"discard {tags}")

    worker_sleep._with_hook(sleep, "unregister_kv_caches", is_before=True)(None, level=2)
    wake = worker_sleep._with_hook(wake_up, "restore_kv_caches", is_before=False)
    wake(None, ["weights"])
    wake(None, tags=["kv_cache"])
    wake(None)
    wake(None, None)
    drop = worker_sleep._with_hook(discard, "unregister_kv_caches", is_before=True)
    drop(None, ("kv_cache",))
    drop(None, ("weights",))
    assert said == [
        *("unregister", "sleep 2", "wake ['weights']", "wake ['kv_cache']", "restore"),
        *("wake None", "restore", "wake None", "restore"),
        *("unregister", "discard ('kv_cache',)", "discard ('weights',)"),
    ]


def test_a_worker_calls_the_hooks_itself_or_is_followed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    def methods() -> dict[str, Any]:
        names = {"sleep", "discard", "wake_up"} & vars(Worker).keys()
        return {name: vars(Worker)[name] for name in names}

    before = methods()
    for name, method in before.items():
        monkeypatch.setattr(Worker, name, method)  # so that it is restored
    monkeypatch.setattr(worker_sleep, "_FOLLOWED", [])
    calls_itself = "unregister_kv_caches" in before["sleep"].__code__.co_names
    assert calls_itself == ("restore_kv_caches" in before["wake_up"].__code__.co_names)
    compat.follow_sleep()
    followed = methods()
    assert (followed == before) == calls_itself
    compat.follow_sleep()
    assert methods() == followed
