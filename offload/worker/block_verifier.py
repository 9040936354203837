"""Implements ``"verify": "device"``: compares loaded KV blocks with the blocks as computed.

Right after the step that completes a chunk, the chunk's blocks are digested in the KV cache, on the
model's stream (`offload.worker.device_digest`). After a load, the blocks are digested again in
their new blocks, and the digests for the chunk's key are compared. This covers everything in
between: fences, copies, slots, tiers, and restarts.

Two requests may compute the same chunk with different bytes (the kernels depend on the shape of the
batch), so a key can have several digests. A load is correct if it matches one of them.

Ownership: `before_step` and `after_step` run on the model-runner thread; the rest belongs to the
executor's loop. Digests are passed, in the order in which they were made, to one thread, which
alone owns the table and the file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
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
from tiers.io.threads import DaemonThreads

logger = logging.getLogger(__name__)

Digest = npt.NDArray[np.int64]
"""``[blocks of a chunk, layers]``."""

VERIFIED_KEYS_MAX = 1 << 20
"""Number of keys whose digests are kept; beyond that the oldest are forgotten."""
DIGESTS_MAX = 32
"""Number of digests kept per key."""
DIGESTS_BYTES_MAX = 4 << 30
DIFFERENCES_LOGGED_MAX = 20
"""Number of differing chunks that are named in the log; all are counted."""
SUFFIX = ".digests"
_LENGTH = struct.Struct("<I")


class _DigestLine(msgspec.Struct, array_like=True):
    """One line of the file: the digests of a chunk or, without a key, a mark. A mark voids all
    earlier lines of this file, and the lines of other files before the offsets in ``others``."""

    key: bytes
    layers: int
    digest: bytes
    others: dict[str, int] = {}


class _Known:
    """One digest of a key, and where it was recorded: files with the last offset in each."""

    __slots__ = ("digest", "lines")

    def __init__(self, digest: Digest) -> None:
        self.digest = digest
        self.lines: tuple[tuple[str, int], ...] = ()

    def held_by(self, file: str, at: int) -> None:
        """Record that this line of this file contains the digest."""
        self.lines = (*(line for line in self.lines if line[0] != file), (file, at))


class DigestTable:
    """Digests by key, in a separate file below ``folder`` if one is given.

    The files of other engines with the same ``name`` in that folder are read as well. Belongs to
    one thread.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._digests: dict[bytes, list[_Known]] = {}
        self._folder = folder
        self._name = name
        self._read: dict[str, int] = {}  # how far each file has been read
        # by file: the offset before which a reset has invalidated it
        self._void: dict[str, int] = {}
        self._own: int | None = None
        self._own_name = ""
        self._written = 0
        self._full = False

    def open(self) -> None:
        """Create the folder and this engine's file. Raises ``OSError``."""
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own_name = f"{self._name}-{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._own = os.open(self._folder / self._own_name, flags, 0o600)

    def close(self) -> None:
        """Close the file. Idempotent."""
        own, self._own = self._own, None
        if own is not None:
            os.close(own)

    def enter(self, keys: Sequence[bytes], digests: Digest) -> None:
        """Add digests ``[chunks, blocks of a chunk, layers]``. Raises ``OSError``."""
        entries = []
        for key, digest in zip(keys, digests, strict=True):
            if self._remember(key, digest, self._own_name, self._written):
                entries.append(_DigestLine(key, digest.shape[1], digest.tobytes()))
        if not self._full:
            self._append(entries)

    def clear(self) -> None:
        """Forget everything that any engine has digested so far, even after a restart, because the
        weights have changed. Raises ``OSError``."""
        self._digests.clear()
        others = {}
        for path in self._other_files():
            with contextlib.suppress(FileNotFoundError):
                others[path.name] = path.stat().st_size
        self._forget_before(others)
        self._append([_DigestLine(b"", 0, b"", others)])

    def known(self, key: bytes) -> Sequence[Digest]:
        """The digests of a key as far as the other engines' files have been read."""
        return tuple(known.digest for known in self._digests.get(key, ()))

    def known_to_any(self, key: bytes) -> Sequence[Digest]:
        """The digests of a key; reads the rest of the other engines' files first."""
        self._read_others()
        return self.known(key)

    def _remember(self, key: bytes, digest: Digest, file: str, at: int) -> bool:
        """Record that this file contains a digest at this offset. Returns False if this was already
        known."""
        mine = self._digests.setdefault(key, [])
        same = next((known for known in mine if np.array_equal(digest, known.digest)), None)
        is_new = same is None
        if same is None:
            same = _Known(digest.copy())
            mine.append(same)
            del mine[:-DIGESTS_MAX]
            if len(self._digests) > VERIFIED_KEYS_MAX:
                del self._digests[next(iter(self._digests))]
        same.held_by(file, at)
        return is_new

    def _forget_before(self, voided: dict[str, int]) -> None:
        """Forget the digests that are recorded only before these offsets of these files."""
        for file, end in voided.items():
            self._void[file] = max(end, self._void.get(file, 0))
        for key, mine in list(self._digests.items()):
            for known in mine:
                known.lines = tuple(line for line in known.lines if line[1] >= voided.get(*line))
            mine[:] = [known for known in mine if known.lines]
            if not mine:
                del self._digests[key]

    def _append(self, entries: Sequence[_DigestLine]) -> None:
        if self._own is None or not entries:
            return
        frames = [msgspec.msgpack.encode(entry) for entry in entries]
        data = b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)
        if not self._full and self._written + len(data) > DIGESTS_BYTES_MAX:
            self._full = True  # resets are still recorded
            logger.warning("kvtiers: verify: the file of digests is full; no more are kept")
            if entries[0].key:
                return
        written = os.write(self._own, data)
        if written < len(data):
            os.ftruncate(self._own, self._written)
            raise OSError(errno.ENOSPC, "the file of digests could not be extended")
        self._written += written

    def _other_files(self) -> list[Path]:
        if self._folder is None:
            return []
        found = sorted(self._folder.glob(f"{self._name}-*{SUFFIX}"))
        return [path for path in found if path.name != self._own_name]

    def _read_others(self) -> None:
        for path in self._other_files():
            at = self._read.get(path.name, 0)
            with contextlib.suppress(OSError):
                if path.stat().st_size <= at:
                    continue
                with path.open("rb") as file:
                    file.seek(at)
                    data = file.read()
                self._read[path.name] = at + self._take(data, path.name, at)

    def _take(self, data: bytes, file: str, first: int) -> int:
        """Add the complete frames in ``data``, which starts at ``first`` in the file; return their
        length in bytes."""
        at = 0
        while at + _LENGTH.size <= len(data):
            (size,) = _LENGTH.unpack_from(data, at)
            frame = data[at + _LENGTH.size : at + _LENGTH.size + size]
            if len(frame) < size:
                break
            entry = msgspec.msgpack.decode(frame, type=_DigestLine)
            if not entry.key:
                before = {name: end for name, end in entry.others.items() if name != self._own_name}
                self._forget_before(before | {file: first + at})
            elif first + at >= self._void.get(file, 0):
                digest = np.frombuffer(entry.digest, dtype=np.int64).reshape(-1, entry.layers)
                self._remember(entry.key, digest, file, first + at)
            at += _LENGTH.size + size
        return at


