"""``kvtiers import``: writes the records of an export into rank folders that no server uses.

It claims the folders as a server does, and writes through their tiers, which keep the capacity, the
epoch, encryption and durability. Before it opens a tier, it refuses a folder that does not fit,
because a tier drops or moves aside records that do not fit its settings.

Records are stored under the epoch of the folder that receives them, and only if both epochs stand
for the weights of the model's files, which the namespace identifies. Epochs are counted in each
folder separately. A folder that was never reset receives records of any such epoch. A folder that
was reset receives only records of the same epoch: older ones may be those that it discarded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from offload.admin.export import EXPORT_FORMAT
from offload.errors import NamespaceError
from offload.namespaces.folders import OnDamage, claim_rank_folder, open_namespace, replica_folder
from offload.namespaces.inventory import RankFolder
from offload.namespaces.manifest import Namespace, dump_manifest
from tiers.adapters.reopening import judge_epochs
from tiers.base import Tier
from tiers.files.tier import FileTier
from tiers.lmdb.files import payload_capacity_bytes
from tiers.lmdb.folder import index_bytes
from tiers.lmdb.index import DATA_NAME, RECORD_INDEX_BYTES, Limits, check_space
from tiers.lmdb.tier import LmdbTier
from tiers.offline.archive import Frame, PortableError, Record, read_ahead, read_frames
from tiers.offline.bulk_write import Written, write_all
from tiers.offline.lmdb_reader import LmdbReader
from tiers.record import KEY_BYTES_MAX, NAMESPACE_BYTES

KINDS = ("lmdb", "file")
REPLICAS_MAX = 1_000_000
"""Folders with higher numbers are not searched."""
LEAVE_AS_IS = OnDamage(is_strict=True)
_RECORDS_OF = re.compile(f"[0-9a-f]{{{2 * NAMESPACE_BYTES}}}", re.ASCII)
RECORD_BYTES = 64 << 10
"""The minimum payload size to assume for exports that do not state one."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target of an import, and the settings of the tiers that the import creates."""

    root: Path
    kind: str = ""
    capacity_bytes: int = 0
    key_file: str = ""
    compress: bool = False


@dataclass(slots=True)
class Imported:
    """The result for one rank.

    ``damaged`` counts the frames that were skipped. ``left`` counts intact records that did not fit
    or that the tier refused. ``refused`` is the reason if nothing of this rank could be imported.
    """

    replica: int
    rank: int
    refused: str = ""
    damaged: int = 0
    left: int = 0
    counts: Written = field(default_factory=Written)

    @property
    def is_complete(self) -> bool:
        """True if every record is in the tier now."""
        return not (self.refused or self.damaged or self.left or self.counts.failed)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found = asdict(self)
        counts = found.pop("counts")
        return {**found, **counts}


