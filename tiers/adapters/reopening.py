"""A tier that reopens after its medium has failed as a whole.

If a disk is unplugged, remounted or cleared under an open tier, every operation raises
``TierIoError`` until the tier is closed and opened again. This tier does so in the next operation,
at most once per ``RETRY_S``; operations that arrive meanwhile wait. Callers that try rarely (probes
of a circuit breaker) therefore put no load on a broken disk.

The contents are trusted only if the medium is the one that failed, and still in the same epoch.
Otherwise the tier begins empty and reports the loss. Records are written only under an epoch that
``keep_epoch`` has already stored. So even after a crash it is always possible to begin an epoch
that no tier has reached.

For the same reason a medium that is opened for the first time must not be ahead of the stored
epoch. No tier leaves a medium in that state: the folder was copied while its epoch changed, or the
stored epoch is an old one. The records may then belong to other weights, so the tier begins empty
under a later epoch.

Ownership: everything belongs to the event loop's thread; ``make`` and ``keep_epoch`` run in
separate daemon threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from traceback import TracebackException
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
from tiers.io.threads import in_thread, settled

logger = logging.getLogger(__name__)

RETRY_S = 1.0
CLOSE_WAIT_S = 2.0
"""Time limit for waiting: an attempt waits for the failed tier to close, and a close waits for an
attempt."""

T = TypeVar("T")
Wrapped = TypeVar("Wrapped", bound=Tier)


class ReopeningTier(Tier, Generic[Wrapped]):
    """Uses ``tier`` until it fails, then the tiers that ``make`` returns.

    ``keep_epoch(epoch)`` stores durably that the tier may reach this epoch. ``make(epoch)`` also
    stores the epoch, and creates another, unopened tier for the same folder; this tier drops
    records of earlier epochs. Both may block, and may raise anything while the medium is
    unavailable. ``noted_epoch`` is the epoch that was stored when ``tier`` was made; without
    ``keep_epoch`` there is none. With ``is_strict``, a medium that is ahead of this epoch is an
    error, and nothing is changed.
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
        self._held = 0  # number of records that the tier had when it failed
        self._epoch = 0  # the epoch of the open tier, or of the tier that failed
        self._wanted_epoch = 0  # the epoch of a reset that is due, if there is one
        self._reset_due: int | None = None
        self._closed = False
        self._on_loss: Callable[[], None] = lambda: None
        self._begun_empty = 0
        self.reopenings = 0

    async def open(self) -> TierInfo:
        info = await self._tier.open()
        try:
            info = await self._begin_noted(info)
        except BaseException:  # a cancelled open closes the tier, too
            await self._tier.aclose()
            raise
        self._medium, self._epoch = info.medium, info.epoch
        self._wanted_epoch = info.epoch
        return info

    async def _begin_noted(self, info: TierInfo) -> TierInfo:
        """Store the epoch with which the tier was opened, or begin a later one if its records
        cannot be trusted. Returns the tier's info after that. Raises ``TierError``."""
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
        """See ``Tier.reset``. A failed reset may be repeated and then still means the same
        epoch. If the tier has reached ``epoch`` already, a later one with the same parity
        begins."""
        if self._reset_due != epoch:
            self._reset_due = epoch
            self._wanted_epoch = _as_odd(max(epoch, self._wanted_epoch + 1), epoch)
        await self._try(self._begin_epoch)
        self._reset_due = None

    async def scrub(self, bytes_max: int, period_s: float) -> Scrubbed | None:
        """See ``Tier.scrub``. A scrub does not reopen a failed tier."""
        if self._failure is not None:
            return None
        return await self._try(lambda tier: tier.scrub(bytes_max, period_s))

    def keys(self) -> AsyncIterator[StoredKeys]:
        return self._tier.keys()

    def on_loss(self, call: Callable[[], None]) -> None:
        self._on_loss = call

    async def aclose(self) -> None:
        self._closed = True
        if self._opening is not None:
            # An attempt that hangs is abandoned: it closes what it opened when it ends.
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
        if self._epoch < epoch:  # otherwise the tier was reopened meanwhile, under this epoch
            await self._note_epoch(epoch)
            await tier.reset(epoch)
            self._epoch = epoch

    async def _note_epoch(self, epoch: int) -> None:
        """Store ``epoch`` before anything is written under it. Raises ``TierIoError``."""
        if self._keep_epoch is None:
            return
        try:
            await settled(in_thread(self._keep_epoch, epoch))
        except Exception as error:  # on any error, nothing may be stored under this epoch
            raise TierIoError(f"epoch {epoch} cannot be recorded: {_text_of(error)}") from error

    async def _ready(self) -> None:
        """Make sure that a tier is open, or raise its error."""
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
        except Exception as error:  # on any error, the medium is not back yet
            self._failure = TierIoError(f"the tier cannot be opened again: {_text_of(error)}")
            self._failure.__cause__ = error
        finally:
            self._opening = None
        if self._closed:
            await self._tier.aclose()

    async def _close_failed(self) -> None:
        """Close the failed tier. If its threads hang, the close ends when they do."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._tier.aclose())
        done, _ = await asyncio.wait([self._closing], timeout=CLOSE_WAIT_S)
        if not done:
            raise TierIoError("the failed tier still hangs")
        closing, self._closing = self._closing, None
        closing.result()

    async def _open_again(self) -> None:
        # On a shared medium, the records of an epoch disappear for other engines only when a tier
        # that works under this epoch is reset.
        is_due = self._is_shared and self._epoch < self._wanted_epoch
        tier = await in_thread(self._make, self._epoch if is_due else self._wanted_epoch)
        if self._closed:
            return
        self._tier = tier
        info = await tier.open()
        is_same = (info.medium, info.found_epoch) == (self._medium, self._epoch)
        epoch = self._wanted_epoch if is_due else info.epoch
        if not is_same and info.record_count and not self._is_shared:
            # The records may belong to other weights, which the keys do not show.
            epoch += 1
        epoch = _as_odd(epoch, self._wanted_epoch)
        await self._note_epoch(epoch)
        if epoch != info.epoch:
            await tier.reset(epoch)
        if not is_same or (self._held and not info.record_count):  # ``Recovery.OFF`` drops them
            self._on_loss()
        self._medium, self._epoch = info.medium, epoch
        self._wanted_epoch = max(self._wanted_epoch, epoch)
        self._failure = None
        self.reopenings += 1
        logger.warning(
            "kvtiers: tier %s was opened again after it failed: it holds %d records now and held "
            "%d before%s",
            info.name,
            info.record_count,
            self._held,
            "" if is_same else "; it is not the medium that failed, so it begins empty",
        )


class SharedReopeningTier(ReopeningTier[SharedTier], SharedTier):
    """A ``ReopeningTier`` over a shared tier. A shared tier separates records by epoch itself, so
    the contents of a medium are always trusted."""

    _is_shared = True

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        return await self._try(lambda tier: tier.present(keys))


def _text_of(error: Exception) -> str:
    """``str(error)``, or a text that says that this fails: the error may be of third-party code."""
    return str(TracebackException(type(error), error, None, compact=True))


def _as_odd(epoch: int, like: int) -> int:
    """Return the first epoch from this one on with the same parity as ``like``: the caller
    distinguishes odd from even epochs."""
    return epoch + (epoch - like) % 2


def judge_epochs(found: int, noted: int) -> str:
    """Return the reason why records of epoch ``found`` cannot be trusted if ``noted`` is the stored
    epoch. Empty if they can be trusted, or if a later epoch has begun and they will be dropped."""
    if found <= noted:
        return ""
    return (
        f"its records are of epoch {found}, beyond epoch {noted} in the epoch file: the folder was "
        "copied while its epoch changed, or the epoch file is an older copy, so the records may "
        "belong to other weights"
    )