class Verifier:
    """Digests computed and loaded chunks on one rank, and compares them.

    Counts in ``stats`` (``verified_chunks``, ``differing_chunks``, ``unverified_chunks``). `start`
    raises ``OSError`` if the folder for the digests cannot be used. After an error has set
    ``broken``, it compares nothing, and every loaded chunk counts as unverified.
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
        self.broken = False
        self._logged = 0
        self._reading = threading.Lock()
        self._asleep = False

    # -- model-runner thread ---------------------------------------------------------------------

    def before_step(self, plan: StepPlan) -> None:
        """Digest the chunks that were complete before this step, whose forward pass may overwrite
        them."""
        self._digest([job for job in plan.digests if job.early])

    def after_step(self, plan: StepPlan) -> None:
        """Digest the chunks that this step has completed, before a later one can overwrite them."""
        if plan.reset:
            self._post(self._forget)
        self._digest([job for job in plan.digests if not job.early])

    def suspend(self, timeout_s: float) -> bool:
        """Stop reading the KV cache until `resume`. Returns False if a read has not ended in
        time."""
        self._asleep = True
        if not self._reading.acquire(timeout=max(0.0, timeout_s)):
            return False
        self._reading.release()
        return True

    def resume(self) -> None:
        """Allow reading the KV cache again."""
        self._asleep = False

    def _digest(self, jobs: Sequence[DigestJob]) -> None:
        """Digest the content that these blocks have at this point of the current stream.

        Never raises: a fault ends the verification, not the server.
        """
        if not jobs or self.broken or self._asleep:
            return
        try:
            found = [(job, self._device.of(job.group, job.blocks)) for job in jobs]
            event = None
            if self._device.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
            self._post(self._take, found, event)
        except Exception as error:  # serving continues, whatever the error
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if not self.broken:
            self.broken = True
            logger.error(
                "kvtiers: verify has stopped; from now on loaded chunks are not compared, and "
                "count in unverified_chunks: %r",
                error,
            )

    # -- event loop thread -----------------------------------------------------------------------

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

    async def mismatched(
        self, items: Sequence[LoadItem], has_ended: Callable[[], bool]
    ) -> frozenset[bytes]:
        """Return the keys of these loaded chunks whose bytes in the KV cache differ from those
        computed. Chunks that cannot be compared are counted, and none of them is returned.

        ``has_ended`` is called on another thread. It is true once the load was given up: then vLLM
        may already compute the blocks again, so nothing is compared or counted.
        """
        if self._thread is None:
            return frozenset()
        return await self._thread.run(self._compare, items, has_ended)

    # -- digest thread ---------------------------------------------------------------------------

    def _enter(self, found: Sequence[tuple[DigestJob, torch.Tensor]], event: Any) -> None:
        if event is not None:
            event.synchronize()
        for job, digests in found:
            shape = (len(job.keys), -1, digests.shape[1])
            self._table.enter(job.keys, digests.cpu().numpy().reshape(shape))

    def _compare(
        self, items: Sequence[LoadItem], has_ended: Callable[[], bool]
    ) -> frozenset[bytes]:
        if not self.broken:
            try:
                verdicts = self._verdicts(items, has_ended)
            except Exception as error:  # serving continues, whatever the error
                self._give_up(error)
            else:
                mismatched = [key for key, verdict in verdicts if verdict is False]
                self.stats.verified(
                    good=sum(verdict is True for _, verdict in verdicts),
                    differing=len(mismatched),
                    unknown=sum(verdict is None for _, verdict in verdicts),
                )
                return frozenset(mismatched)
        self.stats.verified(unknown=len(items))
        return frozenset()

    def _verdicts(
        self, items: Sequence[LoadItem], has_ended: Callable[[], bool]
    ) -> list[tuple[bytes, bool | None]]:
        """For each key: True if its chunk equals what was computed, False if not, None if its
        digest is not known."""
        by_group: dict[int, list[LoadItem]] = {}
        for item in items:
            by_group.setdefault(item.group, []).append(item)
        verdicts: list[tuple[bytes, bool | None]] = []
        for group, mine in by_group.items():
            blocks = [block for item in mine for block in item.blocks if block >= 0]
            with self._reading:
                if self._asleep:  # the blocks are gone because their load has failed
                    return verdicts
                with self._own_stream():
                    found = self._device.of(group, blocks).cpu().numpy()
            if has_ended():  # checked after reading: the blocks may have had another owner by then
                return verdicts
            for item in mine:
                here = [at for at, block in enumerate(item.blocks) if block >= 0]
                verdicts.append((item.key, self._agrees(item, here, found[: len(here)])))
                found = found[len(here) :]
        return verdicts

    def _agrees(self, item: LoadItem, here: Sequence[int], found: Digest) -> bool | None:
        """Compare the loaded blocks of a chunk; None if its digest is not known. Another engine may
        have computed and stored the same chunk with other bytes than this one."""
        known: list[Digest] = []
        for digests_of in (self._table.known, self._table.known_to_any):
            known = [digest[here] for digest in digests_of(item.key)]
            if any(np.array_equal(found, digest) for digest in known):
                return True
        if not known:
            return None
        self._log(item, here, found, known[-1])
        return False

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Use a separate stream. The load has ended, so this stream waits for nothing, and no other
        stream waits for it."""
        if self._device.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device.device)
        with torch.cuda.stream(self._stream):
            yield

    def _log(self, item: LoadItem, here: Sequence[int], found: Digest, known: Digest) -> None:
        self._logged += 1
        if self._logged > DIFFERENCES_LOGGED_MAX:
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