class Import:
    """Reads an export once. ``problem`` is the reason why it could not be read to its end."""

    def __init__(self, file: IO[bytes], target: Target, advance: Callable[[int], None]) -> None:
        """Reads the header, which names the namespace. Raises ``NamespaceError``."""
        self.problem = ""
        self.damaged_frames = 0
        self._target = target
        self._advance = advance
        self._frames = self._read(read_ahead(read_frames(file)))
        self._next = next(self._frames, None)
        about = self._next.about if self._next and self._next.kind == "M" else None
        if about is None:
            raise NamespaceError(
                self.problem or "its first frame is damaged, so its namespace is unknown"
            )
        if about.get("format") != EXPORT_FORMAT:
            raise NamespaceError(f"its format is {about.get('format')!r}, not {EXPORT_FORMAT}")
        try:
            self.namespace = Namespace.of(about["fields"])
            dump_manifest(self.namespace)  # raises if the fields do not fit into a manifest
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise NamespaceError(f"its namespace is not readable: {error!r}") from error
        if self.namespace.name != about.get("namespace"):
            raise NamespaceError("its namespace does not match its fields")

    def _read(self, frames: Iterator[Frame]) -> Iterator[Frame]:
        try:
            for frame in frames:
                self._advance(frame.size_bytes)
                yield frame
        except PortableError as error:
            self.problem = str(error)

    def run(self) -> list[Imported]:
        """Import rank by rank. Raises ``TierError``, ``TierUnavailableError``, ``OSError``."""
        found = []
        self._next = next(self._frames, None)
        while self._next is not None and self._next.kind != "E":
            if self._next.kind == "S" and _is_rank_folder(self._next.about):
                assert self._next.about is not None
                found.append(self._one_folder(self._next.about))
            else:  # records of a rank whose description is damaged
                self.damaged_frames += 1
                self._next = next(self._frames, None)
        return found

    def _records(self, into: Imported) -> Iterator[Record]:
        """Yield the records up to the next rank, and count damaged ones."""
        self._next = next(self._frames, None)
        while self._next is not None and self._next.kind == "R":
            if self._next.record is None or not _is_sound(self._next.record):
                into.damaged += 1
            else:
                yield self._next.record
            self._next = next(self._frames, None)

    def _one_folder(self, about: dict[str, Any]) -> Imported:
        replica, rank = about["replica"], about["rank"]
        result = Imported(replica, rank)
        replica_dir = replica_folder(self._target.root, self.namespace, replica)
        if not replica_dir.exists():  # check before any folder is made
            rank_folder = RankFolder(
                replica_dir / f"rank-{rank}", self.namespace.name, replica, rank
            )
            result.refused = _TierMaker(rank_folder, about, self._target, 0).problem
        if result.refused:
            result.left = sum(1 for _record in self._records(result))
            return result
        open_namespace(self._target.root, self.namespace, LEAVE_AS_IS)
        claimed = claim_rank_folder(
            *(self._target.root, self.namespace),
            replica=replica,
            rank=rank,
            engine="kvtiers import",
            on_damage=LEAVE_AS_IS,
        )
        with claimed:
            rank_folder = RankFolder(claimed.folder, self.namespace.name, replica, rank)
            maker = _TierMaker(rank_folder, about, self._target, claimed.epoch)
            result.refused = maker.problem
            records = self._records(result)
            if not maker.problem:
                result.counts = write_all(maker.make(), records)
            result.left = sum(1 for _record in records) + result.counts.full
        return result


def _is_rank_folder(about: dict[str, Any] | None) -> bool:
    """Return True if the description of a rank has everything that an import needs."""
    if about is None:
        return False
    numbers = [about.get(name) for name in ("replica", "rank", "epoch", "record_bytes")]
    records_of = about.get("records_of")
    return (
        all(type(number) is int and 0 <= number < 1 << 48 for number in numbers)
        and about["replica"] < REPLICAS_MAX
        and about["rank"] < 1 << 16
        and about.get("kind") in KINDS
        and about.get("is_shared", False) in (False, True)
        and isinstance(records_of, str)
        and _RECORDS_OF.fullmatch(records_of) is not None
    )


def _is_sound(record: Record) -> bool:
    return 0 < len(record.key) <= KEY_BYTES_MAX and record.payload.nbytes > 0


