"""The tier index compared with a naive model, and its table of states."""

from __future__ import annotations

import random
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offload.errors import InvariantError
from offload.index import tier_index as index_module
from offload.index.capacity import ByteCapacity, Reservation, SlotCapacity
from offload.index.states import TRANSITIONS, ChunkEvent, ChunkState, Transition
from offload.index.tier_index import BULK_KEYS_MIN, TierIndex
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy
from policies.guarded import GuardedPolicy
from policies.registry import make_policy

KEYS = [bytes([n]) * 4 for n in range(11)]
SLOTS = 3
keys_st = st.lists(st.sampled_from(KEYS[:6]), min_size=1, max_size=4, unique=True)


def reserve(index: TierIndex, keys: Sequence[bytes]) -> Reservation:
    return index.reserve(keys, [EntryInfo()] * len(keys))


def commit(index: TierIndex, keys: Sequence[bytes]) -> None:
    index.commit(keys, [EntryInfo()] * len(keys))


class NaiveIndex:
    """The specification of the index in its simplest form: lists and per-key records."""

    def __init__(self) -> None:
        self.state = dict.fromkeys(KEYS, ChunkState.ABSENT)
        self.pins = dict.fromkeys(KEYS, 0)
        self.order: list[bytes] = []  # resident, least recently used first

    def used(self) -> int:
        return sum(state is not ChunkState.ABSENT for state in self.state.values())

    def reserve(self, keys: list[bytes]) -> tuple[int, list[bytes]]:
        evicted = []
        for count, key in enumerate(keys):
            if self.used() == SLOTS:
                victim = next((k for k in self.order if self.pins[k] == 0), None)
                if victim is None:
                    return count, evicted
                self._leave(victim)
                evicted.append(victim)
            self.state[key] = ChunkState.FILLING
        return len(keys), evicted

    def end(self, key: bytes, *, good: bool) -> None:
        if self.state[key] is ChunkState.DOOMED:
            self.unpin(key)
        elif good:
            self.order.append(key)
            self.state[key] = ChunkState.PINNED if self.pins[key] else ChunkState.RESIDENT
        else:
            self.state[key] = ChunkState.DOOMED if self.pins[key] else ChunkState.ABSENT

    def pin(self, key: bytes) -> None:
        self.pins[key] += 1
        if self.state[key] is ChunkState.RESIDENT:
            self.state[key] = ChunkState.PINNED

    def unpin(self, key: bytes) -> None:
        self.pins[key] -= 1
        if self.pins[key] == 0:
            if self.state[key] is ChunkState.DOOMED:
                self.state[key] = ChunkState.ABSENT
            elif self.state[key] is ChunkState.PINNED:
                self.state[key] = ChunkState.RESIDENT

    def drop(self, key: bytes) -> None:
        if self.state[key] is ChunkState.FILLING:
            self.pins[key] += 1
            self.state[key] = ChunkState.DOOMED
        elif key in self.order:
            self._leave(key)
            if self.pins[key]:
                self.state[key] = ChunkState.DOOMED

    def _leave(self, key: bytes) -> None:
        self.order.remove(key)
        self.state[key] = ChunkState.ABSENT


