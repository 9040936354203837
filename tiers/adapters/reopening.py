"""A tier that is opened anew after its medium has failed as a whole.

A disk that is unplugged, remounted or cleared away under an open tier makes every operation a
``TierIoError`` until somebody closes the tier and opens it again. Here the next operation does, at
most once per ``RETRY_S``; operations that come while it is being opened wait for it. Whoever asks
rarely (a breaker's probe) therefore costs a broken disk nothing.

What comes back is believed only if it is the medium that failed, in the epoch in which it failed.
Anything else begins empty, and the loss is told. Records are only ever written under an epoch that
``keep_epoch`` has noted before: whoever keeps the epochs can then always begin one that no tier
has reached, also after a crash in between.

For the same reason a medium that is opened first and has an epoch beyond the one that was noted
was not left so by any tier: a copy was made of the folder while its epoch changed. Its records may
be of other weights, and it begins empty under a later epoch.

Ownership: everything belongs to the event loop's thread; ``make`` and ``keep_epoch`` run in daemon
threads of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from tiers.base import (
    Buffer,
    Key,
    ReadOutcome,
    Scrubbed,
    SharedTier,
    StoredKeys,
    Tier,
    TierClosedError,
    TierInfo,
    TierIoError,
    WriteOutcome,
)
from tiers.io.awaiting import settled
from tiers.io.daemon_threads import in_thread

logger = logging.getLogger(__name__)

RETRY_S = 1.0
CLOSE_WAIT_S = 2.0
"""How long an attempt waits for the failed tier to close, and closing for an attempt to end."""

T = TypeVar("T")
Wrapped = TypeVar("Wrapped", bound=Tier)


class ReopeningTier(Tier, Generic[Wrapped]):
    """``tier`` until it fails, then what ``make`` returns.

    ``keep_epoch(epoch)`` notes durably that the tier may reach this epoch. ``make(epoch)`` notes it
    too, and makes another tier for the same place, not opened yet, which forgets what the medium
    holds of earlier epochs. Both may block, and raise anything while the medium is not there.
    ``noted_epoch`` is what was noted when ``tier`` was made; without ``keep_epoch`` nothing was.
    With ``is_strict`` a medium that is ahead of it is an error, and nothing is touched.
    """

    _is_shared: ClassVar = False

    def __init__(
        self,
        tier: Wrapped,
        make: Callable[[int], Wrapped],
        keep_epoch: Callable[[int], object] | None = None,
        noted_epoch: int = 0,
        *,
        is_strict: bool = False,
    ) -> None:
        self._tier = tier
        self._make = make
        self._keep_epoch = keep_epoch
        self._noted_epoch = noted_epoch
        self._is_strict = is_strict
        self._failure: TierIoError | None = None
        self._opening: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._retry_at = 0.0
        self._medium = ""
        self._held = 0  # records, when it failed
        self._epoch = 0  # of the open tier, or of the one that failed
        self._wanted_epoch = 0  # a later one while a reset is due
        self._reset_due: int | None = None
        self._closed = False
        self._on_loss: Callable[[], None] = lambda: None
        self._begun_empty = 0
        self.reopenings = 0

    async def open(self) -> TierInfo:
        info = await self._tier.open()
        try:
            info = await self._begin_noted(info)
        except BaseException:
            await self._tier.aclose()
            raise
        self._medium, self._epoch = info.medium, info.epoch
        self._wanted_epoch = info.epoch
        return info

    async def _begin_noted(self, info: TierInfo) -> TierInfo:
        """Note the epoch that the tier was opened with, or leave it behind if it cannot be
        believed. What the tier says of itself then. Raises ``TierError``."""
        is_believed = self._keep_epoch is None or self._is_shared
        trouble = "" if is_believed else judge_epochs(info.found_epoch, self._noted_epoch)
        if not trouble:
            await self._note_epoch(info.epoch)
            return info
        epoch = _as_odd(info.epoch + 1, self._noted_epoch)
        if info.record_count:
            if self._is_strict:
                raise TierIoError(f'{trouble}. Use recovery "quiet" to begin empty')
            text = "kvtiers: a tier (%s, medium %s) begins empty, without its %d records: %s"
            logger.warning(text, info.name, info.medium, info.record_count, trouble)
            self._begun_empty += 1
        await self._note_epoch(epoch)
        await self._tier.reset(epoch)
        used_bytes = int(self._tier.stats().get("used_bytes", 0))
        return replace(info, epoch=epoch, record_count=0, used_bytes=used_bytes)

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
        """As for every tier. One that failed may be repeated, and still means the same epoch."""
        if self._reset_due != epoch:
            self._reset_due = epoch
            self._wanted_epoch = max(epoch, self._wanted_epoch + 1)
        await self._try(self._begin_epoch)
        self._reset_due = None

    async def scrub(self, most_bytes: int, period_s: float) -> Scrubbed | None:
        """As for every tier; no reason to open one again that has failed."""
        if self._failure is not None:
            return None
        return await self._try(lambda tier: tier.scrub(most_bytes, period_s))

    def keys(self) -> AsyncIterator[StoredKeys]:
        return self._tier.keys()

    def on_loss(self, call: Callable[[], None]) -> None:
        self._on_loss = call

    async def aclose(self) -> None:
        self._closed = True
        if self._opening is not None:
            # What hangs is left behind: it closes what it opens when it is through.
            await asyncio.wait([self._opening], timeout=CLOSE_WAIT_S)
        await self._tier.aclose()

    def stats(self) -> dict[str, Any]:
        found = self._tier.stats()
        found["quarantined"] = int(found.get("quarantined", 0)) + self._begun_empty
        return found | {"reopenings": self.reopenings}

    async def _try(self, operation: Callable[[Wrapped], Awaitable[T]]) -> T:
        await self._ready()
        tier = self._tier
        try:
            return await operation(tier)
        except TierIoError as error:
            if self._failure is None and tier is self._tier:
                self._failure = error
                self._held = int(tier.stats().get("records", 0))
            raise

    async def _begin_epoch(self, tier: Tier) -> None:
        epoch = self._wanted_epoch
        if self._epoch < epoch:  # else it was opened again meanwhile, and begins with it
            await self._note_epoch(epoch)
            await tier.reset(epoch)
            self._epoch = epoch

    async def _note_epoch(self, epoch: int) -> None:
        """Have ``epoch`` noted before anything is stored under it. Raises ``TierIoError``."""
        if self._keep_epoch is None:
            return
        try:
            await settled(in_thread(self._keep_epoch, epoch))
        except Exception as error:  # whatever it is, nothing may be stored under it
            raise TierIoError(f"epoch {epoch} cannot be noted: {error}") from error

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
            await self._close_failed()
            await self._open_again()
        except Exception as error:  # whatever it is, the medium is not back yet
            self._failure = TierIoError(f"the tier cannot be opened again: {error}")
            self._failure.__cause__ = error
        finally:
            self._opening = None
        if self._closed:
            await self._tier.aclose()

    async def _close_failed(self) -> None:
        """Close the failed tier, or begin to: where its threads hang that ends when they do."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._tier.aclose())
        done, _ = await asyncio.wait([self._closing], timeout=CLOSE_WAIT_S)
        if not done:
            raise TierIoError("the one that failed still hangs")
        closing, self._closing = self._closing, None
        closing.result()

    async def _open_again(self) -> None:
        # Where others share the medium, what was stored under the epoch that a reset leaves is gone
        # for them only when a tier that works under that epoch is told of the reset.
        is_due = self._is_shared and self._epoch < self._wanted_epoch
        tier = await in_thread(self._make, self._epoch if is_due else self._wanted_epoch)
        if self._closed:
            return
        self._tier = tier
        info = await tier.open()
        is_same = (info.medium, info.found_epoch) == (self._medium, self._epoch)
        epoch = self._wanted_epoch if is_due else info.epoch
        if not is_same and info.record_count and not self._is_shared:
            # Of other weights, for all that is known: a key does not tell them apart. Those who
            # share a medium are told apart by the tier itself.
            epoch += 1
        epoch = _as_odd(epoch, self._wanted_epoch)
        await self._note_epoch(epoch)
        if epoch != info.epoch:
            await tier.reset(epoch)
        if not is_same:
            self._on_loss()
        self._medium, self._epoch = info.medium, epoch
        self._wanted_epoch = max(self._wanted_epoch, epoch)
        self._failure = None
        self.reopenings += 1
        logger.warning(
            "a failed tier was opened again: it holds %d records and held %d%s",
            info.record_count,
            self._held,
            "" if is_same else "; it is not the medium that failed, and begins empty",
        )


class SharedReopeningTier(ReopeningTier[SharedTier], SharedTier):
    """A ``ReopeningTier`` over a shared tier. A shared tier parts records by epoch itself, so what
    a medium holds is always believed."""

    _is_shared = True

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        return await self._try(lambda tier: tier.present(keys))


def _as_odd(epoch: int, like: int) -> int:
    """This epoch or the next one, odd or even as the other is: odd ones mean something to whoever
    gives them out."""
    return epoch + (epoch - like) % 2


def judge_epochs(found: int, noted: int) -> str:
    """Why records of the epoch ``found`` cannot be believed where ``noted`` is the epoch that is
    noted beside them; empty if they can, or are to be forgotten because a later one was begun."""
    if found <= noted:
        return ""
    return (
        f"its records are of epoch {found}, beyond epoch {noted} in the epoch file: the folder was "
        "copied while its epoch changed, or that file is an older one, and the records may be of "
        "other weights"
    )
