"""The functions of the CUDA driver that copies, pinning and the copy kernel need, through ctypes.

The driver library exists wherever CUDA works, and a batch of copies is passed as arrays, without a
Python object per copy. The tests compare every signature, constant and struct with ``cuda.h``. An
exported name never changes its signature, and the batch copy is requested in its 12.8 form by
version.

Importable everywhere; ``load_driver`` raises ``DriverError`` where there is no CUDA.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.int64]

BATCH_COPY_VERSION = 12080
"""``cuMemcpyBatchAsync`` as of CUDA 12.8: with a ``failIdx`` argument (13.0 dropped it)."""

BATCH_COPIES_MAX = 1024
"""Maximum number of copies in one ``cuMemcpyBatchAsync``. Drivers were seen to crash at 51,828
copies and to hang (vLLM issue 49276); a call takes about half a microsecond per copy, and with
several calls the GPU copies while the next call is being submitted."""

_SUCCESS = 0
_REGISTER_PORTABLE = 0x1  # pinned for every context of the process
_REGISTER_DEVICEMAP = 0x2  # mapped into the GPU's address space, for the gather kernel
_CAPTURE_RELAXED = 2
_STREAM_NON_BLOCKING = 1  # not ordered with the default stream, except by events
_EVENT_BLOCKING_SYNC = 1  # waiting for the event sleeps instead of spinning
_EVENT_DISABLE_TIMING = 2
_ACCESS_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PREFER_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_SYMBOL_FOUND = 0  # CU_GET_PROC_ADDRESS_SUCCESS
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM

_pointer = ctypes.c_void_p
_size = ctypes.c_size_t

_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [_pointer, ctypes.c_int],
    "cuDeviceGetAttribute": [_pointer, ctypes.c_int, ctypes.c_int],
    "cuDeviceGetPCIBusId": [_pointer, ctypes.c_int, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [_pointer, ctypes.c_int],
    "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
    "cuCtxGetCurrent": [_pointer],
    "cuCtxSetCurrent": [_pointer],
    "cuCtxPushCurrent_v2": [_pointer],
    "cuCtxPopCurrent_v2": [_pointer],
    "cuMemHostRegister_v2": [_pointer, _size, ctypes.c_uint],
    "cuMemHostUnregister": [_pointer],
    "cuMemAlloc_v2": [_pointer, _size],
    "cuMemFree_v2": [ctypes.c_uint64],
    "cuMemcpyAsync": [ctypes.c_uint64, ctypes.c_uint64, _size, _pointer],
    "cuThreadExchangeStreamCaptureMode": [_pointer],
    "cuCtxGetStreamPriorityRange": [_pointer, _pointer],
    "cuStreamCreateWithPriority": [_pointer, ctypes.c_uint, ctypes.c_int],
    "cuStreamDestroy_v2": [_pointer],
    "cuStreamSynchronize": [_pointer],
    "cuStreamWaitEvent": [_pointer, _pointer, ctypes.c_uint],
    "cuEventCreate": [_pointer, ctypes.c_uint],
    "cuEventRecord": [_pointer, _pointer],
    "cuEventSynchronize": [_pointer],
    "cuEventDestroy_v2": [_pointer],
    "cuModuleLoadData": [_pointer, ctypes.c_char_p],
    "cuModuleUnload": [_pointer],
    "cuModuleGetFunction": [_pointer, _pointer, ctypes.c_char_p],
    "cuLaunchKernel": [_pointer, *[ctypes.c_uint] * 7, _pointer, _pointer, _pointer],
    "cuGetErrorString": [ctypes.c_int, _pointer],
    "cuGetProcAddress_v2": [ctypes.c_char_p, _pointer, ctypes.c_int, ctypes.c_uint64, _pointer],
}

_BatchCopy = ctypes.CFUNCTYPE(
    ctypes.c_int,
    _pointer,  # dsts: CUdeviceptr[count]
    _pointer,  # srcs: CUdeviceptr[count]
    _pointer,  # sizes: size_t[count]
    _size,  # count
    _pointer,  # attrs: CUmemcpyAttributes[numAttrs]
    _pointer,  # attrsIdxs: size_t[numAttrs]
    _size,  # numAttrs
    _pointer,  # failIdx: size_t*
    _pointer,  # a stream; must not be the default stream
)


class MemLocation(ctypes.Structure):
    """``CUmemLocation``; zero is "no hint"."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemcpyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", MemLocation),
        ("dst_location", MemLocation),
        ("flags", ctypes.c_uint),
    )


