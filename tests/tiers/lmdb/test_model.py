"""The LMDB tier against a dict, over random operations and restarts."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiers.base import ReadOutcome, WriteOutcome
from tiers.io.direct_io import pages_for
from tiers.lmdb.tier import LmdbTier
from tiers.testing import aligned, all_keys, key_of, payload_of

KEYS = [key_of(n) for n in range(40)]
SIZES = [100, 4096, 70_000, 300_000]
CAPACITY_BYTES = (2 << 20) + (3 << 20)
some_keys = st.lists(st.sampled_from(KEYS), max_size=12)


class TierAgainstDict(RuleBasedStateMachine):
    """``self.model``: key to (size, version), in order of use."""

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="tier-model-"))
        self.model: dict[bytes, tuple[int, int]] = {}
        self.version = 0
        self.open()

    def open(self) -> None:
        self.tier = LmdbTier(
            self.folder / "tier", CAPACITY_BYTES, reserve_bytes=0, grow_bytes=1 << 20
        )
        info = self.runner.run(self.tier.open())
        self.capacity_pages = info.capacity_bytes // 4096
        assert info.record_count == len(self.model)
        assert info.used_bytes == self.used_pages() * 4096
        self.leaving_pages = 0

    def used_pages(self) -> int:
        return sum(pages_for(size) for size, _ in self.model.values())

    @rule(keys=some_keys, size=st.sampled_from(SIZES))
    def write(self, keys: list[bytes], size: int) -> None:
        self.version += 1
        data = [payload_of(key, size, self.version) for key in keys]
        outcomes = self.runner.run(self.tier.write(keys, data))
        for key, outcome in zip(keys, outcomes, strict=True):
            if key in self.model:
                assert outcome is WriteOutcome.OK
            elif self.used_pages() + pages_for(size) <= self.capacity_pages:
                assert outcome is WriteOutcome.OK
                self.model[key] = (size, self.version)
            else:
                assert outcome is WriteOutcome.FULL

    @rule(keys=some_keys)
    def read(self, keys: list[bytes]) -> None:
        sizes = [self.model[key][0] if key in self.model else 100 for key in keys]
        into = [aligned(size) for size in sizes]
        outcomes = self.runner.run(self.tier.read(keys, into))
        for key, outcome, data in zip(keys, outcomes, into, strict=True):
            if key in self.model:
                assert outcome is ReadOutcome.OK
                assert np.array_equal(data, payload_of(key, *self.model[key]))
            else:
                assert outcome is ReadOutcome.MISS

    @rule(keys=some_keys)
    def delete(self, keys: list[bytes]) -> None:
        pages = self.used_pages()
        self.runner.run(self.tier.delete(keys))
        for key in keys:
            self.model.pop(key, None)
        self.leaving_pages += pages - self.used_pages()

    @rule(keys=some_keys)
    def touch(self, keys: list[bytes]) -> None:
        self.runner.run(self.tier.touch(keys))
        for key in keys:
            if key in self.model:
                self.model[key] = self.model.pop(key)

    @rule(epoch=st.integers(0, 5))
    def reset(self, epoch: int) -> None:
        self.runner.run(self.tier.reset(epoch))
        self.model.clear()
        self.leaving_pages = 0

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.tier.aclose())
        self.open()

    @invariant()
    def same_keys_in_order_of_use(self) -> None:
        found = self.runner.run(all_keys(self.tier))
        assert [(s.key, s.payload_bytes) for s in found] == [
            (key, size) for key, (size, _) in self.model.items()
        ]

    @invariant()
    def every_page_has_one_owner(self) -> None:
        self.tier.check()
        # Extents of deleted records are free once that is durable, soon after ``delete``.
        used = self.tier.used_bytes // 4096
        assert self.used_pages() <= used <= self.used_pages() + self.leaving_pages

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.runner.run(self.tier.aclose())
            self.runner.close()
            shutil.rmtree(self.folder)


TestTierAgainstDict = TierAgainstDict.TestCase
TestTierAgainstDict.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
