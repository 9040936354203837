"""Small documents that engines post for each other in a Mooncake store, which cannot list objects.

A board is a list of ``SLOTS_PER_BOARD`` names that every engine can compute. A document goes to the
first free slot. The store never replaces an object, so if two engines post at once, one gets the
slot; the other detects that and takes the next one. Documents are never changed or removed.

Documents are pinned, so the store does not evict them, and are replicated if there are several
segments. A document is lost with its last replica, or when the master loses its state, so its
author checks it regularly (``NoticeKeeper``). For every day on which an author checks a document,
it also stores a sign of life, which the store may evict.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tiers.io.threads import DaemonThreads
from tiers.mooncake.client import MooncakeClient

logger = logging.getLogger(__name__)

SLOTS_PER_BOARD = 32
KEEP_S = 60.0
"""Interval at which a document is checked."""
AGAIN_S = 1.0
"""Interval between attempts after a failure. A store that has just restarted may have no memory
yet."""
POST_TIMEOUT_S = 5.0
"""Maximum time for which a starting server waits until its document is posted."""


DAY_S = 86_400


class Posted(NamedTuple):
    """A document on a board. ``is_alive`` is True if its author checked it today or yesterday."""

    content: bytes
    is_alive: bool


class Notice(NamedTuple):
    """A document and its board. ``on_found`` is called once, in a thread, with all documents that
    are on the board."""

    board: str
    content: bytes
    on_found: Callable[[Sequence[Posted]], None] = lambda _all: None


def slots_of(board: str) -> list[str]:
    """Return the names of a board's slots."""
    return [f"{board}/{slot}" for slot in range(SLOTS_PER_BOARD)]


def today() -> int:
    """Return the number of the day. It may differ by one between machines; readers allow for
    that."""
    return int(time.time() // DAY_S)


def _signs(name: str) -> list[str]:
    """Return the names of the signs of life of yesterday and today, and of tomorrow, for an author
    whose clock is ahead."""
    return [f"{name}/{today() + day}" for day in (-1, 0, 1)]


def read_boards(client: MooncakeClient, boards: Sequence[str]) -> list[list[Posted]]:
    """Return the readable documents of each board. Raises ``TierIoError``."""
    names = [name for board in boards for name in slots_of(board)]
    contents = client.documents(names)
    held = [n for n, content in enumerate(contents) if content]
    signs = client.have_documents([sign for n in held for sign in _signs(names[n])])
    alive = {n: any(signs[3 * at : 3 * at + 3]) for at, n in enumerate(held)}

    def on(board: int) -> Iterator[Posted]:
        for n in range(board * SLOTS_PER_BOARD, (board + 1) * SLOTS_PER_BOARD):
            if content := contents[n]:
                yield Posted(content, alive[n])

    return [list(on(board)) for board in range(len(boards))]


def post(client: MooncakeClient, board: str, content: bytes) -> bool:
    """Put ``content`` on the board with a sign of life. Returns True if it is on the board now.
    Raises ``TierIoError``."""
    names = slots_of(board)
    tried: set[int] = set()
    while True:
        found = client.documents(names)
        if content in found:
            sign = f"{names[found.index(content)]}/{today()}"
            client.put_document(sign, b"1", is_pinned=False)
            return True
        free = [n for n, held in enumerate(found) if held is None and n not in tried]
        if not free or not client.put_document(names[free[0]], content, is_pinned=True):
            return False
        tried.add(free[0])  # if the slot is not ours now, another engine was faster


class NoticeKeeper:
    """Keeps a notice posted. It belongs to the event loop's thread; calls of the store run in a
    separate thread, because access to another engine's memory may hang."""

    def __init__(self, notice: Notice, client: MooncakeClient) -> None:
        self._notice = notice
        self._client = client
        self._wake = asyncio.Event()
        self._is_posted = True
        self._was_reported = False
        self.posted = asyncio.Event()
        self.threads = DaemonThreads("tier-mooncake-keep", 1)
        self._task = asyncio.create_task(self._keep())

    def look_now(self) -> None:
        """Check now, because the store may have lost the document."""
        self._wake.set()

    def stop(self) -> None:
        """Stop checking. The document stays in the store. The caller ends the threads."""
        self._task.cancel()

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            try:
                is_there = await self.threads.run(self._post)
                self._log(is_there)
            except Exception as error:  # any error: the tier works without the notice
                logger.debug("kvtiers: this engine's description could not be stored: %r", error)
                is_there = False
            self.posted.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), KEEP_S if is_there else AGAIN_S)

    def _post(self) -> bool:
        """Post the notice, in the thread."""
        board, content, on_found = self._notice
        is_posted = post(self._client, board, content)
        if not self._was_reported:
            self._was_reported = True
            on_found(read_boards(self._client, [board])[0])
        return is_posted

    def _log(self, is_posted: bool) -> None:
        if not is_posted and self._is_posted:
            logger.warning(
                "kvtiers: the store has no space for the description of this engine (%s), so "
                "engines with other geometries do not find its blocks",
                self._notice.board,
            )
        self._is_posted = is_posted