class IndexMachine(RuleBasedStateMachine):
    """Random operations on three slots; the index and the model must agree on every key."""

    def __init__(self) -> None:
        super().__init__()
        self.index = TierIndex("cpu", SlotCapacity(SLOTS), LruPolicy())
        self.model = NaiveIndex()
        self.jobs: list[bytes] = []  # keys that a job is filling
        self.pinned: list[bytes] = []

    @rule(keys=keys_st)
    def reserve(self, keys: list[bytes]) -> None:
        keys = [key for key in keys if self.index.is_absent(key)]
        granted, evicted = self.model.reserve(keys)
        answer = reserve(self.index, keys)
        assert len(answer.locations) == granted
        assert list(answer.evicted) == evicted
        self.jobs += keys[:granted]

    @rule(count=st.integers(1, SLOTS), good=st.sampled_from([True, True, True, False]))
    def end(self, count: int, good: bool) -> None:
        keys = self.jobs[:count]
        if good:
            commit(self.index, keys)
        else:
            self.index.abort(keys)
        for key in reversed(keys):
            self.model.end(key, good=good)
        del self.jobs[:count]

    @rule(key=st.sampled_from(KEYS[:6]))
    def pin(self, key: bytes) -> None:
        if key in self.index or self.index.is_filling(key):
            self.index.pin([key])
            self.model.pin(key)
            self.pinned.append(key)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pinned:
            keys = data.draw(st.lists(st.sampled_from(self.pinned), max_size=3))
            self.let_go(
                [k for n, k in enumerate(keys) if keys[: n + 1].count(k) <= self.pinned.count(k)]
            )

    def let_go(self, keys: list[bytes]) -> None:
        self.index.unpin(keys)
        for key in keys:
            self.pinned.remove(key)
            self.model.unpin(key)

    @rule(keys=keys_st)
    def touch(self, keys: list[bytes]) -> None:
        self.index.touch(keys)
        for key in reversed(keys):
            if key in self.model.order:
                self.model.order.remove(key)
                self.model.order.append(key)

    @rule(key=st.sampled_from(KEYS[:6]))
    def drop(self, key: bytes) -> None:
        assert self.index.drop([key]) == ([key] if key in self.model.order else [])
        self.model.drop(key)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        for key in KEYS:
            self.model.drop(key)

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert {key: self.index.state(key) for key in KEYS} == self.model.state
        assert self.index.space.used == self.model.used()
        places = [
            self.index.location(k) for k in KEYS if k in self.index or self.index.is_filling(k)
        ]
        assert len(places) == len(set(places))


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase


class TestManyAtOnce(IndexMachine.TestCase):  # type: ignore[misc, valid-type]  # made by Hypothesis
    """The same model, with every key checked before all are changed at once."""

    settings = IndexMachine.TestCase.settings

    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(index_module, "BULK_KEYS_MIN", 1)


_S, _E = ChunkState, ChunkEvent
ALLOWED: dict[tuple[ChunkState, ChunkEvent], set[ChunkState]] = {
    (_S.ABSENT, _E.RESERVE): {_S.FILLING},
    (_S.ABSENT, _E.RECOVER): {_S.RESIDENT},
    (_S.ABSENT, _E.DROP): {_S.ABSENT},
    (_S.FILLING, _E.COMMIT): {_S.RESIDENT, _S.PINNED},
    (_S.FILLING, _E.ABORT): {_S.ABSENT, _S.DOOMED},
    (_S.FILLING, _E.PIN): {_S.FILLING},
    (_S.FILLING, _E.UNPIN): {_S.FILLING},
    (_S.FILLING, _E.DROP): {_S.DOOMED},
    (_S.RESIDENT, _E.PIN): {_S.PINNED},
    (_S.RESIDENT, _E.DROP): {_S.ABSENT},
    (_S.RESIDENT, _E.EVICT): {_S.ABSENT},
    (_S.PINNED, _E.PIN): {_S.PINNED},
    (_S.PINNED, _E.UNPIN): {_S.PINNED, _S.RESIDENT},
    (_S.PINNED, _E.DROP): {_S.DOOMED},
    (_S.DOOMED, _E.UNPIN): {_S.DOOMED, _S.ABSENT},
    (_S.DOOMED, _E.COMMIT): {_S.DOOMED, _S.ABSENT},
    (_S.DOOMED, _E.ABORT): {_S.DOOMED, _S.ABSENT},
    (_S.DOOMED, _E.DROP): {_S.DOOMED},
}
"""The allowed transitions: a table of the tests, independent of the one that the index executes."""


def test_the_table_allows_these_events_and_no_others() -> None:
    rows = {(state, event) for event, row in TRANSITIONS.items() for state in row}
    assert rows == set(ALLOWED)


