"""The walk over an index's file reads what LMDB reads, and accepts nothing that LMDB's own verifier
rejects."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from lmdb.verify import VerifyError, verify

from tiers.lmdb.index import IndexUnusableError, check_file
from tiers.lmdb.recovery import pages as lmdb_pages
from tiers.lmdb.recovery import walk as lmdb_walk
from tiers.lmdb.recovery.pages import UnsoundError, require
from tiers.lmdb.recovery.walk import walk
from tiers.lmdb.tier import LmdbTier
from tiers.testing import all_keys, assert_holds, put
from tiers.testing import key_of as number_key

SEED = 20261121
PAGE = 4096
# number of files for each kind of damage
TRIES = int(os.environ.get("KVTIERS_DAMAGED_INDEXES", "60"))
NAME = b"records"
WAYS = {"hashes": 36, "short keys": 3, "one prefix": 40}


def key_of(rng: random.Random, way: str) -> bytes:
    raw = rng.randbytes(rng.choice([WAYS[way]] * 9 + [1, 8, 511]))
    return b"the same prefix" + raw[:30] if way == "one prefix" else raw


def grown(folder: Path, rng: random.Random, way: str, steps: int) -> None:
    """An index after random transactions: puts, deletes, clears (whose lists of free pages
    overflow)."""
    with lmdb.open(str(folder), map_size=64 << 20, max_dbs=2, sync=False) as env:
        meta, records = env.open_db(b"meta"), env.open_db(NAME)
        known: list[bytes] = []
        for step in range(steps):
            with env.begin(write=True) as txn:
                txn.put(b"step", bytes([step % 256]), db=meta)
                if rng.random() < 0.05:
                    txn.drop(records, delete=False)
                    known.clear()
                for _ in range(rng.choice([1, 30, 3000])):
                    key = key_of(rng, way)
                    known.append(key)
                    txn.put(key, rng.randbytes(rng.choice([108, 108, 120, 800])), db=records)
                for key in rng.sample(known, rng.randrange(len(known))):
                    txn.delete(key, db=records)
                    known.remove(key) if len(known) < 100 else None


def read_by_lmdb(folder: Path) -> dict[bytes, bytes]:
    with (
        lmdb.open(str(folder), max_dbs=2, readonly=True, lock=False) as env,
        env.begin(db=env.open_db(NAME, create=False)) as txn,
    ):
        return dict(txn.cursor())


def read_by_walk(folder: Path) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for table in walk(folder / "data.mdb", NAME):
        assert found.keys().isdisjoint(table.keys())
        found.update(table.items())
    return found


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
@pytest.mark.parametrize("way", WAYS)
def test_the_walk_reads_what_lmdb_reads(tmp_path: Path, way: str, seed: int) -> None:
    rng = random.Random(seed)
    for steps in (1, 5, 30):
        grown(tmp_path, rng, way, steps)
        assert verify(str(tmp_path)) == []
        assert read_by_walk(tmp_path) == read_by_lmdb(tmp_path)


def test_an_empty_index(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=2) as env:
        env.open_db(NAME)
    assert read_by_walk(tmp_path) == {}


def is_sound(folder: Path) -> bool:
    try:
        return not verify(str(folder))
    except (VerifyError, struct.error, IndexError):
        return False


def flip(raw: bytearray, rng: random.Random, at: int) -> None:
    raw[at] ^= 1 << rng.randrange(8)


def other_byte(raw: bytearray, rng: random.Random, at: int) -> None:
    raw[at] = rng.randrange(256)


def swap_pages(raw: bytearray, rng: random.Random, at: int) -> None:
    one, two = at // PAGE * PAGE, rng.randrange(2, len(raw) // PAGE) * PAGE
    raw[one : one + PAGE], raw[two : two + PAGE] = raw[two : two + PAGE], raw[one : one + PAGE]


def copy_words(raw: bytearray, rng: random.Random, at: int) -> None:
    """Copy one number over another: plausible page numbers and lengths."""
    at = at // 8 * 8
    source = rng.randrange(len(raw) // 8) * 8
    raw[at : at + 8] = raw[source : source + 8]


DAMAGE = [flip, other_byte, swap_pages, copy_words]


def accepted_garbage(
    folder: Path,
    tries: int,
    damage: Callable[[bytearray, random.Random, int], None],
) -> tuple[int, int]:
    """Count the damaged files that the walk accepts although the verifier rejects them, and the
    files that both reject."""
    grown(folder, random.Random(SEED), "hashes", 12)
    with lmdb.open(str(folder), max_dbs=2) as env:
        used = (env.info()["last_pgno"] + 1) * PAGE
    raw = (folder / "data.mdb").read_bytes()[:used]
    broken = folder / "broken"
    wrong = refused = 0
    for number in range(tries):
        rng = random.Random(f"{SEED} {number}")
        data = bytearray(raw)
        # Half of the damage is in the structure: page headers, and the two meta pages.
        page = rng.choice([0, 1, rng.randrange(used // PAGE), rng.randrange(used // PAGE)])
        damage(data, rng, page * PAGE + rng.randrange(rng.choice([16, 160, PAGE])))
        broken.mkdir()
        (broken / "data.mdb").write_bytes(data)
        try:
            found = read_by_walk(broken)
        except UnsoundError:
            refused += not is_sound(broken)
        else:
            if not is_sound(broken):
                wrong += 1
            elif found != read_by_lmdb(broken):
                raise AssertionError(f"another content than LMDB's: {damage.__name__} {number}")
        shutil.rmtree(broken)
    return wrong, refused


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_walk_accepts_nothing_that_the_verifier_rejects(
    tmp_path: Path, damage: Callable[[bytearray, random.Random, int], None]
) -> None:
    wrong, refused = accepted_garbage(tmp_path, TRIES, damage)
    assert not wrong
    assert refused > 5, "the damage must do harm"


def another_number(raw: bytearray, page: int) -> None:
    """A page with the number of its neighbour."""
    if page >= lmdb_pages.META_PAGES * PAGE:
        raw[page] ^= 1


def keys_swapped(raw: bytearray, page: int) -> None:
    """Two nodes of a leaf, swapped."""
    (flags,) = struct.unpack_from("=H", raw, page + 10)
    if flags == lmdb_pages.LEAF:
        at = page + lmdb_pages.PAGE_HEAD_BYTES
        raw[at : at + 4] = raw[at + 2 : at + 4] + raw[at : at + 2]


def one_page_more(raw: bytearray, page: int) -> None:
    """A page at the end that is neither in use nor listed as free."""
    if page < lmdb_pages.META_PAGES * PAGE:
        raw[page + 136] += 1  # the number of the last page, from both meta pages: a small one


def one_record_more(raw: bytearray, page: int) -> None:
    """A wrong counter in the main database's entry for the records."""
    at = raw.find(NAME, page, page + PAGE)
    if at >= 0:
        raw[at + len(NAME) + 32] ^= 1


