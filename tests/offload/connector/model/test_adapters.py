"""LoRA adapters are identified by the content that the workers have loaded: real files, vLLM's real
scheduler, and its LoRA manager for loading."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import LoRAConfig
from vllm.lora import worker_manager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from vllm.v1.request import Request

from offload.connector.model.adapters import ASKS_MAX, AdapterBook, AdapterWatch, joined
from offload.requests.miss_reasons import Reason
from offload.requests.request_log import LoggedRequest
from tests.offload.connector.model.tiny_configs import change_later
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine

PROMPT = list(range(64))
ONE, TWO = b"1" * 32, b"2" * 32
NAME = ("adapter", "/adapter")


def make_adapter(folder: Path, content: bytes) -> LoRARequest:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return LoRARequest("adapter", 1, str(folder))


def digest(request: LoRARequest, during: Any = lambda: None) -> bytes:
    """A worker's report of an adapter; ``during`` runs while vLLM loads it."""
    watch = AdapterWatch(LoRAConfig())
    watch.load(request, during)
    [(name, digests)] = watch.take().items()
    assert name == (request.lora_name, request.lora_path)
    assert watch.take() == {}
    return digests[0]


# -- the worker ----------------------------------------------------------------------------------


def test_adapters_differ_by_content_and_not_by_path(tmp_path: Path) -> None:
    request = make_adapter(tmp_path / "one", b"one")
    one = digest(request)
    assert len(one) == 32
    assert digest(LoRARequest("other name", 2, str(tmp_path / "one"))) == one
    os.symlink(tmp_path / "one", tmp_path / "link")
    assert digest(LoRARequest("adapter", 1, str(tmp_path / "link"))) == one
    assert digest(make_adapter(tmp_path / "two", b"two")) != one
    mixed = LoRARequest("adapter", 1, str(tmp_path / "one"), is_3d_lora_weight=True)
    assert digest(mixed) != one


def test_files_that_change_while_they_are_loaded_have_no_known_content(tmp_path: Path) -> None:
    request = make_adapter(tmp_path / "one", b"one")
    weights = tmp_path / "one" / "adapter_model.safetensors"
    rewrite = partial(change_later, weights, lambda file: file.write_bytes(b"two"))
    assert digest(request, rewrite) == b""
    assert digest(request) != b""


def test_missing_files_have_no_known_content(tmp_path: Path) -> None:
    assert digest(LoRARequest("adapter", 1, str(tmp_path / "absent"))) == b""


def test_a_failed_load_is_reported_only_to_vllm(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("not an adapter")

    watch = AdapterWatch(LoRAConfig())
    with pytest.raises(ValueError, match="not an adapter"):
        watch.load(make_adapter(tmp_path / "one", b"one"), fail)
    assert watch.take() == {}


def test_vllms_manager_reports_what_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch sees every load by the LRU manager of the engine to which it belongs."""
    loads: list[str] = []
    assert "_load_adapter" in vars(WorkerLoRAManager), "vLLM loads adapters in another way"
    monkeypatch.setattr(
        WorkerLoRAManager, "_load_adapter", lambda manager, request: loads.append(request.lora_name)
    )
    own, other = LoRAConfig(), LoRAConfig()
    watches = [AdapterWatch(own), AdapterWatch(other)]
    for watch in watches:
        watch.begin()
    manager: Any = object.__new__(LRUCacheWorkerLoRAManager)
    manager.lora_config = own
    manager._load_adapter(make_adapter(tmp_path / "one", b"one"))
    assert loads == ["adapter"]
    assert [len(watch.take()) for watch in watches] == [1, 0]


def add_to_hub(cache: Path, commit: str, content: bytes) -> None:
    """Add a commit to an adapter in the Hub's cache; the branch becomes this commit."""
    home = cache / "models--org--adapter"
    (home / "snapshots").mkdir(parents=True, exist_ok=True)
    make_adapter(home / "snapshots" / commit, content)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(commit)


def test_an_adapter_of_the_hub_is_the_snapshot_that_vllm_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may move the branch while vLLM loads the adapter."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded: list[str] = []

    def load(manager: Any, request: LoRARequest) -> None:
        loaded.append(worker_manager.get_adapter_absolute_path(request.lora_path))
        add_to_hub(tmp_path, "2" * 40, b"two")

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
    request = LoRARequest("adapter", 1, "org/adapter")
    add_to_hub(tmp_path, "1" * 40, b"one")
    one = digest(make_adapter(tmp_path / "models--org--adapter" / "snapshots" / ("1" * 40), b"one"))
    watch = AdapterWatch(LoRAConfig())
    watch.begin()
    manager: Any = object.__new__(LRUCacheWorkerLoRAManager)
    manager.lora_config = watch.lora_config
    manager._load_adapter(request)
    assert [Path(path).name for path in loaded] == ["1" * 40]
    assert watch.take() == {("adapter", "org/adapter"): (one,)}


# -- the scheduler -------------------------------------------------------------------------------


def request_of(name: str = "r", lora: tuple[str, str] | None = NAME) -> Any:
    request = LoRARequest(lora[0], 1, lora[1]) if lora else None
    return SimpleNamespace(request_id=name, lora_request=request)


def test_an_adapter_is_known_when_every_rank_has_reported_the_same() -> None:
    book = AdapterBook(2)
    assert book.identity_of(request_of(lora=None)) == b""
    assert book.identity_of(request_of()) is None
    book.take({NAME: (ONE,)})
    assert book.identity_of(request_of()) is None
    book.take({NAME: (ONE,)})
    assert book.identity_of(request_of()) == ONE
    assert book.identity_of(request_of(lora=("adapter", "/elsewhere"))) is None


def test_reports_of_ranks_are_combined() -> None:
    book = AdapterBook(2)
    book.take(joined({NAME: (ONE,)}, {NAME: (ONE,), ("b", "/b"): (TWO,)}))
    assert book.identity_of(request_of()) == ONE
    assert book.identity_of(request_of(lora=("b", "/b"))) is None


def test_ranks_that_have_loaded_different_files_are_not_trusted() -> None:
    book = AdapterBook(2)
    book.take({NAME: (ONE, TWO)})
    assert book.identity_of(request_of()) is None
    assert not book.may_come(request_of())


def test_an_adapter_loaded_again_unchanged_stays_known() -> None:
    book = AdapterBook()
    book.take({NAME: (ONE,)})
    book.begin(request_of(), ONE)
    assert book.take({NAME: (ONE,)}) == []
    assert book.identity_of(request_of()) == ONE
    assert book.assumed == {NAME: ONE}


def test_a_changed_adapter_is_excluded_until_everything_is_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    book = AdapterBook()
    book.take({NAME: (ONE,), ("b", "/b"): (ONE,)})
    book.begin(request_of("live"), ONE)
    book.begin(request_of("other", ("b", "/b")), ONE)
    assert book.take({NAME: (TWO,)}) == ["live"]
    assert book.identity_of(request_of()) is None
    assert not book.may_come(request_of())
    book.take({NAME: (ONE,)})
    assert book.identity_of(request_of()) is None
    assert sum("have changed" in line for line in caplog.messages) == 1
    book.end("live")
    book.forget()
    assert book.identity_of(request_of()) == ONE


def test_unknown_content_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    book = AdapterBook()
    for _ in range(3):
        book.take({NAME: (b"",)})
    assert book.identity_of(request_of()) is None
    assert not book.may_come(request_of())
    assert sum("is unknown" in line for line in caplog.messages) == 1


def test_a_request_is_looked_up_again_a_few_times() -> None:
    book = AdapterBook()
    assert [book.may_come(request_of("a")) for _ in range(ASKS_MAX + 1)] == [True] * ASKS_MAX + [
        False
    ]
    assert book.may_come(request_of("b"))


# -- both, under vLLM's scheduler ----------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Iterator[OracleEngine]:
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 1) as made:
        made.worker._adapter_watch = AdapterWatch(LoRAConfig())
        yield made
        made.check_idle()


