"""Finds and reads the records of engines with another geometry in a Mooncake store.

A store has no folders, so each rank posts a description of its records: its namespace and its
geometry. The description is on a board (``tiers.mooncake.bulletin``). There is one board per rank,
shared by all engines of one model, whatever their geometry. It is parsed as untrusted input.

As with folders, this engine refuses to start if an engine of the same model has records that cannot
be translated. It ignores descriptions that were not renewed for a day. Engines that appear later
are translated, or named once in the log.

Ownership: several threads call ``MooncakeSource``. Its knowledge of other engines is one value that
``refresh`` replaces; everything else is made for one call.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from offload.errors import NamespaceError
from offload.geometry.compatibility import problems_with, refusal
from offload.geometry.translate import GroupTranslation, Incompatibility, apply, translation_of
from offload.layout.keys import GROUP_BYTES, group_suffix
from offload.namespaces.geometry import GEOMETRY_BYTES_MAX, Geometry, content_fields
from offload.namespaces.manifest import MANIFEST_BYTES_MAX, Namespace, differing_fields
from tiers.adapters.read_only import SourceKey
from tiers.base import Buffer, Key, ReadOutcome, TierError, TierIoError
from tiers.copy.base import padded
from tiers.mooncake.bulletin import Notice, Posted, read_boards
from tiers.mooncake.client import CALL_RECORDS_MAX, MooncakeClient, MooncakeSettings
from tiers.record import Identity

logger = logging.getLogger(__name__)

NOTICE_FORMAT = 1
_DOMAIN = b"kvtiers model\n"


@dataclass(frozen=True)
class Described:
    """A namespace, how one rank orders the records that it keeps there, and whether an engine still
    renews the description."""

    namespace: Namespace
    geometry: Geometry
    is_alive: bool = True


def board_of(fields: Mapping[str, Any], rank: int) -> str:
    """The name of the board of rank ``rank``.

    ``fields`` are the fields of a namespace; the fields of one model lead to one board, whatever
    else differs.
    """
    content = json.dumps(content_fields(fields), sort_keys=True).encode()
    digest = hashlib.sha256(_DOMAIN + content).hexdigest()[:32]
    return f"kvtiers-geometry/{digest}/{rank}"


def notice_of(namespace: Namespace, geometry: Geometry, how: str) -> Notice:
    """The document that this rank posts. With ``how`` "own", the log names the descriptions of
    other engines."""
    content = dump(namespace, geometry)
    on_found = (
        partial(_log_other_engines, namespace) if how == "own" and geometry.rank == 0 else _ignore
    )
    return Notice(board_of(namespace.fields, geometry.rank), content, on_found)


def dump(namespace: Namespace, geometry: Geometry) -> bytes:
    """One document of JSON."""
    document = {
        "format": NOTICE_FORMAT,
        "namespace": namespace.name,
        "fields": namespace.fields,
        "geometry": geometry.dump().decode("ascii"),
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


def load(content: bytes, where: str) -> Described:
    """Parse the output of ``dump``. Raises ``NamespaceError`` that begins with ``where``."""
    try:
        if len(content) > MANIFEST_BYTES_MAX + GEOMETRY_BYTES_MAX:
            raise ValueError(f"{len(content)} bytes")
        document = json.loads(content)
        form, fields = document["format"], document["fields"]
        if type(form) is not int or form > NOTICE_FORMAT:
            raise ValueError(f"it has format {form}, but this build reads up to {NOTICE_FORMAT}")
        namespace = Namespace.of(fields)
        if namespace.name != document["namespace"]:
            raise ValueError("its fields do not match its namespace")
        geometry = str(document["geometry"]).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NamespaceError(f"{where} cannot be read: {error!r:.200}") from None
    return Described(namespace, Geometry.load(geometry, where))


def load_all(posted: Sequence[Posted], warn: Callable[[str], object]) -> list[Described]:
    """Parse the readable documents; ``warn`` gets the others."""
    found = []
    for each in posted:
        try:
            described = load(each.content, "a description of an engine in the store")
            found.append(replace(described, is_alive=each.is_alive))
        except NamespaceError as error:
            warn(f"kvtiers: {error}")
    return found


def _log_other_engines(namespace: Namespace, posted: Sequence[Posted]) -> None:
    others = {
        found.namespace.name: found.namespace
        for found in load_all(posted, logger.warning)
        if found.namespace != namespace
    }
    for other in others.values():
        fields = [
            f"{path} ({theirs} there, {ours} here)"
            for path, theirs, ours in differing_fields(other, namespace)
        ]
        logger.info(
            "kvtiers: the store also holds blocks of this model in another geometry (namespace "
            '%s): %s. With "geometry": "translate" this engine would '
            "read those that it can translate exactly",
            other.name,
            ", ".join(fields[:8]),
        )


def _ignore(_posted: Sequence[Posted]) -> None:
    """Ignore other descriptions: a rank that translates looks for them itself."""


T = TypeVar("T")

FILES_EPOCH = 0
"""The epoch of the weights in the model's files, which all engines of a namespace have."""
RANKS_MAX = 1024
READ_BYTES = 64 << 20
"""Maximum number of other engines' records in memory at a time; one chunk can exceed it."""
THREADS = 2
WARNED_MAX = 1000


