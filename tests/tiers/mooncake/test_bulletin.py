"""Documents on boards of a real Mooncake store: concurrent posts, eviction, loss."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.tiers.mooncake.real_store import Master, OneClient, one_store, skip_without_mooncake
from tiers.mooncake import bulletin as mooncake_board
from tiers.mooncake import client as mooncake_client
from tiers.mooncake.bulletin import SLOTS_PER_BOARD, Notice, Posted, post, read_boards, slots_of
from tiers.mooncake.client import MooncakeClient
from tiers.mooncake.tier import MooncakeTier
from tiers.record import Identity
from tiers.testing import key_of, put

skip_without_mooncake()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with Master(tmp_path_factory.mktemp("master") / "log") as made:
        yield made


@pytest.fixture(scope="module")
def store(master: Master) -> Iterator[Any]:
    with one_store(master) as joined:
        yield joined


@pytest.fixture
def client(store: Any, master: Master, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeClient]:
    monkeypatch.setattr(mooncake_client, "join_store", lambda _settings: OneClient(store))
    made = MooncakeClient(master.settings(), Identity(), None)
    yield made
    made.close()


def contents_of(client: MooncakeClient, board: str) -> list[bytes]:
    return [posted.content for posted in read_boards(client, [board])[0]]


def test_a_posted_document_exists_once(client: MooncakeClient) -> None:
    assert contents_of(client, "empty") == []
    for _ in range(2):
        assert post(client, "one", b"a")
        assert post(client, "one", b"b")
    both = [Posted(b"a", True), Posted(b"b", True)]
    assert read_boards(client, ["one", "empty", "one"]) == [both, [], both]


def test_a_document_not_checked_for_a_day_is_not_alive(
    client: MooncakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alive() -> list[bool]:
        return [posted.is_alive for posted in read_boards(client, ["signs"])[0]]

    day = mooncake_board.today()
    monkeypatch.setattr(mooncake_board, "today", lambda: day)  # even if it is just before midnight
    assert post(client, "signs", b"a")
    assert post(client, "signs", b"b")
    for later, expected in ((-1, True), (1, True), (2, False), (-2, False)):
        monkeypatch.setattr(mooncake_board, "today", lambda later=later: day + later)
        assert alive() == [expected] * 2, later
    monkeypatch.setattr(mooncake_board, "today", lambda: day + 5)
    assert post(client, "signs", b"b")
    assert alive() == [False, True]


def test_a_full_board_accepts_no_further_document(client: MooncakeClient, store: Any) -> None:
    contents = [b"%d" % number for number in range(SLOTS_PER_BOARD)]
    for content in contents:
        assert post(client, "full", content)
    assert not post(client, "full", b"one more")
    assert contents_of(client, "full") == contents
    assert store.remove(slots_of("full")[3], True) == 0
    assert post(client, "full", b"one more")


@pytest.mark.parametrize("number", range(5))
def test_many_concurrent_posts_are_all_there(client: MooncakeClient, number: int) -> None:
    """No post overwrites another, and no author believes that its document is there when it is
    not."""
    contents = [b"%d" % poster * 3000 for poster in range(8)]
    gate = threading.Barrier(len(contents))
    posted: dict[bytes, bool] = {}

    def run(content: bytes) -> None:
        gate.wait()
        posted[content] = post(client, f"crowd {number}", content)

    threads = [threading.Thread(target=run, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert posted == dict.fromkeys(contents, True)
    assert set(contents_of(client, f"crowd {number}")) == set(contents)


async def test_a_document_survives_the_stores_eviction(tmp_path: Path) -> None:
    """Far more records are stored than fit: the oldest are evicted, the notice stays. The master
    evicts in the background, and keeps requested records for the time of a lease, which is short
    here."""
    with Master(tmp_path / "log", "--default_kv_lease_ttl=1") as own:
        tier = MooncakeTier(own.settings(32 << 20), notice=Notice("board", b"document"))
        await tier.open()
        try:
            number = 0
            async with asyncio.timeout(PATIENCE_S):
                while number < 96 or await tier.present([key_of(number - 96)]) == [True]:
                    await put(tier, [key_of(number)], 1 << 20)
                    number += 1
            client = MooncakeClient(own.settings(0), Identity(), None)
            place = slots_of("board")[0]
            [found] = client.documents([place])
            while found == b"":  # the lease has ended while the document was read
                [found] = client.documents([place])
            assert found == b"document"
            client.close()
        finally:
            await tier.aclose()


def test_a_document_survives_the_server_that_holds_it(tmp_path: Path) -> None:
    with Master(tmp_path / "log") as own:
        stays = MooncakeClient(own.settings(32 << 20), Identity(), None)
        leaves = MooncakeClient(own.settings(32 << 20), Identity(), None)
        contents = [b"%d" % number for number in range(8)]
        for content in contents:
            assert post(leaves, "board", content)
        leaves.close()
        assert contents_of(stays, "board") == contents
        stays.close()


async def test_a_document_that_the_store_has_lost_is_posted_again(
    client: MooncakeClient, store: Any, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_board, "KEEP_S", 0.02)
    heard: list[list[bytes]] = []

    def hear(posted: Sequence[Posted]) -> None:
        heard.append([each.content for each in posted])

    assert post(client, "lost", b"another's")
    tier = MooncakeTier(master.settings(), notice=Notice("lost", b"document", hear))
    await tier.open()
    try:
        assert contents_of(client, "lost") == [b"another's", b"document"]
        assert store.remove(slots_of("lost")[1], True) == 0
        async with asyncio.timeout(PATIENCE_S):
            while len(contents_of(client, "lost")) < 2:
                await tier.present([key_of(0)])  # time passes
        assert heard == [[b"another's", b"document"]], "once"
    finally:
        await tier.aclose()
    assert store.remove(slots_of("lost")[1], True) == 0
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("tier-mooncake-keep")]


async def test_a_full_store_is_reported_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store to which no engine has contributed memory yet."""
    with Master(tmp_path / "log") as own:
        tier = MooncakeTier(own.settings(0), notice=Notice("board", b"document"))
        await tier.open()
        assert await tier.present([key_of(0)]) == [False]
        await tier.aclose()
    assert "has no space for the description of this engine" in caplog.text