def test_an_event_that_is_not_in_the_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index executes the table: without a row nothing happens, and with another row something
    else does."""
    row = TRANSITIONS[ChunkEvent.DROP]
    monkeypatch.delitem(row, ChunkState.PINNED)
    index = in_state(ChunkState.PINNED)
    with pytest.raises(InvariantError, match=r"drop .* in state pinned"):
        index.drop([KEYS[0]])
    assert index.state(KEYS[0]) is ChunkState.PINNED
    monkeypatch.setitem(row, ChunkState.PINNED, TRANSITIONS[ChunkEvent.ABORT][ChunkState.DOOMED])
    index.drop([KEYS[0]])
    assert index.state(KEYS[0]) is ChunkState.ABSENT


@pytest.mark.parametrize("many", [1, 64])
def test_every_transition_agrees_with_the_model(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run that covers the whole table; Hypothesis reaches only a part of it."""
    monkeypatch.setattr(index_module, "BULK_KEYS_MIN", many)
    rng = random.Random(many)
    seen: set[tuple[ChunkState, ChunkEvent, ChunkState]] = set()
    machine = IndexMachine()

    def step(event: ChunkEvent) -> None:
        before = dict(machine.model.state)
        keys = rng.sample(KEYS[:6], rng.randint(1, 3))
        if event is ChunkEvent.RESERVE:
            machine.reserve(keys=keys)
            was_resident = [key for key in KEYS if before[key] is ChunkState.RESIDENT]
            seen.update((before[k], ChunkEvent.EVICT, machine.model.state[k]) for k in was_resident)
        elif event in (ChunkEvent.COMMIT, ChunkEvent.ABORT):
            keys = machine.jobs[: len(keys)]
            machine.end(count=len(keys), good=event is ChunkEvent.COMMIT)
        elif event is ChunkEvent.PIN:
            # all pinned: no operation is possible
            keys = keys[:1] if len(machine.pinned) < 3 else []
            for key in keys:
                machine.pin(key=key)
        elif event is ChunkEvent.UNPIN:
            keys = machine.pinned[: len(keys)]
            machine.let_go(keys)
        else:
            keys = keys[:1]
            machine.drop(key=keys[0])
        seen.update((before[key], event, machine.model.state[key]) for key in keys)
        machine.agrees()

    events = [e for e in ChunkEvent if e not in (ChunkEvent.EVICT, ChunkEvent.RECOVER)]
    for number in range(4000):
        step(rng.choice(events))
        if number % 100 == 99:
            machine.clear()
            machine.agrees()
    allowed = {(s, e, after) for (s, e), states in ALLOWED.items() for after in states}
    allowed = {step for step in allowed if step[1] is not ChunkEvent.RECOVER}
    assert allowed <= seen, allowed - seen


def in_state(state: ChunkState) -> TierIndex:
    """An index whose chunk ``KEYS[0]`` is in the given state."""
    index, key = TierIndex("cpu", SlotCapacity(2), LruPolicy()), [KEYS[0]]
    if state is not ChunkState.ABSENT:
        reserve(index, key)
    if state in (ChunkState.RESIDENT, ChunkState.PINNED, ChunkState.DOOMED):
        commit(index, key)
    if state in (ChunkState.PINNED, ChunkState.DOOMED):
        index.pin(key)
    if state is ChunkState.DOOMED:
        index.drop(key)
    assert index.state(KEYS[0]) is state
    return index


@pytest.mark.parametrize("state", ChunkState)
def test_a_batch_is_absent_only_if_each_chunk_is(state: ChunkState) -> None:
    index = in_state(state)
    assert index.is_absent(KEYS[0]) == (state is ChunkState.ABSENT)
    assert index.are_absent([KEYS[1], KEYS[0]]) == (state is ChunkState.ABSENT)


ACTIONS = {
    ChunkEvent.RESERVE: lambda index: reserve(index, [KEYS[0]]),
    ChunkEvent.RECOVER: lambda index: index._apply(
        KEYS[0], ChunkEvent.RECOVER, index.space.take(1)
    ),
    ChunkEvent.COMMIT: lambda index: commit(index, [KEYS[0]]),
    ChunkEvent.ABORT: lambda index: index.abort([KEYS[0]]),
    ChunkEvent.PIN: lambda index: index.pin([KEYS[0]]),
    ChunkEvent.UNPIN: lambda index: index.unpin([KEYS[0]]),
    ChunkEvent.DROP: lambda index: index.drop([KEYS[0]]),
}