@dataclass(frozen=True)
class OtherEngine:
    """An engine whose records can be read. ``translations`` are by the suffix of each group's keys,
    ``identities`` by rank: the namespace and the rank that the records must state."""

    translations: Mapping[bytes, GroupTranslation]
    identities: Mapping[int, Identity]


@dataclass(frozen=True)
class MooncakeView:
    """Finds the other engines in the store, on behalf of one rank.

    It looks for engines of the model of ``namespace``, and translates their records to the geometry
    ``now``. ``how`` is the tier's option ``geometry``.
    """

    settings: MooncakeSettings
    namespace: Namespace
    now: Geometry
    how: str

    @property
    def description(self) -> str:
        """The name of the store in messages."""
        return f"the Mooncake store at {self.settings.master}"

    def check(self, where: str) -> None:
        """Check the store before a tier is made.

        Raises ``NamespaceError`` for records that cannot be translated, or must not be, and
        ``TierError`` if the store cannot be joined.
        """
        client = self.join(reads=0)
        try:
            _, refused = self.find_engines(client, logger.warning)
        finally:
            client.close()
        if refused:
            raise refusal(where, self.description, "store", refused)

    def join(self, reads: int) -> MooncakeClient:
        """A connection for this number of reads at a time. Raises ``TierIoError``."""
        identity = Identity(self.now.records, self.now.rank)
        return MooncakeClient(self.settings, identity, None, calls=reads)

    def find_engines(
        self, client: MooncakeClient, warn: Callable[[str], object]
    ) -> tuple[list[OtherEngine], dict[str, list[Incompatibility]]]:
        """The engines whose records can be read and, by namespace, the reasons why those of others
        cannot.

        Raises ``TierIoError``; ``warn`` gets invalid documents.
        """
        found: list[OtherEngine] = []
        refused: dict[str, list[Incompatibility]] = {}
        for (name, _), described in self._others(client, warn).items():
            other = described[0].namespace
            ranks = _by_rank(described, warn)
            if not ranks:
                continue
            replica = {f"namespace {name} in {self.description}": ranks}
            problems = problems_with(other, replica, self.namespace, self.now, self.how)
            if problems and any(each.is_alive for each in described):
                refused[name] = problems
            if not problems and (engine := _engine(ranks, self.now)) is not None:
                found.append(engine)
        return found, refused

    def _others(
        self, client: MooncakeClient, warn: Callable[[str], object]
    ) -> dict[tuple[str, bytes], list[Described]]:
        """The descriptions of the ranks of other engines of this model, by namespace and by the
        namespace of their records."""
        fields = self.namespace.fields
        [first] = read_boards(client, [board_of(fields, 0)])
        described = load_all(first, warn)
        ranks = max((each.geometry.ranks for each in described), default=1)
        boards = [board_of(fields, rank) for rank in range(1, min(ranks, RANKS_MAX))]
        if boards:
            posted = [each for board in read_boards(client, boards) for each in board]
            described += load_all(posted, warn)
        found: dict[tuple[str, bytes], list[Described]] = {}
        for each in described:
            if each.namespace != self.namespace:
                about = (each.namespace.name, each.geometry.records)
                found.setdefault(about, []).append(each)
        return found