class _TierMaker:
    """Decides whether an export fits a rank folder, and makes the tier that receives it.

    A tier drops or moves aside records that do not fit its settings; here that is a ``problem``.
    """

    def __init__(
        self, rank_folder: RankFolder, about: dict[str, Any], target: Target, epoch: int
    ) -> None:
        self._rank_folder, self._about, self._target = rank_folder, about, target
        self._known_bytes = 0
        self._record_bytes = min(about["record_bytes"] or RECORD_BYTES, RECORD_BYTES)
        self._epoch = epoch
        self._is_shared = False
        self._records_of = bytes.fromhex(about["records_of"])
        self.kind = target.kind or (
            rank_folder.kind if rank_folder.kind != "empty" else about["kind"]
        )
        self.problem = self._look() if rank_folder.kind != "empty" else ""
        self.capacity_bytes = target.capacity_bytes or self._known_bytes
        self.problem = self.problem or self._check()

    def _look(self) -> str:
        """Read the state of the folder; returns the reason why it must not be opened, if there is
        one."""
        if self.kind != self._rank_folder.kind:
            return f"the target folder is of type {self._rank_folder.kind}, not {self.kind}"
        reader = self._rank_folder.open(self._target.key_file)
        try:
            self._known_bytes = reader.capacity_bytes
            if isinstance(reader, LmdbReader) and reader.limits:
                self._record_bytes = reader.limits.record_bytes
            owner = reader.owner
            epoch, is_shared = reader.epoch, reader.is_shared
            states = {
                (record.is_sealed, reader.can_decrypt(record))
                for batch in reader.batches()
                for record in batch
            }
            sealed = {is_sealed for is_sealed, _ in states}
        finally:
            reader.close()
        if is_shared and self.kind == "file":
            return "engines share the folder there, which an import cannot do. Name another path"
        if is_shared and epoch > self._epoch:  # such engines do not change the epoch file
            self._epoch, self._is_shared = epoch, True
        elif trouble := judge_epochs(epoch, self._epoch):
            return f"the folder there cannot be trusted: {trouble}. Name another path"
        if owner is not None and owner.namespace != self._records_of:
            return "other attention kernels wrote the target's records, in another layout"
        if True in sealed and not self._target.key_file:
            return "the target's records are encrypted: give --key-file"
        if False in sealed and self._target.key_file:
            return "the target's records are not encrypted: omit --key-file"
        if (True, False) in states:  # opening the tier would drop these records
            return f"{self._target.key_file} does not have the key of all records of the target"
        return ""

    def _check(self) -> str:
        if problem := self._weights_problem():
            return problem
        if not self.capacity_bytes:
            return "the capacity of the tier is unknown: give --capacity"
        if self.kind == "file" and (self._target.key_file or self._target.compress):
            return (
                "a file tier neither encrypts nor compresses: omit the option, or give --type lmdb"
            )
        if self.kind == "lmdb" and self.capacity_bytes < self._known_bytes:
            return (
                f"--capacity is below the {self._known_bytes:,} bytes that the folder was created "
                "with, so records would be dropped"
            )
        if self.kind == "lmdb":
            limits = Limits(self.capacity_bytes, self._record_bytes)
            try:
                payload_capacity_bytes(self.capacity_bytes, self._record_bytes)
                index = index_bytes(limits, RECORD_INDEX_BYTES)
                check_space(self._rank_folder.folder / DATA_NAME, index)
            except OSError as error:
                return f"--capacity: {error.strerror}"
            except ValueError as error:
                return str(error)
        return ""

    def _weights_problem(self) -> str:
        """Return the reason why the records must not be stored under the folder's epoch."""
        epoch = self._about["epoch"]
        # Only in a folder of one engine, odd epochs are those of changed weights. The common epoch
        # of engines that share a folder has any number.
        if epoch % 2 and not self._about.get("is_shared"):
            return (
                f"its server had been reset (epoch {epoch}) when it was exported, so its records "
                "may have been computed with weights that are in no file. Start that server again, "
                "and export what it stores from then on"
            )
        is_of_files = self._is_shared or self._epoch % 2 == 0
        if self._epoch == 0 or (self._epoch == epoch and is_of_files):
            return ""
        return (
            f"its records are of epoch {epoch}, but {self._rank_folder.folder} is at epoch "
            f"{self._epoch}: a reset in between may have discarded them. Name another path, or "
            "remove the namespace there with kvtiers clear first"
        )

    def make(self) -> Tier:
        who: dict[str, Any] = {
            "namespace": self._records_of,
            "rank": self._rank_folder.rank,
            "epoch": self._epoch,
        }
        if self.kind == "file":
            return FileTier(self._rank_folder.folder, self.capacity_bytes, **who)
        return LmdbTier(
            self._rank_folder.folder,
            self.capacity_bytes,
            record_bytes=self._record_bytes,
            key_file=self._target.key_file,
            compress=self._target.compress,
            **who,
        )
