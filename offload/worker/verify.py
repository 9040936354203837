"""Implements ``"verify": "device"``: compares loaded KV blocks with the blocks as computed.

Right after the step that completes a chunk, its blocks are digested in the KV cache, on the model's
stream (`offload.worker.device_digest`). After a load, the blocks are digested again where they now
lie, and compared under the chunk's key. This covers everything in between: fences, copies, slots,
tiers, and restarts.

Two requests may compute the same chunk with different bytes (the kernels depend on the shape of the
batch), so a key can have several digests. A load is correct if it matches one of them.

Ownership: `before_step` and `after_step` run on the thread that drives the model runner; the rest
belongs to the executor's loop. Digests are passed, in the order in which they were made, to one
thread that alone owns the table and the file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from offload.messages.plan import DigestJob, LoadItem, StepPlan
from offload.telemetry.counters import WorkerStats
from offload.worker.device_digest import DeviceDigest
from tiers.io.daemon_threads import DaemonThreads

logger = logging.getLogger(__name__)

Digest = npt.NDArray[np.int64]
"""``[blocks of a chunk, layers]``."""

KEYS_MAX = 1 << 20
"""Number of keys whose digests are kept; beyond that the oldest are forgotten."""
DIGESTS_MAX = 8
"""Number of digests kept per key."""
FILE_BYTES_MAX = 4 << 30
LOGGED_MAX = 20
"""Number of differing chunks that are named in the log; all are counted."""
SUFFIX = ".digests"
_LENGTH = struct.Struct("<I")


class _Entry(msgspec.Struct, array_like=True):
    """One line of the file: the digests of a chunk, or (without a key) a mark that all earlier
    lines are void."""

    key: bytes
    layers: int
    digest: bytes


class DigestTable:
    """Digests by key, in a separate file below ``folder`` if one is given.

    The files of other engines with the same ``name`` in that folder are read as well. Belongs to
    one thread.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._digests: dict[bytes, list[Digest]] = {}
        self._folder = folder
        self._name = name
        self._read: dict[str, int] = {}  # how far each file has been read
        self._own: int | None = None
        self._written = 0

    def open(self) -> None:
        """Create the folder and this engine's file. Raises ``OSError``."""
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = f"{self._name}-{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._own = os.open(self._folder / file, flags, 0o600)
        self._read[file] = 1 << 62  # its content is already in memory

    def close(self) -> None:
        """Close the file. Idempotent."""
        own, self._own = self._own, None
        if own is not None:
            os.close(own)

    def enter(self, keys: Sequence[bytes], digests: Digest) -> None:
        """Add digests ``[chunks, blocks of a chunk, layers]``."""
        entries = []
        for key, digest in zip(keys, digests, strict=True):
            if self._remember(key, digest):
                entries.append(_Entry(key, digest.shape[1], digest.tobytes()))
        self._append(entries)

    def clear(self) -> None:
        """Forget everything, because the weights have changed."""
        self._digests.clear()
        self._append([_Entry(b"", 0, b"")])

    def known(self, key: bytes) -> Sequence[Digest]:
        """The digests of a key; reads the other engines' files if there are none."""
        if key not in self._digests:
            self._read_others()
        return self._digests.get(key, ())

    def _remember(self, key: bytes, digest: Digest) -> bool:
        mine = self._digests.setdefault(key, [])
        if any(np.array_equal(digest, known) for known in mine):
            return False
        mine.append(digest.copy())
        del mine[:-DIGESTS_MAX]
        if len(self._digests) > KEYS_MAX:
            del self._digests[next(iter(self._digests))]
        return True

    def _append(self, entries: Sequence[_Entry]) -> None:
        if self._own is None or not entries:
            return
        frames = [msgspec.msgpack.encode(entry) for entry in entries]
        data = b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)
        if self._written + len(data) > FILE_BYTES_MAX:
            logger.warning("kvtiers: verify: the file of digests is full; no more are kept")
            self.close()
            return
        self._written += os.write(self._own, data)

    def _read_others(self) -> None:
        if self._folder is None:
            return
        for path in sorted(self._folder.glob(f"{self._name}-*{SUFFIX}")):
            at = self._read.get(path.name, 0)
            with contextlib.suppress(OSError):
                if path.stat().st_size <= at:
                    continue
                with path.open("rb") as file:
                    file.seek(at)
                    data = file.read()
                self._read[path.name] = at + self._take(data)

    def _take(self, data: bytes) -> int:
        """Add the complete frames in ``data``; returns their length in bytes."""
        at = 0
        while at + _LENGTH.size <= len(data):
            (size,) = _LENGTH.unpack_from(data, at)
            frame = data[at + _LENGTH.size : at + _LENGTH.size + size]
            if len(frame) < size:
                break
            at += _LENGTH.size + size
            entry = msgspec.msgpack.decode(frame, type=_Entry)
            if entry.key:
                digest = np.frombuffer(entry.digest, dtype=np.int64).reshape(-1, entry.layers)
                self._remember(entry.key, digest)
        return at


