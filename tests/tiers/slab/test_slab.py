"""The slab: exact size, alignment, preparation, pinning in pieces, and clear refusals."""

from __future__ import annotations

import itertools
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.libcuda import strict_cuda
from tests.patience import PATIENCE_S
from tiers.base import ALIGNMENT
from tiers.slab import slab as slab_module
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.pinning import PinningError, pinning_advice
from tiers.slab.slab import HostSlab, SlabError


def mapping_of(address: int) -> dict[str, str]:
    """The entry of /proc/self/smaps that covers ``address``: its header and its fields."""
    entry: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        header = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ (\S+) \d+\s*(.*)", line)
        if header:
            if entry:
                return entry
            start, end = int(header[1], 16), int(header[2], 16)
            if start <= address < end:
                entry = {"size": str(end - start), "flags": header[3], "path": header[5]}
        elif entry:
            name, _, value = line.partition(":")
            entry[name] = value.strip()
    return entry


@pytest.mark.parametrize("slot_bytes", [1, 4096, 4097, 70_000])
def test_slots_are_aligned_disjoint_and_cover_the_size(slot_bytes: int) -> None:
    slab = HostSlab(slot_bytes, 5)
    try:
        assert slab.slot_stride % ALIGNMENT == 0
        assert 0 <= slab.slot_stride - slot_bytes < ALIGNMENT
        assert slab.size_bytes == 5 * slab.slot_stride
        for i in range(5):
            slab.slot(i)[:] = i
        for i in range(5):
            view = slab.slot(i)
            assert view.ctypes.data == slab.slot_address(i) == slab.address + i * slab.slot_stride
            assert view.ctypes.data % ALIGNMENT == 0
            assert view.size == slab.slot_stride
            assert (view == i).all()
            assert slab.slot_view(i, slot_bytes).size == slot_bytes
    finally:
        slab.close()


def test_memory_is_private_prefaulted_and_of_the_requested_size() -> None:
    slab = HostSlab(3 * 4096, 1000, background=False)
    try:
        entry = mapping_of(slab.address)
        assert entry["flags"] == "rw-p"
        assert entry["path"] == ""  # anonymous: no files in /dev/shm
        flags = entry["VmFlags"].split()
        assert "dd" in flags, "must stay out of core dumps"
        assert "dc" in flags, "must not be copied to forked children"
        assert slab.ready_slots == 1000
        # Neighbouring anonymous mappings may share the entry, so the resident size is a lower
        # bound only.
        assert int(entry["Rss"].split()[0]) * 1024 >= slab.size_bytes
    finally:
        slab.close()


def test_slots_out_of_range_are_refused() -> None:
    slab = HostSlab(4096, 2)
    try:
        for slot, nbytes in [(2, 1), (-1, 1), (0, 4097), (0, -1)]:
            with pytest.raises(IndexError, match="2 slots"):
                slab.slot_view(slot, nbytes)
    finally:
        slab.close()


@pytest.mark.parametrize(("slot_bytes", "slot_count"), [(0, 1), (1, 0), (-1, 1)])
def test_empty_slabs_are_refused(slot_bytes: int, slot_count: int) -> None:
    with pytest.raises(ValueError, match="a slab needs slots"):
        HostSlab(slot_bytes, slot_count)


def test_more_memory_than_the_machine_has_is_refused_with_the_numbers() -> None:
    with pytest.raises(SlabError, match=r"needs 1,125,899,906,842,624 bytes .* available"):
        HostSlab(2**40, 2**10)


def test_an_address_space_limit_is_refused_with_the_numbers() -> None:
    program = (
        "import resource, sys\n"
        "from tiers.slab.slab import HostSlab, SlabError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "try:\n"
        "    HostSlab(2**20, 2**11)\n"
        "except SlabError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads take address space
    )
    assert "needs 2,147,483,648 bytes of memory and the kernel refused" in run.stdout
    assert "ulimit -v" in run.stdout


def test_a_view_outlives_the_slab() -> None:
    slab = HostSlab(4096, 2)
    view = slab.slot(1)
    view[:] = 7
    slab.close()
    slab.close()
    assert (view == 7).all()
    with pytest.raises(SlabError, match="closed"):
        slab.slot(0)


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    slab = HostSlab(4096, 100_000)
    slab.close()
    assert set(threading.enumerate()) <= before


