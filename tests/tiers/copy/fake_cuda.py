"""A CUDA driver in host memory behind the real C signatures, strict and late.

"Device memory" is ordinary memory that a test has declared with ``on_device``; all other is the
host's. Streams run on a thread of the fake, some time later and in an order drawn from a seed
(``tiers.testing.simulated_copy``'s streams). Strict as the documentation is: a call without a
current context, a batch on the default stream, an empty copy in a batch, and a batch over host
memory that is not registered are errors. A single copy is an error where registered and other
memory meet in it; from pageable memory it reads at once, whatever the stream waits for, and to
pageable memory it returns only when it has run.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.patience import PATIENCE_S
from tiers.cuda_driver import _SIGNATURES, BATCH_COPY_VERSION, MemcpyAttributes, _BatchCopy
from tiers.testing.simulated_copy import Operation, SimulatedEvent, SimulatedStream

CONTEXT = 0xC0
DEVICE_OF_ORDINAL = {0: 40, 1: 41}
BUS_IDS = {40: b"0000:65:00.0", 41: b"0000:A3:00.0"}
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, UNKNOWN = 1, 2, 201, 999
TEXTS = {1: b"invalid argument", 2: b"out of memory", 201: b"invalid device context"}

NEEDS_NO_CONTEXT = {
    "cuInit",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
}


class FakeCuda:
    """The library object for ``Driver``. ``fail[name] = code`` makes every call of that name fail,
    ``fail_nth[name] = n, code`` the n-th from then on, alone. ``modes``: the capture modes that
    each thread was in when it called something that may break a graph being captured."""

    def __init__(self, seed: int = 0, *, batch: bool = True) -> None:
        self.errors: list[str] = []
        self.fail: dict[str, int] = {}
        self.fail_nth: dict[str, tuple[int, int]] = {}
        self.calls: list[str] = []
        self.modes: dict[str, set[int]] = {}
        self.registered: dict[int, int] = {}
        self.retained = 0
        self.streams: dict[int, SimulatedStream] = {0: SimulatedStream("default")}
        self.events: dict[int, SimulatedEvent | None] = {}
        self.attributes: list[MemcpyAttributes] = []
        self.event_failure = 0
        self._device_memory: list[tuple[int, int]] = []
        self._batch = batch
        self._rng = np.random.default_rng(seed)
        self._next_handle = 0x1000
        self._local = threading.local()
        self._work = threading.Condition()
        self._held = False
        self._stopped = False
        self._functions: list[Any] = []
        for name, arguments in _SIGNATURES.items():
            self._export(name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments))
        self._batch_function = _BatchCopy(partial(self._enter, "cuMemcpyBatchAsync"))
        self._thread = threading.Thread(target=self._run, name="fake-gpu", daemon=True)
        self._thread.start()

    # -- for tests ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Stop the GPU until ``release``."""
        with self._work:
            self._held = True

    def release(self) -> None:
        with self._work:
            self._held = False
            self._work.notify_all()

    def on_device(self, memory: np.ndarray[Any, Any]) -> None:
        """Let this memory be the GPU's."""
        self._device_memory.append((memory.ctypes.data, memory.nbytes))

    def await_call(self, name: str, times: int = 1) -> None:
        """Block until the engine has called ``name`` so often; fail if that never comes."""
        with self._work:
            called = self._work.wait_for(lambda: self.calls.count(name) >= times, PATIENCE_S)
        assert called, f"{name} was called {self.calls.count(name)} times, not {times}"

    def launch(self, kernel: Callable[[], None], stream: int = 0) -> None:
        """Run ``kernel`` on a stream, late."""
        with self._work:
            self.calls.append("launch")
            self.streams[stream].submit(Operation(deque([kernel])))
            self._work.notify_all()

    @staticmethod
    def move_all(to: Any, source: Any, sizes: Any) -> None:
        """Do what a kernel does with a list of copies."""
        for target, start, nbytes in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, start, nbytes)

    def stop(self) -> None:
        """End the fake's thread; what is queued is lost."""
        with self._work:
            self._stopped = True
            self._work.notify_all()
        self._thread.join()

    def make_current(self) -> None:
        """Do what torch does to the thread that runs the model."""
        self._local.stack = [CONTEXT]

    # -- plumbing ----------------------------------------------------------------------------

    def _export(self, name: str, prototype: Any) -> None:
        function = prototype(partial(self._enter, name))
        self._functions.append(function)
        setattr(self, name, function)

    def _enter(self, name: str, *arguments: Any) -> int:
        """Every C call arrives here. Exceptions cannot cross C: they are kept for the test."""
        try:
            with self._work:
                self.calls.append(name)
                self._work.notify_all()
                stack = getattr(self._local, "stack", [])
                if name not in NEEDS_NO_CONTEXT and (not stack or stack[-1] != CONTEXT):
                    self.errors.append(f"{name} without a current context")
                    return INVALID_CONTEXT
                if name not in {*NEEDS_NO_CONTEXT, "cuCtxPopCurrent_v2"}:
                    mode = getattr(self._local, "mode", 0)
                    self.modes.setdefault(threading.current_thread().name, set()).add(mode)
                if name in self.fail and name != "cuMemcpyBatchAsync":
                    return self.fail[name]
                if name in self.fail_nth:
                    left, code = self.fail_nth.pop(name)
                    if left == 1:
                        return code
                    self.fail_nth[name] = left - 1, code
                handler = getattr(self, f"_{name}")
                code = handler(*arguments)
                self._work.notify_all()
                return int(code or 0)
        except Exception:
            self.errors.append(traceback.format_exc())
            return UNKNOWN

    def _run(self) -> None:
        with self._work:
            while not self._stopped:
                ready = [stream for stream in self.streams.values() if stream.runnable]
                if self._held or not ready:
                    self._work.wait()
                    continue
                ready[self._rng.integers(len(ready))].step()
                self._work.notify_all()

    def _handle(self) -> int:
        self._next_handle += 1
        return self._next_handle

    # -- the driver's functions --------------------------------------------------------------

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDeviceGet(self, out: int, ordinal: int) -> int:
        ctypes.c_int.from_address(out).value = DEVICE_OF_ORDINAL.get(ordinal, 0)
        return 0 if ordinal in DEVICE_OF_ORDINAL else 101

    def _cuDeviceGetAttribute(self, out: int, attribute: int, device: int) -> None:
        assert attribute == 91
        assert device in DEVICE_OF_ORDINAL.values()
        ctypes.c_int.from_address(out).value = 1

    def _cuDeviceGetPCIBusId(self, out: int, length: int, device: int) -> None:
        text = BUS_IDS[device]
        assert len(text) < length
        ctypes.memmove(out, text + b"\0", len(text) + 1)

    def _cuDevicePrimaryCtxRetain(self, out: int, device: int) -> None:
        assert device in DEVICE_OF_ORDINAL.values()
        self.retained += 1
        ctypes.c_void_p.from_address(out).value = CONTEXT

    def _cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        assert device in DEVICE_OF_ORDINAL.values()
        self.retained -= 1

    def _cuCtxGetCurrent(self, out: int) -> None:
        stack = getattr(self._local, "stack", [])
        ctypes.c_void_p.from_address(out).value = stack[-1] if stack else None

    def _cuCtxSetCurrent(self, context: int) -> None:
        self._local.stack = [context]

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        self._local.stack = [*getattr(self._local, "stack", []), context]

    def _cuCtxPopCurrent_v2(self, out: int) -> None:
        ctypes.c_void_p.from_address(out).value = self._local.stack.pop()

    def _cuThreadExchangeStreamCaptureMode(self, mode: int) -> None:
        value = ctypes.c_int.from_address(mode)
        previous = getattr(self._local, "mode", 0)
        self._local.mode = value.value
        value.value = previous

    def _cuMemHostRegister_v2(self, address: int, nbytes: int, flags: int) -> int:
        assert address % 4096 == 0
        assert nbytes % 4096 == 0
        assert flags == 3
        assert getattr(self._local, "mode", 0) == 2, "would break a graph being captured"
        if address in self.registered:
            return 712
        self.registered[address] = nbytes
        return 0

    def _cuMemHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 713

    def _cuCtxGetStreamPriorityRange(self, least: int, greatest: int) -> None:
        ctypes.c_int.from_address(least).value = 0
        ctypes.c_int.from_address(greatest).value = -5

    def _cuStreamCreateWithPriority(self, out: int, flags: int, priority: int) -> None:
        assert flags == 1
        assert priority == 0
        handle = self._handle()
        self.streams[handle] = SimulatedStream(hex(handle))
        ctypes.c_void_p.from_address(out).value = handle

    def _cuStreamDestroy_v2(self, stream: int) -> None:
        assert not self.streams[stream].queue, "destroyed while copying"
        del self.streams[stream]

    def _cuStreamSynchronize(self, stream: int) -> int:
        while self.streams[stream].queue and not self._stopped:
            self._work.wait()
        return self.event_failure

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        assert flags == 0
        self.streams[stream].submit(Operation(deque(), after=self.events[event]))

    def _cuEventCreate(self, out: int, flags: int) -> None:
        assert flags == 3
        handle = self._handle()
        self.events[handle] = None
        ctypes.c_void_p.from_address(out).value = handle

    def _cuEventRecord(self, event: int, stream: int | None) -> None:
        assert event in self.events
        self.events[event] = self.streams[stream or 0].event()

    def _cuEventSynchronize(self, event: int) -> int:
        recorded = self.events[event]
        assert recorded is not None, "synchronized before it was recorded"
        while not recorded.over and not self._stopped:
            self._work.wait()
        return self.event_failure

    def _cuEventDestroy_v2(self, event: int) -> None:
        del self.events[event]

    def _cuGetErrorString(self, code: int, out: int) -> int:
        if code not in TEXTS:
            return INVALID_VALUE
        ctypes.c_char_p.from_address(out).value = TEXTS[code]
        return 0

    def _cuGetProcAddress_v2(
        self, name: bytes, out: int, version: int, flags: int, found: int
    ) -> None:
        assert (name, version, flags) == (b"cuMemcpyBatchAsync", BATCH_COPY_VERSION, 0)
        function = ctypes.cast(self._batch_function, ctypes.c_void_p).value
        ctypes.c_void_p.from_address(out).value = function if self._batch else None
        ctypes.c_int.from_address(found).value = 0 if self._batch else 1

    def _cuMemcpyAsync(self, to: int, source: int, nbytes: int, stream: int) -> int:
        to_device = self._is_device(to, nbytes)
        assert to_device != self._is_device(source, nbytes), "a copy between host and device"
        host = source if to_device else to
        pinned = [
            start <= host and host + nbytes <= start + length
            for start, length in self.registered.items()
            if host < start + length and start < host + nbytes
        ]
        if pinned == [True]:
            self._copy(to, source, nbytes, stream)
        elif pinned:
            return INVALID_VALUE
        elif to_device:
            staged = ctypes.string_at(source, nbytes)
            move = partial(ctypes.memmove, to, staged, nbytes)
            self.streams[stream].submit(Operation(deque([move])))
        else:
            self._copy(to, source, nbytes, stream)
            over = self.streams[stream].event()
            self._work.notify_all()
            while not over.over and not self._stopped:
                self._work.wait()
        return 0

    def _is_device(self, address: int, nbytes: int) -> bool:
        return any(
            start <= address and address + nbytes <= start + length
            for start, length in self._device_memory
        )

    def _cuMemcpyBatchAsync(
        self,
        to: int,
        source: int,
        sizes: int,
        count: int,
        attributes: int,
        first_indices: int,
        attribute_count: int,
        failed_at: int,
        stream: int | None,
    ) -> int:
        assert attribute_count == 1
        assert ctypes.c_size_t.from_address(first_indices).value == 0
        given = MemcpyAttributes.from_buffer_copy(ctypes.string_at(attributes, 24))
        self.attributes.append(given)
        assert given.src_access_order == 1
        if not stream or count == 0:
            return INVALID_VALUE
        arrays = [(ctypes.c_uint64 * count).from_address(at) for at in (to, source, sizes)]
        copies = [tuple(int(array[i]) for array in arrays) for i in range(count)]
        stop = count // 2 if "cuMemcpyBatchAsync" in self.fail else count
        for target, start, nbytes in copies[:stop]:
            if nbytes == 0 or not self._inside_a_piece(target, start, nbytes):
                ctypes.c_size_t.from_address(failed_at).value = copies.index(
                    (target, start, nbytes)
                )
                return INVALID_VALUE
            self._copy(target, start, nbytes, stream)
        if stop < count:
            ctypes.c_size_t.from_address(failed_at).value = stop
            return self.fail["cuMemcpyBatchAsync"]
        return 0

    def _inside_a_piece(self, to: int, source: int, nbytes: int) -> bool:
        """True if one side lies wholly inside one registered range."""
        return any(
            start <= address and address + nbytes <= start + length
            for start, length in self.registered.items()
            for address in (to, source)
        )

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        move = partial(ctypes.memmove, to, source, nbytes)
        self.streams[stream].submit(Operation(deque([move])))
