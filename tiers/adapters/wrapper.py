"""A tier around another tier that passes on every call: the base class of all such tiers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tiers.base import (
    Buffer,
    Key,
    ReadOutcome,
    SharedTier,
    StoredKeys,
    Tier,
    TierInfo,
    WriteOutcome,
)


class TierWrapper(Tier):
    """Passes every call to ``inner``. ``before`` runs ahead of each call and may wait or raise."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    async def before(self, method: str, keys: Sequence[Key]) -> None:
        """Called with the name of the method and its keys (none for ``open``, ``keys``, ...)."""

    async def open(self) -> TierInfo:
        await self.before("open", ())
        return await self.inner.open()

    def footprint_bytes(self, payload_bytes: int) -> int:
        return self.inner.footprint_bytes(payload_bytes)

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        await self.before("write", keys)
        return await self.inner.write(keys, buffers)

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        await self.before("read", keys)
        return await self.inner.read(keys, into)

    async def delete(self, keys: Sequence[Key]) -> None:
        await self.before("delete", keys)
        await self.inner.delete(keys)

    async def touch(self, keys: Sequence[Key]) -> None:
        await self.before("touch", keys)
        await self.inner.touch(keys)

    async def keys(self) -> AsyncIterator[StoredKeys]:
        await self.before("keys", ())
        async for batch in self.inner.keys():
            yield batch

    async def reset(self, epoch: int) -> None:
        await self.before("reset", ())
        await self.inner.reset(epoch)

    async def aclose(self) -> None:
        await self.inner.aclose()

    def on_loss(self, call: Callable[[], None]) -> None:
        self.inner.on_loss(call)

    def stats(self) -> dict[str, Any]:
        return self.inner.stats()


class SharedTierWrapper(TierWrapper, SharedTier):
    """A ``TierWrapper`` around a shared tier. Combine it with another wrapper class to make that
    one shared too: ``class Slow(SharedTierWrapper, SlowTier)``."""

    inner: SharedTier

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        await self.before("present", keys)
        return await self.inner.present(keys)