class RecordingRegistrar:
    """Records what is registered; fails from the ``fail_at``-th registration on; can block."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.live: dict[int, int] = {}
        self.asked = self.calls = 0
        self.gate = threading.Semaphore(0)
        self.held = False
        self.closed = 0
        self._fail_at = fail_at

    def register(self, address: int, nbytes: int) -> None:
        self.asked += 1
        if self.held:
            self.gate.acquire()
        self.calls += 1
        if self._fail_at is not None and self.calls >= self._fail_at:
            raise PinningError("cudaHostRegister: out of memory (2)")
        assert address not in self.live
        self.live[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.live[address]

    def close(self) -> None:
        assert not self.live
        self.closed += 1


@pytest.fixture
def registrar() -> Iterator[RecordingRegistrar]:
    one = RecordingRegistrar()
    yield one
    assert not one.live, "memory was left pinned"
    assert one.closed == 1


def test_pieces_cover_the_slab_exactly_and_never_cut_a_slot(registrar: RecordingRegistrar) -> None:
    slab = HostSlab(5000, 103, pin=True, registrar=registrar, piece_bytes=100_000, background=False)
    pieces = sorted(registrar.live.items())
    assert len(pieces) == 9  # 12 slots of 8,192 bytes fit 100,000: 103 slots are 8 pieces + 7
    assert pieces[0][0] == slab.address
    for (start, nbytes), (following, _) in itertools.pairwise(pieces):
        assert start + nbytes == following
        assert nbytes % slab.slot_stride == 0
    assert sum(nbytes for _, nbytes in pieces) == slab.size_bytes
    assert slab.pinned
    slab.close()


@pytest.mark.parametrize(
    ("slot_bytes", "slots"), [(4096, 100), (5000, 33), (65536, 5), (69632, 17)]
)
def test_on_a_machine_with_larger_pages_pieces_are_whole_pages(slot_bytes: int, slots: int) -> None:
    """The library registers only whole pages of 64 KiB, and no page twice."""
    with strict_cuda(page=65536) as cuda:
        slab = HostSlab(
            slot_bytes,
            slots,
            pin=True,
            registrar=CudaRegistrar(0, cuda.driver),
            piece_bytes=100_000,
            page_bytes=65536,
            background=False,
        )
        pieces = sorted(cuda.registered().items())
        assert len(pieces) > 1
        for (start, nbytes), (following, _) in itertools.pairwise(pieces):
            assert start + nbytes == following
            assert (start - slab.address) % slab.slot_stride == 0, "a slot in two pieces"
        assert pieces[0][0] == slab.address
        assert sum(nbytes for _, nbytes in pieces) >= slab.size_bytes
        slab.slot(slots - 1)[:] = 7
        slab.close()


class Slow(RecordingRegistrar):
    """Takes a while, and records for how long it was left alone between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.took: list[float] = []
        self.pauses: list[float] = []
        self._ended = time.monotonic()

    def register(self, address: int, nbytes: int) -> None:
        began = time.monotonic()
        self.pauses.append(began - self._ended)
        time.sleep(0.02)
        super().register(address, nbytes)
        self._ended = time.monotonic()
        self.took.append(self._ended - began)


def test_the_driver_is_left_alone_between_pieces_for_as_long_as_a_piece_took() -> None:
    registrar = Slow()
    slab = HostSlab(4096, 4, pin=True, registrar=registrar, piece_bytes=4096)
    assert slab.wait_ready()
    slab.close()
    # A pause is measured from outside, so it is never shorter than requested.
    for took, pause in zip(registrar.took, registrar.pauses[1:], strict=False):
        assert pause >= 0.9 * took


def test_closing_does_not_wait_for_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "PAUSE_SHARE", 1e9)
    registrar = Slow()
    slab = HostSlab(4096, 4, pin=True, registrar=registrar, piece_bytes=4096)
    slab.wait_ready(1)
    slab.close()
    assert registrar.calls == 1


def test_slots_are_usable_once_they_are_pinned(registrar: RecordingRegistrar) -> None:
    registrar.held = True
    slab = HostSlab(4096, 4, pin=True, registrar=registrar, piece_bytes=4096)
    assert slab.usable_slots == 0
    registrar.gate.release()
    slab.wait_ready(1)
    assert slab.usable_slots == 1
    registrar.gate.release(3)
    slab.wait_ready()
    assert slab.usable_slots == 4
    slab.close()


def test_without_pinning_every_slot_is_usable_at_once() -> None:
    slab = HostSlab(4096, 4)
    assert slab.usable_slots == 4
    slab.close()


