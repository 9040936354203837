"""Digests of KV blocks, the table that stores them, and how long loaded blocks are kept for the
comparison."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import offload.worker.executor
from offload.layout.registration import GroupCaches, Registration, register_kv_caches
from offload.messages.plan import IN_SLAB, DigestJob, LoadItem, LoadJob, StepPlan
from offload.messages.report import JobResult
from offload.telemetry.counters import WorkerStats
from offload.worker.block_verifier import DIGESTS_MAX, DigestTable, Verifier
from offload.worker.device_digest import GATHERED_BLOCKS_MAX, DeviceDigest
from offload.worker.executor import LOOP_STALL_S
from tests.clock import Clock
from tests.offload.small_model import compute, keys
from tests.offload.worker.test_executor import KEYS, Rank, rank_with, store
from tests.patience import PATIENCE_S

MASK = (1 << 64) - 1


def splitmix(number: int, first: int) -> int:
    """One step of splitmix64's output function after ``first``, in plain integers."""
    mixed = (number ^ first) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EB & MASK
    return mixed ^ (mixed >> 29 & (1 << 35) - 1)


def salt(position: int) -> int:
    state = (position + 1) * 0x9E3779B97F4A7C15 & MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def expected(page: bytes, word_bytes: int) -> int:
    words = [
        int.from_bytes(page[at : at + word_bytes], "little")
        for at in range(0, len(page), word_bytes)
    ]
    total = sum(splitmix(word, salt(at)) for at, word in enumerate(words)) & MASK
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize(("page", "word_bytes"), [(48, 8), (44, 1)])
def test_a_digest_is_the_same_number_everywhere(page: int, word_bytes: int) -> None:
    torch.manual_seed(page)
    cache = torch.randint(0, 256, (5, page), dtype=torch.uint8)
    digest = DeviceDigest(register_kv_caches(5, [GroupCaches(0, 1, {"layer": cache})]))
    found = digest.of(0, [4, 0, 4]).tolist()
    assert found == [[expected(cache[b].numpy().tobytes(), word_bytes)] for b in (4, 0, 4)]


def caches(blocks: int = 7) -> tuple[dict[str, torch.Tensor], DeviceDigest]:
    """Two layers; the heads of the second are outside the blocks, so its page has four runs."""
    torch.manual_seed(0)
    plain = torch.randint(0, 256, (blocks, 2, 16), dtype=torch.uint8)
    by_head = torch.randint(0, 256, (4, blocks, 16), dtype=torch.uint8).transpose(0, 1)
    layers = {"plain": plain, "by_head": by_head}
    return layers, DeviceDigest(register_kv_caches(blocks, [GroupCaches(3, 1, layers)]))


def test_every_bit_of_a_block_affects_only_its_digest() -> None:
    layers, digest = caches()
    everything = list(range(7))
    before = digest.of(3, everything)
    assert digest.layers(3) == ("plain", "by_head")
    for column, tensor in enumerate(layers.values()):
        block = tensor[5]
        for at in np.ndindex(*block.shape):
            for bit in (1, 128):
                block[at] ^= bit
                changed = (digest.of(3, everything) != before).nonzero().tolist()
                block[at] ^= bit
                assert changed == [[5, column]]
    assert torch.equal(digest.of(3, everything), before)


def test_swapped_words_and_runs_change_a_digest() -> None:
    layers, digest = caches()
    before = digest.of(3, [2])
    plain, by_head = layers["plain"], layers["by_head"]
    plain[2] = plain[2].flip(0).clone()
    by_head[2] = by_head[2].roll(1, 0).clone()
    assert (digest.of(3, [2]) != before).all()
    turned = digest.of(3, [2])
    by_head[2] = by_head[2][[0, 2, 1, 3]].clone()
    assert digest.of(3, [2])[0, 1] != turned[0, 1]


def test_more_blocks_than_are_gathered_at_a_time() -> None:
    _, digest = caches(2 * GATHERED_BLOCKS_MAX + 3)
    ids = list(reversed(range(2 * GATHERED_BLOCKS_MAX + 3)))
    one_by_one = torch.cat([digest.of(3, [block]) for block in ids])
    assert torch.equal(digest.of(3, ids), one_by_one)


def entry(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 9, (2, 3))


def opened(folder: Path) -> DigestTable:
    table = DigestTable(folder, "space-rank0")
    table.open()
    return table


