"""A process that shares a folder of files is killed before each of its steps on the file system.
The others find complete records or none, and nothing of the killed process remains."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiers.base import Key, ReadOutcome, WriteOutcome
from tiers.files.shared_folder import COMMON, SharedFolder
from tiers.record import NO_NAMESPACE, Identity
from tiers.testing import aligned, key_of, payload_of

IDENTITY = Identity(NO_NAMESPACE, 0)
CAPACITY = 1 << 20
SIZE = 5000
LARGE = 60_000
KEPT = [key_of(n) for n in range(4)]
NEW = [key_of(n) for n in range(100, 104)]
MANY = [key_of(n) for n in range(200, 220)]
"""More large records than fit."""
OWN = key_of(300)
STEPS = ("open", "write", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "fsync", "utime")
"""Functions of ``os`` that change something, and ``open``, which may create."""

Life = Callable[[SharedFolder, Callable[[str], None]], None]


def opened(folder: Path) -> SharedFolder:
    return SharedFolder(folder, IDENTITY, CAPACITY, False)


def store(shared: SharedFolder, keys: list[Key], size: int = SIZE) -> list[WriteOutcome]:
    epoch = shared.epoch
    return [shared.store(key, epoch, payload_of(key, size), n + 1, n) for n, key in enumerate(keys)]


def fetch(shared: SharedFolder, key: Key, size: int = SIZE) -> ReadOutcome:
    """Raise ``AssertionError`` for bytes that do not belong to the key."""
    into = aligned(size)
    outcome = shared.fetch(key, shared.epoch, into)
    assert outcome is not ReadOutcome.OK or np.array_equal(into, payload_of(key, size))
    return outcome


def stores_and_removes(shared: SharedFolder, say: Callable[[str], None]) -> None:
    store(shared, NEW)
    say("stored")
    shared.remove(NEW[:1], COMMON)
    shared.renew()


def makes_room(shared: SharedFolder, _say: Callable[[str], None]) -> None:
    store(shared, MANY, LARGE)


def gets_other_weights(shared: SharedFolder, say: Callable[[str], None]) -> None:
    shared.begin_own()
    say("reset")
    store(shared, [OWN])
    shared.remove_gone()
    shared.begin_own()


def until_killed(life: Callable[[Callable[[str], None]], None], step: int) -> tuple[bool, str]:
    """Run this in a separate process, killed before its step of this number. Returns True if it was
    killed, and its output until then."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            taken = 0

            def counted(real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any, **options: Any) -> Any:
                    nonlocal taken
                    taken += 1
                    if taken == step:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*arguments, **options)

                return call

            write = os.write
            for name in STEPS:
                setattr(os, name, counted(getattr(os, name)))
            life(lambda what: (write(writing, what.encode()), None)[1])
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, encoding="ascii") as said:
        words = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), "it failed without being killed"
    return code != 0, words


def nothing_of_the_dead_is_left(folder: Path, shared: SharedFolder) -> None:
    """Two things are kept for an hour: an epoch that no engine claims any more, and the file of an
    engine that has not announced itself yet."""
    for path in folder.glob("epoch-[1-9]*"):
        os.utime(path, (1, 1))
    shared.scan()
    shared.remove_gone()
    unread = [path for path in folder.glob("engines/*") if not path.read_bytes()]
    for path in unread:
        path.unlink()
    assert [path.name for path in folder.glob("engines/*")] == [shared.engines.name]
    assert {path.name for path in folder.glob("epoch-*")} <= {"epoch-0"}
    assert not list(folder.glob("gone-*"))
    assert not list(folder.glob("epoch-*/*.tmp"))


@pytest.mark.parametrize(
    ("life", "every"),
    [
        (stores_and_removes, 7),
        (makes_room, 17),
        (gets_other_weights, 1),
        pytest.param(stores_and_removes, 1, marks=pytest.mark.thorough),
    ],
)
def test_killed_before_each_step(tmp_path: Path, life: Life, every: int) -> None:
    folder = tmp_path / "tier"
    shared = opened(folder)
    step, was_killed = 0, True
    while was_killed:
        step += every
        assert store(shared, KEPT) == [WriteOutcome.OK] * len(KEPT)
        was_killed, said = until_killed(lambda say: life(opened(folder), say), step)
        found = [fetch(shared, key) for key in KEPT]
        new = [fetch(shared, key) for key in NEW]
        many = [fetch(shared, key, LARGE) for key in MANY]
        own = fetch(shared, OWN)
        whole = {ReadOutcome.OK, ReadOutcome.MISS}
        assert {*found, *new, *many} <= whole, f"part of a record, step {step}"
        assert own is ReadOutcome.MISS, "the record has other weights"
        if life is stores_and_removes:
            assert set(found) == {ReadOutcome.OK}
            assert "stored" not in said or new[1:] == [ReadOutcome.OK] * 3
        if life is gets_other_weights:
            assert len(set(found)) == 1, "the whole epoch must be removed"
            assert "reset" not in said or found[0] is ReadOutcome.MISS
        nothing_of_the_dead_is_left(folder, shared)
        assert sum(path.stat().st_size for path in folder.glob("epoch-*/*")) <= CAPACITY
        shared.remove([*NEW, *MANY], COMMON)
    assert step > 20, "no process was killed"
    shared.close()


def makes_a_folder(folder: Path, _say: Callable[[str], None]) -> None:
    store(opened(folder), KEPT[:1])


def test_killed_before_each_step_of_creating_a_folder(tmp_path: Path) -> None:
    step, was_killed = 0, True
    while was_killed:
        step += 1
        folder = tmp_path / str(step)
        was_killed, _said = until_killed(partial(makes_a_folder, folder), step)
        shared = opened(folder)
        assert {fetch(shared, key) for key in KEPT} <= {ReadOutcome.OK, ReadOutcome.MISS}
        assert store(shared, KEPT) == [WriteOutcome.OK] * len(KEPT)
        assert [fetch(shared, key) for key in KEPT] == [ReadOutcome.OK] * len(KEPT)
        nothing_of_the_dead_is_left(folder, shared)
        shared.close()
    assert step > 20, "no process was killed"