def serve(world: OracleEngine, name: str, lora: LoRARequest) -> LoggedRequest:
    """Serve one request alone; return the record of its lookup."""
    world._salts[name] = None
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    request = Request(name, PROMPT, sampling, None, lora_request=lora, block_hasher=world._hasher)
    world.scheduler.add_request(request)
    world.drain()
    world.check()
    found: LoggedRequest = world.connector.serving.side.log.last[-1]
    assert found.request == name
    world.forget_locally()
    return found


def loaded_by_worker(world: OracleEngine, lora: LoRARequest) -> None:
    watch = world.worker._adapter_watch
    assert watch is not None
    watch.load(lora, lambda: None)


def test_requests_of_an_unknown_adapter_are_excluded(world: OracleEngine, tmp_path: Path) -> None:
    lora = make_adapter(tmp_path / "one", b"one")
    for name in ("a", "b"):
        miss = serve(world, name, lora).miss
        assert (miss.reason, miss.note) == (Reason.FILTERED, "adapter")
    assert not world.planner.cpu.resident


def test_a_report_on_its_way_is_waited_for(world: OracleEngine, tmp_path: Path) -> None:
    """The first request after a start finds what an earlier server has stored."""
    lora = make_adapter(tmp_path / "one", b"one")
    loaded_by_worker(world, lora)  # reported with the next step's results
    assert serve(world, "a", lora).miss.reason is Reason.NEVER_STORED
    assert serve(world, "b", lora).loaded == {"cpu": 64}
    loaded_by_worker(world, lora)  # vLLM had evicted it and loaded it again unchanged
    assert serve(world, "c", lora).loaded == {"cpu": 64}


def test_copies_for_a_reloaded_adapter_are_refused(world: OracleEngine, tmp_path: Path) -> None:
    """The scheduler gets the report only after the step in which the load is planned; here, only
    after the request has ended."""
    lora = make_adapter(tmp_path / "one", b"one")
    loaded_by_worker(world, lora)
    serve(world, "a", lora)
    held = set(world.planner.cpu.resident)
    make_adapter(tmp_path / "one", b"two")
    loaded_by_worker(world, lora)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.worker._adapter_watch, "take", dict)
        record = serve(world, "b", lora)
    assert record.hit_tokens == 64
    assert (record.loaded, record.miss.reason) == ({}, Reason.LOAD_FAILED)
    miss = serve(world, "c", lora).miss
    assert (miss.reason, miss.note) == (Reason.FILTERED, "adapter")
    assert set(world.planner.cpu.resident) == held
    world.change_weights()  # a reset of everything
    assert serve(world, "d", lora).miss.reason is not Reason.FILTERED
    assert serve(world, "e", lora).loaded == {"cpu": 64}


def test_chunks_stored_while_an_adapter_changes_are_not_kept(
    world: OracleEngine, tmp_path: Path
) -> None:
    lora = make_adapter(tmp_path / "one", b"one")
    loaded_by_worker(world, lora)
    world._salts["a"] = None
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    request = Request("a", PROMPT, sampling, None, lora_request=lora, block_hasher=world._hasher)
    world.scheduler.add_request(request)
    while not request.num_computed_tokens:
        world.step()
    make_adapter(tmp_path / "one", b"two")
    loaded_by_worker(world, lora)
    stored_before = set(world.planner.cpu.resident)
    world.drain()
    world.check()
    assert set(world.planner.cpu.resident) <= stored_before
    world.forget_locally()
