"""A simulated libcuda in host memory, and CUDA's headers and tools, with which the tests compare
it.

``libcuda.c`` is compiled once per process, against the real ``cuda.h``, and called through the
product's own ctypes calls. If a tool is missing, its tests are skipped with the reason; with CI
set, where every tool is expected, they fail.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.patience import PATIENCE_S
from tiers.cuda_driver import Driver, load_driver

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COPY = ROOT / "tiers/copy"
DEVICES = (40, 41)
"""The driver's handles of devices 0 and 1."""


def missing(what: str) -> NoReturn:
    """Skip this test because a tool is missing; where all tools are expected, fail."""
    if os.environ.get("CI"):
        pytest.fail(f"needs {what} (expected where CI is set)")
    pytest.skip(f"needs {what}")


def compiler() -> str:
    """The path of a C compiler."""
    found = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    return found or missing("a C compiler: apt-get install gcc")


def triton_folder(name: str) -> Path:
    """``include`` or ``bin`` of the CUDA files that come with Triton."""
    spec = importlib.util.find_spec("triton")
    places = spec.submodule_search_locations if spec is not None else None
    folder = Path(next(iter(places or [""]))) / "backends/nvidia" / name
    return (
        folder if folder.is_dir() else missing(f"Triton's CUDA files ({name}): pip install triton")
    )


def compile_c(source: Path, output: Path, flags: Sequence[str] = ()) -> None:
    """Compile a C file against ``cuda.h``. Warnings are errors."""
    command = [compiler(), "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += [
        f"-I{triton_folder('include')}",
        f"-I{COPY}",
        *flags,
        str(source),
        "-o",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


@functools.cache
def built() -> Path:
    """The library's path; its folder lasts as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="kvtiers-libcuda-"))
    atexit.register(shutil.rmtree, folder, True)
    build(folder / "libcuda.so.1")
    return folder / "libcuda.so.1"


def build(path: Path) -> None:
    """Compile the library."""
    # Without a soname, so that this process does not take it for the machine's driver.
    flags = ["-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wno-unknown-pragmas"]
    compile_c(HERE / "libcuda.c", path, flags)


class Cuda:
    """The library's control interface: what a test plans, and what it observes. One at a time per
    process."""

    def __init__(self, seed: int = 0, **options: int) -> None:
        self.library = ctypes.CDLL(str(built()))
        for name in ("kvt_calls", "kvt_count", "kvt_current"):
            getattr(self.library, name).restype = ctypes.c_longlong
        self.library.kvt_note.restype = ctypes.c_char_p
        self.library.kvt_model_stream.restype = ctypes.c_void_p
        self._kept: list[Any] = []
        self.library.kvt_reset(ctypes.c_longlong(seed))
        self.configure(**options)
        self.driver: Driver = load_driver(str(built()))
        if "has_batch" in options:  # the driver queries this only once
            self.driver = Driver(self.library)

    def configure(self, **options: int) -> None:
        """Set an option that the library documents at ``kvt_set``."""
        for name, value in options.items():
            self.library.kvt_set(name.encode(), ctypes.c_longlong(value))

    def fail(self, name: str, code: int, nth: int = 0) -> None:
        """Make every call of ``name`` return ``code`` (0: no longer), or the ``nth`` from now on.
        ``half of cuMemcpyBatchAsync`` submits the first half of the copies before it fails."""
        self.library.kvt_fail(name.encode(), ctypes.c_longlong(code), ctypes.c_longlong(nth))

    def make_current(self, device: int = 0) -> None:
        """Do what torch does to the thread that runs the model."""
        self.library.kvt_make_current(DEVICES[device])

    def on_device(self, address: int, nbytes: int) -> None:
        """Make this memory count as the GPU's."""
        self.library.kvt_on_device(ctypes.c_uint64(address), ctypes.c_uint64(nbytes))

    def model_stream(self) -> int:
        """A stream that the product did not create."""
        return int(self.library.kvt_model_stream())

    def hold(self, stream: int | None = None) -> None:
        """Stop one stream, or all, until ``release``."""
        self.library.kvt_hold(ctypes.c_void_p(stream or 0), 1, int(stream is None))

    def release(self, stream: int | None = None) -> None:
        """Let one stream continue, or all."""
        self.library.kvt_hold(ctypes.c_void_p(stream or 0), 0, int(stream is None))

    def launch(self, kernel: Callable[[], object], stream: int = 0) -> None:
        """Run ``kernel`` on a stream, late."""

        def call() -> None:
            kernel()

        self._kept.append(ctypes.CFUNCTYPE(None)(call))
        self.library.kvt_launch(self._kept[-1], ctypes.c_void_p(stream))

    def calls(self, name: str) -> int:
        return int(self.library.kvt_calls(name.encode()))

    def await_call(self, name: str, times: int = 1) -> None:
        """Block until ``name`` was called this often; fail if that never happens."""
        called = self.library.kvt_await_call(
            name.encode(), ctypes.c_longlong(times), ctypes.c_double(PATIENCE_S)
        )
        assert called, f"{name} was called {self.calls(name)} times, not {times}"

    def await_idle(self) -> None:
        """Block until every stream has run all its work."""
        assert self.library.kvt_await_idle(ctypes.c_double(PATIENCE_S))

    def await_stuck(self) -> None:
        """Block until every stream has run all the work that it can: the remaining work is held, or
        waits for held work."""
        assert self.library.kvt_await_stuck(ctypes.c_double(PATIENCE_S))

    def count(self, what: str) -> int:
        """Count ``streams``, ``events``, ``registered`` or ``allocated`` ranges, ``retained``
        contexts or ``queued`` streams; also returns ``largest_batch`` and ``clock_ns``."""
        return int(self.library.kvt_count(what.encode()))

    def clock(self) -> float:
        """The time that copies have taken by the costs that a test has set."""
        return self.count("clock_ns") / 1e9

    def registered(self) -> dict[int, int]:
        """The registered ranges: address and bytes."""
        found: dict[int, int] = {}
        start, nbytes = ctypes.c_uint64(), ctypes.c_uint64()
        while self.library.kvt_registered(len(found), ctypes.byref(start), ctypes.byref(nbytes)):
            found[start.value] = nbytes.value
        return found

    def capture_modes(self) -> dict[str, set[int]]:
        """The modes in which each living thread made calls that may break a graph, by the thread's
        name."""
        found = {}
        for thread in threading.enumerate():
            bits = self.library.kvt_modes(thread.native_id)
            if bits:
                found[thread.name] = {mode for mode in range(8) if bits >> mode & 1}
        return found

    def notes(self) -> list[str]:
        """Return the misuses that a real driver need not survive, in words."""
        return [self.library.kvt_note(at).decode() for at in range(self.count("notes"))]

    def close(self) -> None:
        """Stop all streams; queued work is lost."""
        self.library.kvt_reset(ctypes.c_longlong(0))
        self._kept.clear()


@contextmanager
def strict_cuda(seed: int = 0, **options: int) -> Iterator[Cuda]:
    """A library that must report no misuse when the test ends, and must have nothing left
    allocated."""
    cuda = Cuda(seed, **options)
    try:
        yield cuda
        cuda.configure(event_failure=0)
        notes = cuda.notes()
        assert not notes, notes
        left = {
            what: cuda.count(what) for what in ("streams", "registered", "allocated", "retained")
        }
        assert set(left.values()) == {0}, left
    finally:
        cuda.release()
        cuda.close()