SEEN_BY = {
    another_number: "the number of a page",
    keys_swapped: "keys out of order",
    one_page_more: "pages that are neither in use nor free",
    one_record_more: "a tree with",
}


@pytest.mark.parametrize("damage", SEEN_BY)
def test_without_the_check_that_detects_it_damage_would_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytearray, int], None]
) -> None:
    """Only one check detects each damage, so the test above can fail."""
    grown(tmp_path, random.Random(SEED), "hashes", 4)
    path = tmp_path / "data.mdb"
    healthy = path.read_bytes()

    def all_but_one(is_true: object, what: str) -> None:
        if not what.startswith(SEEN_BY[damage]):
            require(is_true, what)

    seen = 0
    for page in range(0, len(healthy), PAGE):
        raw = bytearray(healthy)
        damage(raw, page)
        if raw == healthy:
            continue
        path.write_bytes(raw)
        with contextlib.suppress(UnsoundError):  # a page that is no longer in use
            walk(path, NAME)
            continue
        with monkeypatch.context() as patched:
            for module in (lmdb_pages, lmdb_walk):
                patched.setattr(module, "require", all_but_one)
            walk(path, NAME)
        assert not is_sound(tmp_path)
        seen += 1
        if seen == 2:
            return
    assert seen > 0


async def test_an_index_that_only_lmdb_understands_is_kept(tmp_path: Path) -> None:
    """The file is intact, but not of a shape that the walk knows: LMDB's verifier decides."""
    keys = [number_key(n) for n in range(30)]
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0)
    await tier.open()
    await put(tier, keys, 12_000)
    await tier.touch(keys[:3])
    await tier.aclose()
    with lmdb.open(str(tmp_path / "tier"), max_dbs=3) as env:
        env.open_db(b"duplicates", dupsort=True)
    with pytest.raises(UnsoundError):
        walk(tmp_path / "tier" / "data.mdb", NAME)
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0)
    assert (await tier.open()).record_count == 30
    assert [stored.key for stored in await all_keys(tier)] == keys[3:] + keys[:3]
    await assert_holds(tier, keys, 12_000)
    await tier.aclose()


@pytest.mark.parametrize("bit", range(3, 7))
@pytest.mark.parametrize("lengths", [[108], [108, 108, 120]])
def test_overlapping_nodes_are_damage_even_if_the_verifier_accepts_them(
    tmp_path: Path, bit: int, lengths: list[int]
) -> None:
    """One flipped bit in the length of a key: still in order, still inside the page. LMDB would
    move all other nodes by the wrong distance when it deletes this one."""
    rng = random.Random(SEED)
    with lmdb.open(str(tmp_path), map_size=1 << 20, max_dbs=2) as env:
        records = env.open_db(NAME)
        with env.begin(write=True, db=records) as txn:
            for _ in range(300):
                txn.put(rng.randbytes(36), rng.randbytes(rng.choice(lengths)))
    path = tmp_path / "data.mdb"
    raw = bytearray(path.read_bytes())
    unseen = 0
    for start in range(2 * PAGE, len(raw), PAGE):
        flags, lower = struct.unpack_from("=HH", raw, start + 10)
        if flags != lmdb_pages.LEAF or lower < 16 + 2 * 3:
            continue
        at = start + struct.unpack_from("=H", raw, start + 16 + 2)[0] + 6
        raw[at] ^= 1 << bit
        path.write_bytes(raw)
        if is_sound(tmp_path):
            unseen += 1
            with pytest.raises(IndexUnusableError, match="overlap"):
                check_file(tmp_path)
        raw[at] ^= 1 << bit
    assert unseen > 3, "the verifier must accept them"