@pytest.mark.parametrize("state", ChunkState)
@pytest.mark.parametrize("event", ACTIONS)
def test_every_event_in_every_state_follows_the_table(state: ChunkState, event: ChunkEvent) -> None:
    index = in_state(state)
    allowed = ALLOWED.get((state, event))
    if (state, event) == (ChunkState.FILLING, ChunkEvent.UNPIN):
        allowed = None  # allowed only after a pin
    if allowed is None:
        with pytest.raises(InvariantError, match=state.value):
            ACTIONS[event](index)
    else:
        ACTIONS[event](index)
        assert index.state(KEYS[0]) in allowed


ROWS = [(event, state) for event, row in TRANSITIONS.items() for state in row]
BULK_ACTIONS = ACTIONS | {
    ChunkEvent.RECOVER: lambda index: index.recover([KEYS[0]], [EntryInfo()]),
    ChunkEvent.EVICT: lambda index: index.evict(1),
}


def ready_for(event: ChunkEvent, state: ChunkState, many: int) -> TierIndex:
    """An index whose chunk ``KEYS[0]`` is in a state in which the event is allowed. With ``many``
    above 1, it is not alone in its index, which excludes the bulk path of ``recover``."""
    index = in_state(state)
    if (event, state) == (ChunkEvent.UNPIN, ChunkState.FILLING):
        index.pin([KEYS[0]])
    if many > 1:
        reserve(index, [KEYS[1]])
    return index


@pytest.fixture(params=[1, 64])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of keys from which bulk paths are used: always or never, in these tests."""
    monkeypatch.setattr(index_module, "BULK_KEYS_MIN", request.param)
    count: int = request.param
    return count


@pytest.mark.parametrize(("event", "state"), ROWS)
def test_an_index_executes_every_row_of_the_table(
    event: ChunkEvent, state: ChunkState, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another target in a row, the event has another result."""
    row = TRANSITIONS[event][state]
    used = {row.free, row.pinned}
    other = ChunkState.FILLING if ChunkState.DOOMED in used else ChunkState.DOOMED
    monkeypatch.setitem(TRANSITIONS[event], state, Transition(other, other, row.pins))
    index = ready_for(event, state, many)
    BULK_ACTIONS[event](index)
    assert index.state(KEYS[0]) is other