class Verifier:
    """Digests what is computed and what is loaded on one rank, and compares.

    Counts in ``stats`` (``verified_chunks``, ``differing_chunks``, ``unverified_chunks``).
    `start` raises ``OSError`` if the folder for the digests cannot be used.
    """

    def __init__(
        self, device: DeviceDigest, stats: WorkerStats, folder: Path | None, name: str
    ) -> None:
        self._device = device
        self.stats = stats
        self._table = DigestTable(folder, name)
        self._thread: DaemonThreads | None = None
        self._stream: Any = None
        self._post: Callable[..., object] = lambda *_: None
        self._broken = False
        self._logged = 0

    # -- the driver's thread -----------------------------------------------------------------

    def before_step(self, plan: StepPlan) -> None:
        """Digest the chunks that were complete before this step, whose forward pass may overwrite
        them."""
        self._digest([job for job in plan.digests if job.early])

    def after_step(self, plan: StepPlan) -> None:
        """Digest the chunks that this step has completed, before a later one can overwrite them."""
        if plan.reset:
            self._post(self._forget)
        self._digest([job for job in plan.digests if not job.early])

    def _digest(self, jobs: Sequence[DigestJob]) -> None:
        """Digest these blocks as they are at this point of the current stream.

        Never raises: a fault ends the verification, not the server.
        """
        if not jobs or self._broken:
            return
        try:
            found = [(job, self._device.of(job.group, job.blocks)) for job in jobs]
            event = None
            if self._device.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
            self._post(self._take, found, event)
        except Exception as error:  # serving goes on, whatever the error
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if not self._broken:
            self._broken = True
            logger.error("kvtiers: verify: stopped; loads are no longer compared: %r", error)

    # -- the loop ----------------------------------------------------------------------------

    def start(self, post: Callable[..., object]) -> None:
        """Begin; ``post`` is the loop's ``call_soon_threadsafe``."""
        self._table.open()
        self._thread = DaemonThreads("kvtiers-verify", 1)
        self._post = post

    def stop(self) -> None:
        """End the thread, after it has processed its queue."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            self._table.close()

    def _take(self, found: Sequence[tuple[DigestJob, torch.Tensor]], event: Any) -> None:
        if self._thread is not None:
            self._thread.run(self._enter, found, event).add_done_callback(self._entered)

    def _entered(self, done: Any) -> None:
        if not done.cancelled() and done.exception() is not None:
            self._give_up(done.exception())

    def _forget(self) -> None:
        """Forget all digests, because the weights have changed."""
        if self._thread is not None:
            self._thread.run(self._table.clear).add_done_callback(self._entered)

    async def settled(self) -> None:
        """Wait until every digest taken so far is in the table and in the file."""
        if self._thread is not None:
            await self._thread.run(lambda: None)

    async def wrong(self, items: Sequence[LoadItem]) -> frozenset[bytes]:
        """Return the keys of these loaded chunks whose bytes in the KV cache differ from those
        computed.

        Their blocks must not be written until this returns.
        """
        if self._thread is None or self._broken:
            return frozenset()
        try:
            return await self._thread.run(self._compare, items)
        except Exception as error:  # serving goes on, whatever the error
            self._give_up(error)
            return frozenset()

    # -- the thread --------------------------------------------------------------------------

    def _enter(self, found: Sequence[tuple[DigestJob, torch.Tensor]], event: Any) -> None:
        if event is not None:
            event.synchronize()
        for job, digests in found:
            shape = (len(job.keys), -1, digests.shape[1])
            self._table.enter(job.keys, digests.cpu().numpy().reshape(shape))

    def _compare(self, items: Sequence[LoadItem]) -> frozenset[bytes]:
        by_group: dict[int, list[LoadItem]] = {}
        for item in items:
            by_group.setdefault(item.group, []).append(item)
        wrong = set()
        for group, mine in by_group.items():
            blocks = [block for item in mine for block in item.blocks if block >= 0]
            with self._own_stream():
                found = self._device.of(group, blocks).cpu().numpy()
            for item in mine:
                here = [at for at, block in enumerate(item.blocks) if block >= 0]
                if not self._agrees(item, here, found[: len(here)]):
                    wrong.add(item.key)
                found = found[len(here) :]
        return frozenset(wrong)

    def _agrees(self, item: LoadItem, here: Sequence[int], found: Digest) -> bool:
        """Compare the loaded blocks of a chunk, and count the result."""
        known = [digest[here] for digest in self._table.known(item.key)]
        if not known:
            self.stats.unverified_chunks += 1
        elif any(np.array_equal(found, digest) for digest in known):
            self.stats.verified_chunks += 1
        else:
            self.stats.differing_chunks += 1
            self._log(item, here, found, known[-1])
            return False
        return True

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """A separate stream: the load is done, so there is nothing to wait for, and nothing should
        wait for this."""
        if self._device.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device.device)
        with torch.cuda.stream(self._stream):
            yield

    def _log(self, item: LoadItem, here: Sequence[int], found: Digest, known: Digest) -> None:
        self._logged += 1
        if self._logged > LOGGED_MAX:
            return
        rows, columns = np.nonzero(found != known)
        names = self._device.layers(item.group)
        layers = [names[column] for column in sorted(set(columns.tolist()))]
        logger.error(
            "kvtiers: verify: chunk %s of group %d is not what was computed: blocks %s of the "
            "chunk differ in %d of %d layers (%s). The load fails and the chunk is dropped.",
            item.key.hex(),
            item.group,
            sorted({here[row] for row in rows.tolist()}),
            len(layers),
            len(names),
            ", ".join(layers[:3]) + (", ..." if len(layers) > 3 else ""),
        )
