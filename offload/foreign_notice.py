"""What a rank says of its records in a store that has no folders: its namespace and its geometry.

It stands on a board (``tiers.mooncake_board``) that engines of one model have in common whatever
their geometry is, one for each rank. Whatever stands there is read as hostile.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from offload.errors import NamespaceError
from offload.geometry import GEOMETRY_BYTES_MAX, Geometry, content_fields
from offload.namespace import MANIFEST_BYTES_MAX, Namespace, differing_fields
from tiers.mooncake_board import Notice, Posted

logger = logging.getLogger(__name__)

NOTICE_FORMAT = 1
_DOMAIN = b"kvtiers model\n"


@dataclass(frozen=True)
class Described:
    """A namespace, how one rank orders the records that it keeps there, and whether somebody still
    says so."""

    namespace: Namespace
    geometry: Geometry
    is_alive: bool = True


def board_of(fields: Mapping[str, Any], rank: int) -> str:
    """The name of the board of rank ``rank``. ``fields`` are those of a namespace; of one model
    they lead to one board, whatever else differs."""
    content = json.dumps(content_fields(fields), sort_keys=True).encode()
    digest = hashlib.sha256(_DOMAIN + content).hexdigest()[:32]
    return f"kvtiers-geometry/{digest}/{rank}"


def notice_of(namespace: Namespace, geometry: Geometry, how: str) -> Notice:
    """What this rank posts. With ``how`` "own" the log names the others that are there."""
    content = dump(namespace, geometry)
    heard = partial(_tell, namespace) if how == "own" and geometry.rank == 0 else _ignore
    return Notice(board_of(namespace.fields, geometry.rank), content, heard)


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
    """What ``dump`` made. Raises ``NamespaceError`` that begins with ``where``."""
    try:
        if len(content) > MANIFEST_BYTES_MAX + GEOMETRY_BYTES_MAX:
            raise ValueError(f"{len(content)} bytes")
        document = json.loads(content)
        form, fields = document["format"], document["fields"]
        if type(form) is not int or form > NOTICE_FORMAT:
            raise ValueError(f"it has format {form}, this build {NOTICE_FORMAT}")
        namespace = Namespace.of(fields)
        if namespace.name != document["namespace"]:
            raise ValueError("its fields do not fit its namespace")
        geometry = str(document["geometry"]).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NamespaceError(f"{where} does not say what it describes: {error!r:.200}") from None
    return Described(namespace, Geometry.load(geometry, where))


def load_all(posted: Sequence[Posted], tell: Callable[[str], object]) -> list[Described]:
    """What documents say, as far as they can be read; ``tell`` is told of the others."""
    found = []
    for each in posted:
        try:
            described = load(each.content, "a notice in the store")
            found.append(replace(described, is_alive=each.is_alive))
        except NamespaceError as error:
            tell(f"kvtiers: {error}")
    return found


def _tell(namespace: Namespace, posted: Sequence[Posted]) -> None:
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
            "kvtiers: the store holds blocks of this model in another geometry, too (namespace "
            '%s): %s. With "geometry": "translate" they would be read where that is exact',
            other.name,
            ", ".join(fields[:8]),
        )


def _ignore(_posted: Sequence[Posted]) -> None:
    """Whoever translates looks for the others himself."""
