"""The identity of stored blocks: named fields, their digest, and the manifest that contains both.

Two servers may read each other's records only if they agree in every field that can change a byte
of a block, or which block a key refers to. The fields are plain JSON values
(``offload.connector.model.identity`` collects them from vLLM). Their canonical JSON is hashed;
every record contains the 16-byte digest, and its 32 hex digits name the folder, so no text from a
user or a model is ever part of a path.

This module owns the value and the manifest file. Folders, epochs and clean-up of namespaces are in
``offload.namespaces.folders``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import NamespaceError, TierUnavailableError
from tiers.folders.folder import sync_folder

FORMAT_VERSION = 1
MANIFEST_NAME = "kvt-manifest.json"
MANIFEST_BYTES_MAX = 64 * 1024
NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
_DOMAIN = b"kvtiers namespace\n"
_MEMBERS = frozenset({"format", "namespace", "fields"})


class NewerFormatError(NamespaceError):
    """A newer version of this package wrote the data: leave it alone."""


class UnreadableError(TierUnavailableError):
    """A file or folder exists but cannot be read now, say because of a stale NFS handle. Nothing is
    known about its content, so it does not count as damaged."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path} cannot be read: {error.strerror}")


class _Absent:
    """Represents a field that one side lacks; it equals no JSON value."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass(frozen=True)
class Namespace:
    """An immutable set of named fields. Equal if and only if the canonical texts are equal."""

    canonical: bytes

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Namespace:
        """The namespace of these fields: strings to JSON values; a tuple counts as a list.

        Raises ``TypeError`` for anything else and ``ValueError`` for NaN and infinities, because a
        value without a unique canonical text would split a namespace or merge two.
        """
        plain = {_name(name): _plain(value, str(name)) for name, value in fields.items()}
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return cls(text.encode("ascii"))

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields by name. It is a copy: changing it does not change the namespace."""
        found: dict[str, Any] = json.loads(self.canonical)
        return found

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of SHA-256 over the canonical text; the ``namespace`` of every record."""
        return hashlib.sha256(_DOMAIN + self.canonical).digest()[:16]

    @property
    def name(self) -> str:
        """The digest as 32 hex digits; the name of the folder."""
        return self.digest.hex()

    def __repr__(self) -> str:
        return f"Namespace({self.name})"


class FieldDifference(NamedTuple):
    """A leaf in which two namespaces differ, with both values; ``ABSENT`` for a missing one.

    A ``path`` looks like ``geometry.groups[0].block_size``.
    """

    path: str
    first: Any
    second: Any


def differing_fields(a: Namespace, b: Namespace) -> list[FieldDifference]:
    """Every leaf that differs, sorted by path."""
    return list(_differences("", a.fields, b.fields))


def write_manifest(folder: str | Path, namespace: Namespace) -> None:
    """Durably write a manifest that names the namespace of the records in ``folder``.

    Atomic; writing the same again changes nothing. Raises ``OSError`` from the file system and
    ``ValueError`` if the fields do not fit.
    """
    write_durably(Path(folder) / MANIFEST_NAME, dump_manifest(namespace))


def dump_manifest(namespace: Namespace) -> bytes:
    """The content of a manifest. Raises ``ValueError`` if the fields do not fit."""
    document = {"format": FORMAT_VERSION, "namespace": namespace.name, "fields": namespace.fields}
    text = json.dumps(document, indent=1, sort_keys=True).encode("ascii") + b"\n"
    if len(text) > MANIFEST_BYTES_MAX:
        raise ValueError(
            f"the manifest has {len(text)} bytes, more than {MANIFEST_BYTES_MAX}: "
            "put a digest of the large field into the namespace instead"
        )
    return text


def read_manifest(folder: str | Path) -> Namespace | None:
    """The namespace in the manifest of ``folder``; ``None`` if it has no manifest.

    The content is not trusted: only a regular file of at most 64 KiB is opened for reading, and its
    digest must match its fields. Raises ``NamespaceError`` that describes what is wrong with the
    manifest, and ``UnreadableError``.
    """
    path = Path(folder) / MANIFEST_NAME
    text = read_small_file(path, MANIFEST_BYTES_MAX)
    if text is None:
        return None
    try:
        document = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise NamespaceError(f"{path} is not a manifest: {_short(error)}") from None
    return _checked(document, path)


def read_small_file(path: Path, size_max: int) -> bytes | None:
    """The content of a regular file of at most ``size_max`` bytes; ``None`` if there is none.

    Never follows a link and never waits for a pipe. Raises ``NamespaceError`` for anything else,
    and ``UnreadableError`` if the system cannot read it, or if it is a link.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
        try:
            return _content(fd, path, size_max)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(path, error) from error


def _content(fd: int, path: Path, size_max: int) -> bytes:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise NamespaceError(f"{path} is not a regular file")
    if found.st_size > size_max:
        raise NamespaceError(f"{path} has {found.st_size} bytes, more than {size_max}")
    return os.read(fd, size_max)


def write_durably(path: Path, content: bytes, *, placed: Callable[[], None] | None = None) -> None:
    """Replace the content of ``path``, so that after a crash either the old or the new file exists
    and is complete.

    The file and its folder are synced before this returns. With ``placed``, the file is renamed
    before it is synced, and ``placed`` is called in between: from then on other processes see the
    file even if this one is killed, but a power cut can leave it damaged.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            if placed is None:
                os.fsync(fd)
            os.replace(draft, path)
            if placed is not None:
                placed()
                os.fsync(fd)
    except BaseException:  # leave no draft behind, whatever failed
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _checked(document: Any, path: Path) -> Namespace:
    if not isinstance(document, dict) or not isinstance(document.get("format"), int):
        raise NamespaceError(f"{path} is not a manifest: it has no format number")
    if document["format"] > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path} has format {document['format']}, newer than this build's {FORMAT_VERSION}. "
            "Upgrade kvtiers or use another folder."
        )
    fields = document.get("fields")
    if not isinstance(fields, dict) or set(document) != _MEMBERS:
        raise NamespaceError(f"{path} is not a manifest: its fields are not those of format 1")
    try:
        namespace = Namespace.of(fields)
    except (ValueError, RecursionError) as error:
        raise NamespaceError(f"{path} is not a manifest: {_short(error)}") from None
    if namespace.name != document["namespace"]:
        raise NamespaceError(f"{path} was changed: its fields do not match its namespace")
    return namespace


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a field's name must be a string, not {name!r}")
    return name


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {_name(name): _plain(item, f"{where}.{name}") for name, item in value.items()}
    if type(value) in (list, tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"field {where} is a {type(value).__name__}, not a JSON value")


def _differences(path: str, a: Any, b: Any) -> Iterator[FieldDifference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b}):
            inner = f"{path}.{name}" if path else name
            yield from _differences(inner, a.get(name, ABSENT), b.get(name, ABSENT))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{path}[{index}]", left, right)
    elif a is ABSENT or b is ABSENT or _text(a) != _text(b):
        yield FieldDifference(path, a, b)


def _text(value: Any) -> str:
    """A text for comparisons: in Python 1, 1.0 and True are equal, but their digests differ."""
    return json.dumps(value, sort_keys=True)


def _no_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return found


def _short(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
