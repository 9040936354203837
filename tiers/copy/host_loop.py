"""One native call that performs a list of memory copies, with the GIL released.

At first use llvmlite, a small compiler library, compiles the loop from the LLVM IR below. So the
user's machine needs no C compiler, and no numba, which cannot be imported into vLLM's CPU workers.
If the loop cannot be compiled, one ``ctypes.memmove`` per copy replaces it, with a warning.

Copies of at least a page are streamed: the source is prefetched 512 bytes ahead and the stores
bypass the caches, on full 64-byte lines of the target. See
docs/decisions/0021-streaming-host-copies.md for why and for the figures.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Addresses: TypeAlias = npt.NDArray[np.int64]
CopyLoop: TypeAlias = Callable[[Addresses, Addresses, Addresses], None]
"""``loop(to, source, sizes)``: copies ``sizes[i]`` bytes from address ``source[i]`` to address
``to[i]``. Arrays of equal length, int64, contiguous. The ranges must not overlap."""

STREAM_MIN_BYTES = 4096
"""Shorter copies go through ``memcpy``."""

_STEP = 256
_PREFETCH = 512


def _stream_body() -> str:
    """Return the IR of one step: eight loads of 32 bytes, prefetches for later steps, and eight
    stores that bypass the cache."""
    loads, stores, prefetches = [], [], []
    for i in range(0, _STEP, 32):
        loads.append(f"  %fo{i} = add i64 %o, {i}")
        loads.append(f"  %fp{i} = getelementptr i8, ptr %f, i64 %fo{i}")
        loads.append(f"  %v{i} = load <32 x i8>, ptr %fp{i}, align 1")
        stores.append(f"  %tp{i} = getelementptr i8, ptr %t, i64 %fo{i}")
        stores.append(f"  store <32 x i8> %v{i}, ptr %tp{i}, align 32, !nontemporal !0")
    for i in range(0, _STEP, 64):
        prefetches.append(f"  %po{i} = add i64 %o, {i + _PREFETCH}")
        prefetches.append(f"  %pp{i} = getelementptr i8, ptr %f, i64 %po{i}")
        prefetches.append(f"  call void @llvm.prefetch.p0(ptr %pp{i}, i32 0, i32 0, i32 1)")
    return "\n".join([*loads, *prefetches, *stores])


def _module_ir() -> str:
    """Return the IR of the copy loop. For each i, it uses ``memcpy`` up to a 64-byte line of the
    target, streams whole steps, and uses ``memcpy`` for the rest (for everything if the copy is
    short). The fence at the end makes streamed stores visible before the call returns."""
    return f"""
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

define void @copy_list(i64 %count, ptr %to, ptr %from, ptr %sizes) {{
entry:
  %none = icmp eq i64 %count, 0
  br i1 %none, label %exit, label %copy
copy:
  %i = phi i64 [0, %entry], [%next, %finish]
  %t.at = getelementptr ptr, ptr %to, i64 %i
  %f.at = getelementptr ptr, ptr %from, i64 %i
  %n.at = getelementptr i64, ptr %sizes, i64 %i
  %t = load ptr, ptr %t.at
  %f = load ptr, ptr %f.at
  %n = load i64, ptr %n.at
  %long = icmp uge i64 %n, {STREAM_MIN_BYTES}
  br i1 %long, label %align, label %finish
align:
  %t.int = ptrtoint ptr %t to i64
  %t.neg = sub i64 0, %t.int
  %head = and i64 %t.neg, 63
  call void @llvm.memcpy.p0.p0.i64(ptr %t, ptr %f, i64 %head, i1 false)
  %n.body = sub i64 %n, %head
  %whole = and i64 %n.body, {-_STEP}
  %stop = add i64 %head, %whole
  br label %stream
stream:
  %o = phi i64 [%head, %align], [%o.next, %stream]
{_stream_body()}
  %o.next = add i64 %o, {_STEP}
  %more.steps = icmp ult i64 %o.next, %stop
  br i1 %more.steps, label %stream, label %finish
finish:
  %done = phi i64 [0, %copy], [%stop, %stream]
  %t.rest = getelementptr i8, ptr %t, i64 %done
  %f.rest = getelementptr i8, ptr %f, i64 %done
  %rest = sub i64 %n, %done
  call void @llvm.memcpy.p0.p0.i64(ptr %t.rest, ptr %f.rest, i64 %rest, i1 false)
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %count
  br i1 %more, label %copy, label %exit
exit:
  fence seq_cst
  ret void
}}
!0 = !{{i32 1}}
"""


@functools.cache
def copy_loop() -> CopyLoop:
    """The fastest loop that works on this machine; compiled once per process (a few tens of
    milliseconds)."""
    try:
        return _compiled_loop()
    except Exception as error:  # any llvmlite error (missing, too old, no JIT) has the same remedy
        logger.warning(
            "kvtiers: the native copy loop could not be compiled (%s: %s); copies between CPU KV "
            "caches and the slab use a slower loop",
            type(error).__name__,
            error,
        )
        return memmove_loop


def _compiled_loop() -> CopyLoop:
    """Compile the IR for this processor. Raises whatever llvmlite raises."""
    import llvmlite.binding as llvm
    from llvmlite.binding import ffi

    _answer_dict_lookups(ffi.lib)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_module_ir())
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=2,
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    pointer = ctypes.c_void_p
    # CFUNCTYPE functions release the GIL during the call.
    native = ctypes.CFUNCTYPE(None, ctypes.c_int64, pointer, pointer, pointer)(
        engine.get_function_address("copy_list")
    )
    return _NativeLoop(native, engine)


def _answer_dict_lookups(lib: Any) -> None:
    """Keep ``vars(ffi.lib)`` from breaking vLLM's CPU workers.

    llvmlite's library object turns *every* unknown attribute, including ``__dict__``, into a
    wrapped C function. When a CPU worker starts, vLLM 0.32 calls ``vars(...)`` on every object in
    every loaded module and crashes on that one (``'_lib_fn_wrapper' object has no attribute
    'get'``). This hits any engine started in this process after llvmlite (or numba) was imported.
    An entry in the object's own table of functions answers the lookup with an empty dict instead.
    """
    functions = getattr(lib, "_fntab", None)
    if isinstance(functions, dict):
        functions.setdefault("__dict__", {})


class _NativeLoop:
    """Calls the compiled function; holds the engine that owns its machine code."""

    def __init__(self, native: Any, engine: Any) -> None:
        self._native = native
        self._engine = engine

    def __call__(self, to: Addresses, source: Addresses, sizes: Addresses) -> None:
        self._native(len(sizes), to.ctypes.data, source.ctypes.data, sizes.ctypes.data)


def memmove_loop(to: Addresses, source: Addresses, sizes: Addresses) -> None:
    """The same loop with one ``ctypes.memmove`` per copy (each releases the GIL)."""
    for target, start, nbytes in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, start, nbytes)
