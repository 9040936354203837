"""Frames that a thread reads in advance: same order and errors, bounded memory, no thread left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.threads import no_thread_is_left
from tiers.offline.archive import AHEAD_BYTES, Frame, PortableError, read_ahead

SIZE = AHEAD_BYTES // 4


def counted(count: int, read: list[int]) -> Iterator[Frame]:
    """Frames whose offsets are consecutive numbers, followed by an error."""
    for number in range(count):
        read.append(number)
        yield Frame("R", number, SIZE)
    raise PortableError("damaged")


@pytest.mark.parametrize("count", [0, 1, 4, 7, 8, 21])
def test_all_frames_before_an_error_are_yielded(count: int) -> None:
    found: list[int] = []
    with no_thread_is_left(), pytest.raises(PortableError, match="damaged"):
        found.extend(frame.at for frame in read_ahead(counted(count, [])))
    assert found == list(range(count))


def test_a_slow_reader_bounds_what_is_read() -> None:
    read: list[int] = []
    frames = read_ahead(counted(1000, read))
    with no_thread_is_left():
        for _ in range(9):
            next(frames)
        frames.close()  # type: ignore[attr-defined]  # it is a generator
    assert 12 <= len(read) <= 16  # its batch, and the next one
