"""A tier that is opened anew after its medium has failed as a whole.

A disk that is unplugged, remounted or cleared away under an open tier makes every operation a
``TierIoError`` until somebody closes the tier and opens it again. Here the next operation does, at
most once per ``RETRY_S``; operations that come while it is being opened wait for it. Whoever asks
rarely (a breaker's probe) therefore costs a broken disk nothing.

Ownership: everything belongs to the event loop's thread; ``make`` runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from tiers.base import (
    Buffer,
    Key,
    ReadOutcome,
    StoredKeys,
    Tier,
    TierClosedError,
    TierInfo,
    TierIoError,
    WriteOutcome,
)

logger = logging.getLogger(__name__)

RETRY_S = 1.0

T = TypeVar("T")


class ReopeningTier(Tier):
    """``tier`` until it fails, then what ``make`` returns: another one for the same medium, not
    opened yet. ``make`` may block, and raise anything while the medium is not there."""

    def __init__(self, tier: Tier, make: Callable[[], Tier]) -> None:
        self._tier = tier
        self._make = make
        self._failure: TierIoError | None = None
        self._opening: asyncio.Future[None] | None = None
        self._retry_at = 0.0
        self._held = 0  # records, when it failed
        self._epoch = 0
        self._closed = False
        self._on_loss: Callable[[], None] = lambda: None
        self.reopenings = 0

    async def open(self) -> TierInfo:
        return await self._tier.open()

    def footprint_bytes(self, payload_bytes: int) -> int:
        return self._tier.footprint_bytes(payload_bytes)

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        return await self._try(lambda tier: tier.write(keys, buffers))

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        return await self._try(lambda tier: tier.read(keys, into))

    async def delete(self, keys: Sequence[Key]) -> None:
        await self._try(lambda tier: tier.delete(keys))

    async def touch(self, keys: Sequence[Key]) -> None:
        await self._try(lambda tier: tier.touch(keys))

    async def reset(self, epoch: int) -> None:
        self._epoch = epoch
        await self._try(lambda tier: tier.reset(epoch))

    def keys(self) -> AsyncIterator[StoredKeys]:
        return self._tier.keys()

    def on_loss(self, call: Callable[[], None]) -> None:
        self._on_loss = call

    async def aclose(self) -> None:
        self._closed = True
        if self._opening is not None:
            await asyncio.wait([self._opening])
        await self._tier.aclose()

    def stats(self) -> dict[str, Any]:
        return self._tier.stats() | {"reopenings": self.reopenings}

    async def _try(self, operation: Callable[[Tier], Awaitable[T]]) -> T:
        await self._ready()
        tier = self._tier
        try:
            return await operation(tier)
        except TierIoError as error:
            if self._failure is None and tier is self._tier:
                self._failure = error
                self._held = int(tier.stats().get("records", 0))
            raise

    async def _ready(self) -> None:
        """Have an open tier, or raise what is wrong with it."""
        if self._closed:
            raise TierClosedError("the tier was closed")
        if self._failure is None:
            return
        if self._opening is None:
            now = asyncio.get_running_loop().time()
            if now < self._retry_at:
                raise self._failure
            self._retry_at = now + RETRY_S
            self._opening = asyncio.ensure_future(self._reopen())
        await asyncio.wait([self._opening])
        if self._failure is not None:
            raise self._failure

    async def _reopen(self) -> None:
        try:
            await self._open_again()
        except Exception as error:  # whatever it is, the medium is not back yet
            self._failure = TierIoError(f"the tier cannot be opened again: {error}")
            self._failure.__cause__ = error
        finally:
            self._opening = None

    async def _open_again(self) -> None:
        await self._tier.aclose()
        tier = await asyncio.to_thread(self._make)
        self._tier = tier
        info = await tier.open()
        is_whole = info.record_count >= self._held
        if not is_whole:
            # Not the medium as it was: begin empty rather than with an unknown part of it.
            await tier.reset(self._epoch)
            self._on_loss()
        self._failure = None
        self.reopenings += 1
        logger.warning(
            "a failed tier was opened again: it holds %d records and held %d%s",
            info.record_count,
            self._held,
            "" if is_whole else "; it begins empty",
        )