@pytest.mark.parametrize(("fallback", "usable"), [(True, 5), (False, 2)])
def test_after_a_failed_registration_the_rest_is_used_if_configured(
    fallback: bool, usable: int
) -> None:
    registrar = RecordingRegistrar(fail_at=3)
    slab = HostSlab(4096, 5, pin=True, pin_fallback=fallback, registrar=registrar, piece_bytes=4096)
    slab._thread.join()
    assert slab.usable_slots == usable
    slab.close()


def test_a_slot_larger_than_a_piece_is_one_piece(registrar: RecordingRegistrar) -> None:
    slab = HostSlab(9000, 3, pin=True, registrar=registrar, piece_bytes=4096, background=False)
    assert sorted(registrar.live.values()) == [slab.slot_stride] * 3
    slab.close()


def test_slots_become_ready_in_order_while_the_rest_is_being_pinned(
    registrar: RecordingRegistrar,
) -> None:
    registrar.held = True
    slab = HostSlab(4096, 4, pin=True, registrar=registrar, piece_bytes=4096)
    assert not slab.wait_ready(1, timeout_s=0)
    slab.slot(3)[:] = 9  # still usable by the CPU
    registrar.gate.release()
    assert slab.wait_ready(1)
    assert slab.pinned_slots == 1
    assert not slab.wait_ready(2, timeout_s=0)
    registrar.gate.release(3)
    assert slab.wait_ready()
    assert slab.ready_slots == slab.pinned_slots == 4
    assert (slab.slot(3) == 9).all()
    slab.close()


def test_closing_while_pinning_ends_the_wait_and_unpins(registrar: RecordingRegistrar) -> None:
    registrar.held = True
    slab = HostSlab(4096, 4, pin=True, registrar=registrar, piece_bytes=4096)
    outcome: list[str] = []

    def wait() -> None:
        try:
            slab.wait_ready()
        except SlabError as error:
            outcome.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=slab.close)
    closer.start()
    waiter.join()
    registrar.gate.release(4)
    closer.join()
    assert outcome == ["the slab was closed while it was being prepared"]


def test_preparing_can_be_stopped_without_waiting(
    registrar: RecordingRegistrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "PAUSE_SHARE", 0.0)
    registrar.held = True
    slab = HostSlab(4096, 4, pin=True, registrar=registrar, piece_bytes=4096)
    registrar.gate.release()
    slab.wait_ready(1)
    while registrar.asked < 2:
        time.sleep(0.001)
    slab.stop_preparing()  # returns although a registration is under way and blocked
    with pytest.raises(SlabError, match="closed while it was being prepared"):
        slab.wait_ready()
    assert slab.wait_ready(1), "prepared slots must stay usable"
    registrar.gate.release(3)
    slab.close()
    assert registrar.calls == 2, "only the piece in progress may be pinned"


def test_a_failed_registration_is_an_error_with_the_numbers() -> None:
    registrar = RecordingRegistrar(fail_at=3)
    with pytest.raises(SlabError, match="8,192 of 16,384 bytes are pinned"):
        HostSlab(4096, 4, pin=True, registrar=registrar, piece_bytes=4096, background=False)
    assert not registrar.live


def test_a_failed_registration_falls_back_if_configured(caplog: pytest.LogCaptureFixture) -> None:
    registrar = RecordingRegistrar(fail_at=3)
    slab = HostSlab(
        4096,
        5,
        pin=True,
        pin_fallback=True,
        registrar=registrar,
        piece_bytes=4096,
        background=False,
    )
    assert slab.ready_slots == 5
    assert slab.pinned_slots == 2
    assert not slab.pinned
    assert registrar.calls == 3, "after one failure there must be no further attempt"
    assert caplog.text.count("use pageable memory instead") == 1
    slab.close()
    assert not registrar.live


def test_pinning_without_cuda_is_an_error_that_says_so() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a CUDA driver")
    with pytest.raises(
        SlabError, match="pinned memory needs CUDA: this machine has no CUDA driver"
    ):
        HostSlab(4096, 2, pin=True)


def test_advice_for_a_memlock_limit_names_the_limit_and_the_flags() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, hard))
    try:
        text = pinning_advice(PinningError("cudaHostRegister: out of memory (2)"), 10**9, 10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    assert text == (
        "cannot pin the CPU tier's memory: 1,000,000 of 1,000,000,000 bytes are pinned; pinning "
        "the next piece failed with: cudaHostRegister: out of memory (2). The memlock limit of "
        f"this process is {limit:,} bytes: raise it with 'ulimit -l unlimited', '--ulimit "
        "memlock=-1' (docker), or 'LimitMEMLOCK=infinity' (systemd), or make the CPU tier smaller."
    )