class DriverError(Exception):
    """A call of the CUDA driver failed; ``code`` is its ``CUresult`` (0: no driver at all).
    ``kind`` is the same for every failure of one function with one code."""

    def __init__(self, text: str, code: int = 0, kind: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.kind = kind or text


class Driver:
    """Calls of the CUDA driver, each raising ``DriverError``. Usable from any thread."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
        self._call("cuInit", 0)
        self._batch_copy = self._find_batch_copy()

    @property
    def has_batch_copy(self) -> bool:
        """True if one call can take many copies (a driver of CUDA 12.8 or later)."""
        return self._batch_copy is not None

    def device(self, ordinal: int) -> int:
        """Return the driver's handle of a device, numbered as in torch."""
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ordinal)
        return handle.value

    def pci_bus_id(self, device: int) -> str:
        """Return the bus address of a device, for example ``0000:65:00.0``."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), device)
        return text.value.decode()

    def can_use_host_pointers(self, device: int) -> bool:
        """Return True if kernels reach registered memory at its host address."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), _CAN_USE_HOST_POINTER, device)
        return value.value != 0

    def retain_context(self, device: int) -> int:
        """The device's primary context (the one that torch uses); ``release_context`` undoes
        this."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context.value or 0

    def release_context(self, device: int) -> None:
        """Drop the reference that ``retain_context`` took."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def current_context(self) -> int | None:
        """The calling thread's context, if it has one."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value

    def enter_thread(self, context: int) -> None:
        """Prepare one of our threads: give it the context (driver calls need one, and a new thread
        has none), and keep its calls from invalidating a CUDA graph that another thread is
        capturing."""
        self._call("cuCtxSetCurrent", context)
        self._relax_capture()

    @contextmanager
    def within(self, context: int) -> Iterator[None]:
        """Make the context current for a few calls on a thread that was not prepared."""
        self._call("cuCtxPushCurrent_v2", context)
        try:
            previous = self._relax_capture()
            try:
                yield
            finally:
                mode = ctypes.c_int(previous)
                self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            popped = ctypes.c_void_p()
            self._call("cuCtxPopCurrent_v2", ctypes.byref(popped))

    def register(self, address: int, nbytes: int) -> None:
        """Pin page-aligned host memory and map it into the GPU's address space."""
        flags = _REGISTER_PORTABLE | _REGISTER_DEVICEMAP
        self._call("cuMemHostRegister_v2", address, nbytes, flags)

    def unregister(self, address: int) -> None:
        """Undo ``register``."""
        self._call("cuMemHostUnregister", address)

    def create_stream(self) -> int:
        """A stream of the lowest priority in the current context."""
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        stream = ctypes.c_void_p()
        self._call(
            "cuStreamCreateWithPriority", ctypes.byref(stream), _STREAM_NON_BLOCKING, least.value
        )
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Free a stream; work submitted to it still runs to its end."""
        self._call("cuStreamDestroy_v2", stream)

    def synchronize_stream(self, stream: int) -> None:
        """Block until everything submitted to ``stream`` has run. Raises ``DriverError`` if any of
        this work failed."""
        self._call("cuStreamSynchronize", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Make everything submitted to ``stream`` from now on wait for ``event`` as recorded
        now."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def create_event(self) -> int:
        """Create an event without a time stamp; its waiters sleep."""
        event = ctypes.c_void_p()
        flags = _EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING
        self._call("cuEventCreate", ctypes.byref(event), flags)
        return event.value or 0

    def record_event(self, event: int, stream: int) -> None:
        """Record ``event`` at the current end of ``stream`` (0 is the default stream)."""
        self._call("cuEventRecord", event, stream)

    def synchronize_event(self, event: int) -> None:
        """Block until everything before the event has run. Raises ``DriverError`` if any of this
        work failed."""
        self._call("cuEventSynchronize", event)

    def destroy_event(self, event: int) -> None:
        """Free an event."""
        self._call("cuEventDestroy_v2", event)

    def copy_each(self, to: Addresses, source: Addresses, sizes: Addresses, stream: int) -> None:
        """Submit one copy per entry. Where host memory is not pinned, each waits for its copy."""
        copies = zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True)
        for target, start, nbytes in copies:
            self.copy_one(target, start, nbytes, stream)

    def copy_one(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Submit one copy."""
        self._call("cuMemcpyAsync", to, source, nbytes, stream)

    def copy_batch(self, to: Addresses, source: Addresses, sizes: Addresses, stream: int) -> None:
        """Submit all copies, up to ``BATCH_COPIES_MAX`` per call. They run after all earlier work
        of ``stream``, in any order. Arrays of shape ``[n]``, contiguous; sizes above 0."""
        for start in range(0, len(sizes), BATCH_COPIES_MAX):
            part = slice(start, start + BATCH_COPIES_MAX)
            self._copy_part(to[part], source[part], sizes[part], stream, start)

    def _copy_part(
        self, to: Addresses, source: Addresses, sizes: Addresses, stream: int, start: int
    ) -> None:
        """Submit the copies of one call; ``start`` is the position of the first one in its job."""
        assert self._batch_copy is not None, "check has_batch_copy first"
        attributes = MemcpyAttributes(
            src_access_order=_ACCESS_IN_STREAM_ORDER, flags=_PREFER_OVERLAP_WITH_COMPUTE
        )
        first_index = ctypes.c_size_t(0)
        failed_at = ctypes.c_size_t(0)
        code = self._batch_copy(
            to.ctypes.data,
            source.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first_index),
            1,
            ctypes.addressof(failed_at),
            stream,
        )
        if code != _SUCCESS:
            at = start + failed_at.value
            text = f"cuMemcpyBatchAsync of {len(sizes)} copies (failed at copy {at} of the job)"
            kind = f"cuMemcpyBatchAsync: {code}"
            raise DriverError(f"{text}: {self._error_text(code)}", code, kind)

    def allocate(self, nbytes: int) -> int:
        """Allocate memory on the current context's device; ``free`` undoes this."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Undo ``allocate``."""
        self._call("cuMemFree_v2", address)

    def load_module(self, image: bytes) -> int:
        """Load PTX, which the driver compiles for the current context's device."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        return module.value or 0

    def unload_module(self, module: int) -> None:
        """Undo ``load_module``. None of its kernels may be running."""
        self._call("cuModuleUnload", module)

    def find_kernel(self, module: int, name: bytes) -> int:
        """Return the handle of a module's kernel."""
        kernel = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(kernel), module, name)
        return kernel.value or 0

    def launch(
        self, kernel: int, blocks: int, threads: int, stream: int, numbers: Sequence[int]
    ) -> None:
        """Launch a kernel whose arguments are 8-byte integers and device addresses."""
        values = (ctypes.c_int64 * len(numbers))(*numbers)
        start, size = ctypes.addressof(values), ctypes.sizeof(ctypes.c_int64)
        pointers = (ctypes.c_void_p * len(numbers))(
            *(start + i * size for i in range(len(numbers)))
        )
        grid = (blocks, 1, 1, threads, 1, 1, 0)
        self._call("cuLaunchKernel", kernel, *grid, stream, ctypes.addressof(pointers), None)

    def _find_batch_copy(self) -> Any | None:
        address = ctypes.c_void_p()
        found = ctypes.c_int()
        code = self._library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync",
            ctypes.byref(address),
            BATCH_COPY_VERSION,
            0,
            ctypes.byref(found),
        )
        # Older drivers lack this function.
        if code != _SUCCESS or found.value != _SYMBOL_FOUND or not address.value:
            return None
        return _BatchCopy(address.value)

    def _relax_capture(self) -> int:
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        return mode.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            raise DriverError(f"{name}: {self._error_text(code)}", code, f"{name}: {code}")

    def _error_text(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} ({code})"


@functools.cache
def load_driver(path: str = "libcuda.so.1") -> Driver:
    """The machine's driver. Raises ``DriverError`` if there is no driver or no device."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise DriverError(f"this machine has no CUDA driver ({error})") from error
    try:
        return Driver(library)
    except AttributeError as error:
        # a missing name means a driver far older than any supported torch
        raise DriverError(f"the CUDA driver is too old: {error}") from error