def test_engines_find_each_others_digests(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    first.enter([b"a", b"b"], np.stack([entry(1), entry(2)]))
    assert [d.tolist() for d in second.known_to_any(b"a")] == [entry(1).tolist()]
    first.enter([b"c"], entry(3)[None])  # after its file was read
    assert [d.tolist() for d in second.known_to_any(b"c")] == [entry(3).tolist()]
    assert second.known_to_any(b"d") == ()
    first.close()
    assert [d.tolist() for d in opened(tmp_path).known_to_any(b"b")] == [entry(2).tolist()]
    other = DigestTable(tmp_path, "space-rank1")
    other.open()
    assert other.known_to_any(b"a") == ()


def test_a_frame_cut_off_by_a_kill_is_skipped(tmp_path: Path) -> None:
    table = opened(tmp_path)
    table.enter([b"a", b"b"], np.stack([entry(1), entry(2)]))
    table.close()
    (file,) = tmp_path.iterdir()
    for size in range(file.stat().st_size):
        whole = file.read_bytes()
        file.write_bytes(whole[:size])
        found = opened(tmp_path)
        assert [d.tolist() for d in found.known_to_any(b"b")] == []
        assert [d.tolist() for d in found.known_to_any(b"a")] in ([], [entry(1).tolist()])
        file.write_bytes(whole)


def test_the_newest_digests_of_a_key_are_kept(tmp_path: Path) -> None:
    table = DigestTable(None, "")
    for seed in range(DIGESTS_MAX + 2):
        table.enter([b"a"], entry(seed)[None])
        table.enter([b"a"], entry(seed)[None])
    newest = [entry(seed).tolist() for seed in range(2, DIGESTS_MAX + 2)]
    assert [d.tolist() for d in table.known_to_any(b"a")] == newest
    table.clear()
    assert table.known_to_any(b"a") == ()


def known(folder: Path, key: bytes) -> list[list[list[int]]]:
    """The digests of this key that a newly started engine finds."""
    table = opened(folder)
    found = [digest.tolist() for digest in table.known_to_any(key)]
    table.close()
    return found


@pytest.fixture(params=["123", "132", "213", "231", "312", "321"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which the files of the first three engines are read; later ones follow."""
    names = itertools.chain(request.param, itertools.count(4))
    monkeypatch.setattr(
        "offload.worker.block_verifier.uuid.uuid4",
        lambda: SimpleNamespace(hex=f"{next(names):0>8}"),
    )


@pytest.mark.usefixtures("order")
def test_a_reset_voids_all_earlier_digests_even_after_a_restart(tmp_path: Path) -> None:
    """The reset voids digests of this engine, of one that ended before, and of one that runs beside
    it."""
    ended, table, beside = opened(tmp_path), opened(tmp_path), opened(tmp_path)
    ended.enter([b"ended"], entry(1)[None])
    ended.close()
    table.enter([b"own"], entry(2)[None])
    beside.enter([b"beside"], entry(3)[None])
    table.clear()
    table.enter([b"new"], entry(4)[None])
    beside.enter([b"later"], entry(5)[None])
    for key in (b"ended", b"own", b"beside"):
        assert known(tmp_path, key) == [], key
        assert not table.known_to_any(key), key
    assert known(tmp_path, b"new") == [entry(4).tolist()]
    assert known(tmp_path, b"later") == [entry(5).tolist()]
    assert [d.tolist() for d in beside.known(b"beside")] == [entry(3).tolist()], (
        "the digest belongs to these weights"
    )


@pytest.mark.usefixtures("order")
def test_a_digest_that_is_stored_again_after_a_reset_is_known(tmp_path: Path) -> None:
    """Equal bytes in several files: a reset voids the lines before it and no others."""
    old, reset, new = opened(tmp_path), opened(tmp_path), opened(tmp_path)
    old.enter([b"a"], entry(1)[None])
    assert len(new.known_to_any(b"a")) == 1
    reset.clear()
    new.enter([b"a"], entry(1)[None])
    assert new.known_to_any(b"b") == ()  # reads the other files, with the reset
    assert [d.tolist() for d in new.known(b"a")] == [entry(1).tolist()]
    reset.enter([b"a"], entry(1)[None])
    new.close()
    assert known(tmp_path, b"a") == [entry(1).tolist()]


@pytest.mark.parametrize("is_noticed_first", [True, False])
def test_a_full_file_of_digests_still_accepts_a_reset(
    is_noticed_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(tmp_path)
    table.enter([b"a"], entry(1)[None])
    [file] = tmp_path.iterdir()
    monkeypatch.setattr("offload.worker.block_verifier.DIGESTS_BYTES_MAX", file.stat().st_size)
    if is_noticed_first:
        table.enter([b"b"], entry(2)[None])
    assert known(tmp_path, b"a") == [entry(1).tolist()]
    table.clear()
    table.enter([b"b"], entry(2)[None])
    assert known(tmp_path, b"a") == known(tmp_path, b"b") == []


def test_a_disk_that_fills_up_leaves_complete_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(tmp_path)
    table.enter([b"a"], entry(1)[None])
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        with pytest.raises(OSError, match="could not be extended"):
            table.enter([b"b"], entry(2)[None])
    table.clear()
    table.enter([b"c"], entry(3)[None])
    assert known(tmp_path, b"a") == []
    assert known(tmp_path, b"c") == [entry(3).tolist()]


class HeldVerifier(Verifier):
    """Compares a loaded chunk only when a test allows it."""

    def __init__(self, registration: Registration) -> None:
        super().__init__(DeviceDigest(registration), WorkerStats(), None, "")
        self.waits = {key: asyncio.Event() for key in KEYS}
        self.may_compare = {key: asyncio.Event() for key in KEYS}
        self.compared = {key: asyncio.Event() for key in KEYS}

    async def mismatched(
        self, items: Sequence[LoadItem], has_ended: Callable[[], bool]
    ) -> frozenset[bytes]:
        """Return the differing keys, as soon as the first of these may be compared."""
        self.waits[items[0].key].set()
        await self.may_compare[items[0].key].wait()
        found = await super().mismatched(items, has_ended)
        self.compared[items[0].key].set()
        return found


@asynccontextmanager
async def rank_that_holds_comparisons() -> AsyncIterator[tuple[Rank, HeldVerifier]]:
    """A rank with two stored chunks in slots 0 and 1, whose digests are known."""
    held: list[HeldVerifier] = []

    def verifier(registration: Registration) -> Verifier:
        held.append(HeldVerifier(registration))
        return held[0]

    async with asyncio.timeout(PATIENCE_S), rank_with(verifier=verifier) as rank:
        compute(rank.caches, keys(2), [1, 2])
        digests = (DigestJob(0, tuple(KEYS[:2]), (1, 2)),)
        rank.executor.post(StepPlan(stores=(store(1, [1, 2], [0, 1]),), digests=digests))
        while not (await rank.turn()).report.results:
            pass
        yield rank, held[0]


async def test_a_request_keeps_its_blocks_until_all_were_compared() -> None:
    """The request keeps them even if its load was abandoned: otherwise the next content of a block
    would be compared."""
    async with rank_that_holds_comparisons() as (rank, held):
        for part in range(2):
            item = LoadItem(KEYS[part], 0, (9 + part,), part, -1)
            load = LoadJob(2, "r2", [item], part, part == 1)
            rank.executor.post(StepPlan(loads=(load,)))
            await rank.turn()
        rank.executor.abandon_load("r2")
        for key in KEYS[:2]:
            assert not (await rank.turn()).finished, "its blocks are being compared"
            held.may_compare[key].set()
            await held.compared[key].wait()
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"r2"}, {"r2"}), "the load was abandoned"
        stats = rank.executor.stats
        assert (stats.verified_chunks, stats.differing_chunks) == (2, 0)


async def test_blocks_of_a_load_that_was_given_up_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model-runner thread gives up a load without the loop. Its request ends, and vLLM computes
    the block again while the copy that came too late is still to be compared."""
    clock = Clock.replace(offload.worker.executor, monkeypatch)
    async with rank_that_holds_comparisons() as (rank, held):
        load = LoadJob(2, "r2", [LoadItem(KEYS[0], 0, (9,), 0, IN_SLAB)])
        rank.executor.post(StepPlan(loads=(load,)))
        while not held.waits[KEYS[0]].is_set():
            assert not (await rank.turn()).finished
        clock.ahead_s = rank.executor.limits.load_timeout_s + LOOP_STALL_S + 1.0
        while not (done := await rank.turn()).finished:
            pass
        assert done.failed == {"r2"}
        for cache in rank.caches.values():
            cache.add_(1)  # the block's next content
        held.may_compare[KEYS[0]].set()
        await held.compared[KEYS[0]].wait()
        stats = rank.executor.stats
        assert (stats.verified_chunks, stats.differing_chunks) == (0, 0)


async def load_all(rank: Rank, digests: tuple[DigestJob, ...]) -> JobResult:
    """Compute two chunks, store them with these digests, and load them into other blocks."""
    compute(rank.caches, keys(2), [1, 2])
    plan = StepPlan(stores=(store(1, [1, 2], [0, 1]),), digests=digests)
    rank.executor.before_step(plan)
    rank.executor.post(plan)
    while not (await rank.turn()).report.results:
        pass
    return await load_again(rank)


async def load_again(rank: Rank) -> JobResult:
    """Load the two chunks from their slots into other blocks."""
    items = [LoadItem(KEYS[n], 0, (9 + n,), n, IN_SLAB) for n in range(2)]
    rank.executor.post(StepPlan(loads=(LoadJob(2, "r2", items),)))
    while True:
        if 2 in (found := (await rank.turn()).report.results):
            return found[2]


def plain_verifier(registration: Registration) -> Verifier:
    return Verifier(DeviceDigest(registration), WorkerStats(), None, "")


def counts(rank: Rank) -> tuple[int, int, int]:
    stats = rank.executor.stats
    return stats.verified_chunks, stats.differing_chunks, stats.unverified_chunks


BOTH = (DigestJob(0, tuple(KEYS[:2]), (1, 2)),)


@pytest.mark.parametrize("at", [0, 2999, 3000, 5999], ids=lambda at: f"byte {at} of two layers")
async def test_a_chunk_that_differs_in_any_layer_fails_its_load(at: int) -> None:
    async with asyncio.timeout(PATIENCE_S), rank_with(verifier=plain_verifier) as rank:
        assert (await load_all(rank, BOTH)).bad == frozenset()
        assert counts(rank) == (2, 0, 0)
        rank.slab.slot(1)[at] ^= 1
        answer = await load_again(rank)
        assert answer.bad == answer.mismatched == {KEYS[1]}
        assert counts(rank) == (3, 1, 0)


async def test_a_chunk_that_another_engine_has_computed_with_other_bytes_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines that share a tier compute the same prompt in other batches, and each has digested its
    own bytes. A tier holds the bytes of one of them."""

    devices: list[DeviceDigest] = []

    def verifier(registration: Registration) -> Verifier:
        devices.append(DeviceDigest(registration))
        return Verifier(devices[0], WorkerStats(), tmp_path, "space-rank0")

    async with asyncio.timeout(PATIENCE_S), rank_with(verifier=verifier) as rank:
        assert (await load_all(rank, BOTH)).bad == frozenset()
        rank.slab.slot(1)[0] ^= 1
        assert (await load_again(rank)).bad == {KEYS[1]}, "no engine has computed that"
        caplog.clear()
        other = opened(tmp_path)
        other.enter(KEYS[1:2], devices[0].of(0, [10]).cpu().numpy()[None])
        other.close()
        assert (await load_again(rank)).bad == frozenset()
        assert counts(rank) == (5, 1, 0)
        assert "is not what was computed" not in caplog.text


async def test_a_chunk_without_a_digest_is_counted_and_loaded() -> None:
    async with asyncio.timeout(PATIENCE_S), rank_with(verifier=plain_verifier) as rank:
        assert (await load_all(rank, (DigestJob(0, KEYS[:1], [1]),))).bad == frozenset()
        assert counts(rank) == (1, 0, 1)


@pytest.mark.parametrize("where", ["digesting", "comparing", "writing"])
async def test_nothing_counts_as_compared_after_an_error(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk with the flipped bit is loaded: the server continues, and reports that it no longer
    compares."""

    def planted(*_: object) -> torch.Tensor:
        raise RuntimeError("planted")

    async with asyncio.timeout(PATIENCE_S), rank_with(verifier=plain_verifier) as rank:
        await load_all(rank, BOTH)
        verifier = rank.verifier
        assert verifier is not None
        assert counts(rank) == (2, 0, 0)
        if where == "writing":
            monkeypatch.setattr(DigestTable, "enter", planted)
        else:
            monkeypatch.setattr(DeviceDigest, "of", planted)
        if where != "comparing":
            plan = StepPlan(digests=(DigestJob(0, KEYS[2:3], (3,)),))
            rank.executor.post(plan)
            await rank.turn()
            await verifier.settled()
        rank.slab.slot(1)[0] ^= 1
        assert (await load_again(rank)).bad == frozenset()
        assert counts(rank) == (2, 0, 2)
        assert verifier.broken
        assert caplog.text.count("verify has stopped") == 1


async def test_digests_are_forgotten_with_the_weights() -> None:
    async with asyncio.timeout(PATIENCE_S), rank_with(verifier=plain_verifier) as rank:
        await load_all(rank, BOTH)
        rank.executor.post(StepPlan(reset=True))
        await rank.turn()
        compute(rank.caches, keys(2, 5), [1, 2])  # what the same tokens give with the new weights
        rank.executor.post(StepPlan(stores=(store(3, [1, 2], [0, 1]),), digests=BOTH))
        while not (await rank.turn()).report.results:
            pass
        assert (await load_again(rank)).bad == frozenset()
        compute(rank.caches, keys(2), [1, 2])  # a load that would put the old content there
        rank.executor.post(StepPlan(stores=(store(4, [1, 2], [0, 1]),)))
        while not (await rank.turn()).report.results:
            pass
        assert (await load_again(rank)).mismatched == set(KEYS[:2])


@pytest.mark.parametrize("early", [True, False])
async def test_blocks_are_digested_while_they_hold_the_chunk(early: bool, tmp_path: Path) -> None:
    """Early chunks before the step's forward pass writes, the others after it."""

    def verifier(registration: Registration) -> Verifier:
        return Verifier(DeviceDigest(registration), WorkerStats(), tmp_path, "space-rank0")

    async with asyncio.timeout(PATIENCE_S), rank_with(verifier=verifier) as rank:
        plan = StepPlan(digests=(DigestJob(0, KEYS[:1], [1], early),))
        compute(rank.caches, keys(1) if early else keys(1, 7), [1])
        rank.executor.before_step(plan)
        compute(rank.caches, keys(1, 7) if early else keys(1), [1])  # the forward pass
        rank.executor.post(plan)
        await rank.turn()
        compute(rank.caches, keys(1), [1])
        rank.executor.post(StepPlan(stores=(store(1, [1], [0]),)))
        while not (await rank.turn()).report.results:
            pass
        load = LoadJob(2, "r2", [LoadItem(KEYS[0], 0, (9,), 0, IN_SLAB)])
        rank.executor.post(StepPlan(loads=(load,)))
        while 2 not in (found := (await rank.turn()).report.results):
            pass
        assert found[2].bad == frozenset()
        assert counts(rank) == (1, 0, 0)
        assert len(known(tmp_path, KEYS[0])) == 1, (
            "otherwise other content of the blocks would also agree"
        )


@pytest.mark.parametrize("here", [(0, 1), (0,), (1,)])
async def test_only_loaded_blocks_are_compared(here: tuple[int, ...]) -> None:
    """A load may skip blocks of a chunk, here of two; the chunks after it are compared as well."""
    torch.manual_seed(1)
    cache = torch.randint(0, 256, (8, 64), dtype=torch.uint8)
    registration = register_kv_caches(8, [GroupCaches(0, 2, {"layer": cache})])
    verifier = plain_verifier(registration)
    verifier.start(asyncio.get_running_loop().call_soon_threadsafe)
    verifier.after_step(StepPlan(digests=(DigestJob(0, tuple(KEYS[:2]), (0, 1, 2, 3)),)))
    await asyncio.sleep(0)  # until the loop has the digests
    await verifier.settled()
    cache[4:8] = cache[0:4]
    blocks = tuple(4 + at if at in here else -1 for at in range(2))
    items = [LoadItem(KEYS[0], 0, blocks, 0, IN_SLAB), LoadItem(KEYS[1], 0, (6, 7), 1, IN_SLAB)]
    assert await verifier.mismatched(items, lambda: False) == frozenset()
    assert verifier.stats.verified_chunks == 2
    cache[7, 63] ^= 1
    assert await verifier.mismatched(items, lambda: False) == {KEYS[1]}
    cache[blocks[here[-1]], 0] ^= 1
    assert await verifier.mismatched(items, lambda: False) == {KEYS[0], KEYS[1]}
    verifier.stop()