@pytest.mark.parametrize(("event", "state"), ROWS)
def test_an_index_adds_the_pins_of_the_table(
    event: ChunkEvent, state: ChunkState, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index cannot be made if the table changes the pins in a transition that bulk paths make
    without counting pins."""
    row = TRANSITIONS[event][state]
    monkeypatch.setitem(TRANSITIONS[event], state, row._replace(pins=row.pins + 1))
    try:
        index = ready_for(event, state, many)
    except AssertionError:
        assert row.pins == 0
        return
    before = index._pins[KEYS[0]]
    BULK_ACTIONS[event](index)
    assert index._pins[KEYS[0]] == before + row.pins + 1


@pytest.mark.parametrize(("event", "state"), ROWS)
def test_an_event_without_a_row_is_refused(
    event: ChunkEvent, state: ChunkState, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index cannot be made if the row of a bulk path is missing."""
    monkeypatch.delitem(TRANSITIONS[event], state)
    with pytest.raises((InvariantError, KeyError)):
        BULK_ACTIONS[event](ready_for(event, state, many))


@pytest.mark.parametrize("state", [ChunkState.FILLING, ChunkState.RESIDENT, ChunkState.PINNED])
def test_clear_drops_as_the_table_says(
    state: ChunkState, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = TRANSITIONS[ChunkEvent.DROP][state]
    other = ChunkState.FILLING if ChunkState.DOOMED in (row.free, row.pinned) else ChunkState.DOOMED
    monkeypatch.setitem(TRANSITIONS[ChunkEvent.DROP], state, Transition(other, other, row.pins))
    index = ready_for(ChunkEvent.DROP, state, many)
    index.clear()
    assert index.state(KEYS[0]) is other


def test_a_pinned_chunk_is_not_evicted() -> None:
    index = TierIndex("cpu", SlotCapacity(2), LruPolicy())
    for key in KEYS[:2]:
        reserve(index, [key])
        commit(index, [key])
    index.pin([KEYS[0]])
    assert reserve(index, [KEYS[2]]).evicted == (KEYS[1],)
    assert reserve(index, [KEYS[3]]).locations == ()


class _Evil(LruPolicy):
    def victims(self, count, evictable):  # type: ignore[no-untyped-def]  # a broken plugin
        return super().victims(count, lambda key: True)


def test_a_policy_that_names_a_pinned_key_is_replaced_and_the_key_stays() -> None:
    index = TierIndex("cpu", SlotCapacity(1), _Evil())
    reserve(index, [KEYS[0]])
    commit(index, [KEYS[0]])
    index.pin([KEYS[0]])
    assert reserve(index, [KEYS[1]]).locations == ()
    assert isinstance(index.policy, GuardedPolicy)
    assert type(index.policy.active) is LruPolicy
    index.unpin([KEYS[0]])
    assert reserve(index, [KEYS[1]]).evicted == (KEYS[0],)
    index.check()


def test_evicting_a_pinned_key_is_an_invariant_error_behind_the_guard_too() -> None:
    index = TierIndex("cpu", SlotCapacity(1), LruPolicy())
    index.policy = _Evil()
    reserve(index, [KEYS[0]])
    commit(index, [KEYS[0]])
    index.pin([KEYS[0]])
    with pytest.raises(InvariantError, match="evict"):
        reserve(index, [KEYS[1]])


def test_bytes_are_evicted_ahead_to_the_low_watermark() -> None:
    index = TierIndex("lmdb", ByteCapacity(1000), LruPolicy(), low_watermark=0.8)
    info = EntryInfo(size_bytes=100)
    index.reserve(KEYS[:10], [info] * 10)
    index.commit(KEYS[:10], [info] * 10)
    answer = index.reserve([KEYS[10]], [info])
    # Committed together, so the tail of the prefix is the oldest.
    assert answer.evicted == (KEYS[9], KEYS[8])
    assert index.space.used == 900
    index.check()


@pytest.mark.parametrize("also_twice", [False, True])
@pytest.mark.parametrize("count", [BULK_KEYS_MIN - 1, BULK_KEYS_MIN])
def test_a_key_that_is_being_written_is_not_reserved_again(count: int, also_twice: bool) -> None:
    """Otherwise the end of the first write would make it a hit, at the location of the second."""
    keys = [bytes([n]) * 4 for n in range(count)]
    index = TierIndex("cpu", SlotCapacity(100), LruPolicy())
    reserve(index, keys[5:6])
    again = [*keys[:-1], keys[0]] if also_twice else keys
    with pytest.raises(InvariantError, match="reserve"):
        reserve(index, again)
    try:
        commit(index, keys[5:6])
    except InvariantError:
        assert count == BULK_KEYS_MIN, "a long batch has lost the first location"
    assert list(index.resident.values()) in ([], [0]), "a location that nothing was written to"


def test_recovery_keeps_order_and_refuses_what_does_not_fit() -> None:
    index = TierIndex("lmdb", ByteCapacity(250), LruPolicy())
    info = EntryInfo(size_bytes=100)
    assert index.recover(KEYS[:3], [info] * 3) == [KEYS[2]]
    assert index.reserve([KEYS[5]], [info]).evicted == (KEYS[0],)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0], [1, 2]], [[0, 1, 1, 2]]])
def test_bulk_recovery_equals_recovery_one_by_one(policy: str, parts: list[list[int]]) -> None:
    """An empty index enters everything at once, unless a key occurs twice."""
    index = TierIndex("lmdb", ByteCapacity(350), make_policy(policy))
    resident = index.resident
    info = EntryInfo(size_bytes=100)
    rejected: list[bytes] = []
    for part in parts:
        rejected += index.recover([KEYS[n] for n in part], [info] * len(part))
    assert rejected == [KEYS[1]] * (sum(map(len, parts)) - 3)
    assert all(key in resident for key in KEYS[:3])
    index.check()
    assert index.reserve(KEYS[4:6], [info] * 2).evicted == (KEYS[0], KEYS[1])