class MooncakeSource:
    """See the module's docstring. A ``tiers.adapters.remote_read_only.RemoteSource``."""

    def __init__(self, view: MooncakeView) -> None:
        """Raises ``TierIoError`` if the store cannot be joined."""
        self._view = view
        self._client = view.join(reads=1)
        self._warned: set[str] = set()
        self._is_failing = False
        self._engines: tuple[OtherEngine, ...] = ()
        try:
            self.refresh()
        except BaseException:  # the client's threads would stay alive
            self._client.close()
            raise

    def refresh(self) -> None:
        """Find the engines that are there at present."""
        found, refused = self._called(
            partial(self._view.find_engines, self._client, self._warn_once)
        )
        if len(found) > len(self._engines) and self._view.now.rank == 0:
            text = "kvtiers: %s: translating blocks of %d engines with another geometry"
            logger.info(text, self._view.description, len(found))
        self._engines = tuple(found)
        for name, problems in refused.items():
            self._warn_once(str(refusal(name, self._view.description, "store", {name: problems})))

    def _warn_once(self, text: str) -> None:
        """Log a text once, as a warning."""
        if text not in self._warned and len(self._warned) < WARNED_MAX:
            self._warned.add(text)
            logger.warning("%s", text)

    def keys(self) -> list[SourceKey]:
        """Empty, because a store has no list of its keys."""
        return []

    def have(self, keys: Sequence[Key]) -> list[bool]:
        """Determine which chunks some engine holds completely."""
        return self._called(partial(self._have, keys))

    def _have(self, keys: Sequence[Key]) -> list[bool]:
        found = [False] * len(keys)
        for engine in self._engines:
            for translation, positions in _by_translation(keys, engine, found):
                left = positions
                for rank in translation.ranks:
                    asked = [keys[n] for n in left]
                    identity = engine.identities[rank]
                    here = self._client.present(asked, FILES_EPOCH, identity) if asked else []
                    left = [n for n, is_here in zip(left, here, strict=True) if is_here]
                for n in left:
                    found[n] = True
        return found

    def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        """Read each chunk from the first engine that has a record under its key."""
        return self._called(partial(self._read, keys, into))

    def _read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        outcomes = [ReadOutcome.MISS] * len(keys)
        for engine in self._engines:
            tried = [outcome is not ReadOutcome.MISS for outcome in outcomes]
            for translation, positions in _by_translation(keys, engine, tried):
                size = padded(translation.record_bytes) * len(translation.ranks)
                step = max(1, min(CALL_RECORDS_MAX, READ_BYTES // size))
                for at in range(0, len(positions), step):
                    some = positions[at : at + step]
                    found = self._chunks(
                        engine, translation, [keys[n] for n in some], [into[n] for n in some]
                    )
                    for n, outcome in zip(some, found, strict=True):
                        outcomes[n] = outcome
        return outcomes

    def _chunks(
        self,
        engine: OtherEngine,
        translation: GroupTranslation,
        keys: Sequence[Key],
        into: Sequence[Buffer],
    ) -> list[ReadOutcome]:
        """Read at most ``CALL_RECORDS_MAX`` chunks of one group."""
        size = padded(translation.record_bytes)
        records = np.empty((len(translation.ranks), len(keys), size), np.uint8)
        outcomes = [ReadOutcome.OK] * len(keys)
        for rank, rows in zip(translation.ranks, records, strict=True):
            left = [n for n, outcome in enumerate(outcomes) if outcome is ReadOutcome.OK]
            if not left:
                break
            identity = engine.identities[rank]
            asked, buffers = [keys[n] for n in left], [rows[n] for n in left]
            found = self._client.get(asked, FILES_EPOCH, buffers, identity)
            for n, outcome in zip(left, found, strict=True):
                outcomes[n] = outcome
        for n, outcome in enumerate(outcomes):
            if outcome is not ReadOutcome.OK:
                continue
            if into[n].nbytes != padded(translation.chunk_bytes):
                outcomes[n] = ReadOutcome.CORRUPT
                continue
            apply(translation, list(records[:, n]), into[n])
            into[n][translation.chunk_bytes :] = 0
        return outcomes

    def close(self) -> None:
        """Leave the store."""
        self._client.close()

    def _called(self, call: Callable[[], T]) -> T:
        """Call the store. While the master is known to be unreachable, no call is made, because
        that would take seconds."""
        if self._is_failing and not self._client.is_healthy:
            raise TierIoError("the Mooncake master does not answer")
        try:
            result = call()
        except TierError:
            self._is_failing = True
            raise
        self._is_failing = False
        return result


def _by_rank(described: Sequence[Described], warn: Callable[[str], object]) -> list[Geometry]:
    """The descriptions of an engine's ranks, in order.

    Empty if two of them contradict each other about the same records.
    """
    by_rank: dict[int, Geometry] = {}
    for each in described:
        found = each.geometry
        if by_rank.setdefault(found.rank, found) != found:
            name = each.namespace.name
            warn(
                f"kvtiers: namespace {name} has two different descriptions, so it is not translated"
            )
            return []
    return [by_rank[rank] for rank in sorted(by_rank)]


def _engine(ranks: Sequence[Geometry], now: Geometry) -> OtherEngine | None:
    """Make the engine; ``None`` while the description of a needed rank is missing."""
    first = ranks[0]
    translations = {
        group_suffix(group.group): translation_of(first, now, group.group) for group in now.groups
    }
    identities = {geometry.rank: Identity(geometry.records, geometry.rank) for geometry in ranks}
    needed = {rank for translation in translations.values() for rank in translation.ranks}
    return OtherEngine(translations, identities) if needed <= identities.keys() else None


def _by_translation(
    keys: Sequence[Key], engine: OtherEngine, done: Sequence[bool]
) -> list[tuple[GroupTranslation, list[int]]]:
    """For each group, its translation and the positions of its keys that are not done."""
    positions: dict[bytes, list[int]] = {}
    for n, key in enumerate(keys):
        if not done[n] and key[-GROUP_BYTES:] in engine.translations:
            positions.setdefault(key[-GROUP_BYTES:], []).append(n)
    return [(engine.translations[suffix], found) for suffix, found in positions.items()]


def open_mooncake_source(view: MooncakeView) -> Callable[[], MooncakeSource]:
    """Open the source for ``tiers.adapters.remote_read_only.RemoteReadOnlyTier``."""
    return partial(MooncakeSource, view)
