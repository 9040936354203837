"""A naive model of a policy's members. The kit compares policies with it under random operations.

Part of ``policies.testing``. Needs hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause


class PolicyMachine(RuleBasedStateMachine):
    """Random operations on a policy, with a set as the naive model of its membership."""

    make: Callable[[], EvictionPolicy]

    @initialize()
    def start(self) -> None:
        self.policy = type(self).make()
        self.members: set[Key] = set()
        self.pinned: set[Key] = set()
        self.gone: set[Key] = set()
        self.next_key = 0

    @rule(count=st.integers(1, 6), depth=st.integers(0, 50), again=st.booleans())
    def insert(self, count: int, depth: int, again: bool) -> None:
        """Insert a request's new keys, tail first, some of which were members before. Then touch
        them."""
        keys: list[Key] = sorted(self.gone, key=repr)[:count] if again else []
        keys += [self.next_key + i for i in range(count - len(keys))]
        self.next_key += count
        for position in reversed(range(len(keys))):
            self.policy.insert(keys[position], EntryInfo(depth_tokens=(depth + position) * 16))
        self.members.update(keys)
        self.gone.difference_update(keys)
        self.policy.touch(keys)

    @rule(data=st.data(), strangers=st.booleans())
    def touch(self, data: st.DataObject, strangers: bool) -> None:
        """Touch members in any order, sometimes twice, sometimes with keys that are not members."""
        known = sorted(self.members, key=repr)
        keys: list[Key] = data.draw(st.lists(st.sampled_from(known), max_size=8)) if known else []
        self.policy.touch([*keys, "stranger"] if strangers else keys)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Pin a different set of members, which must stay."""
        known = sorted(self.members, key=repr)
        self.pinned = set(data.draw(st.lists(st.sampled_from(known)))) if known else set()

    @rule(count=st.integers(0, 9), evict=st.booleans())
    def victims(self, count: int, evict: bool) -> None:
        """Request victims. They are removed, or nothing happens to them."""
        named = self.policy.victims(count, lambda key: key not in self.pinned)
        free = self.members - self.pinned
        assert set(named) <= free, f"named {set(named) - free}, which must not be evicted"
        assert len(set(named)) == len(named), f"named twice: {named}"
        assert len(named) == min(count, len(free)), f"{len(named)} of {count}, {len(free)} free"
        if evict:
            for key in named:
                self.policy.remove(key, RemoveCause.EVICTED)
            self.members.difference_update(named)
            self.gone.update(named)

    @rule(data=st.data(), cause=st.sampled_from(RemoveCause))
    def remove(self, data: st.DataObject, cause: RemoveCause) -> None:
        """Remove any member at any time, or an unknown key, which has no effect."""
        key = data.draw(st.sampled_from([*sorted(self.members, key=repr), "stranger"]))
        self.policy.remove(key, cause)
        self.members.discard(key)
        self.pinned.discard(key)

    @rule(keys=st.booleans(), end=st.booleans())
    def advise(self, keys: bool, end: bool) -> None:
        """Give hints for any keys."""
        hints = {"session_end": True} if end else {"tool_call": True, "return_s": 5.0}
        self.policy.advise(sorted(self.members, key=repr) if keys else ["stranger"], hints)

    @rule(found=st.sampled_from([None, list, dict.fromkeys]))
    def clear(self, found: Callable[[list[Key]], Collection[Key]] | None) -> None:
        """Remove all members at once. An empty policy may also get members back at once."""
        keys = sorted(self.members, key=repr)
        self.policy.clear()
        self.gone.clear()
        if found is not None:
            self.policy.insert_all(found(keys), [EntryInfo()] * len(keys))
            return
        self.members.clear()
        self.pinned.clear()

    @rule()
    def everything(self) -> None:
        """Check that all members can be evicted. This is a rule, because Hypothesis would report a
        failure in ``teardown`` as "inconsistent data generation": teardown also runs after runs
        that Hypothesis cut short.
        """
        named = self.policy.victims(len(self.members) + 1, lambda key: True)
        assert len(named) == len(self.members)
        assert set(named) == self.members

    @invariant()
    def same_members(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy) == len(self.members)
