"""Describes the order of a chunk's bytes on one rank, so a rank with another shape can read them.

A chunk in a slot or a record is a sequence of blocks. A block is a sequence of pages, one per layer
of the group. A page has three dimensions, kernel blocks, heads and tokens, in the order that
``LayerGeometry.order`` gives, outermost first; its smallest part is a unit of ``unit_bytes``
adjacent bytes. The ``split`` of a layer describes how its pages are divided among ranks:

* ``heads``: each of ``R`` ranks has ``heads`` heads. If there are fewer heads than ranks, several
  neighbouring ranks have the same head (vLLM: ``QKVParallelLinear.num_kv_head_replicas``).
* ``copies``: every rank has the whole page (the latents of MLA).
* ``own``: the content of other ranks is unknown, or the page is a recurrent state. Such pages are
  never split or joined.

A description consists of plain values, and is stored as canonical JSON.
``offload.connector.model.worker_geometry`` makes descriptions of vLLM's tensors, and
``offload.geometry.translate`` compares and translates. This module imports neither of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from offload.errors import NamespaceError

GEOMETRY_FORMAT = 1
GEOMETRY_BYTES_MAX = 1 << 20
HEADS = "heads"
COPIES = "copies"
OWN = "own"
KERNEL_BLOCK, HEAD, TOKEN = "b", "h", "t"
_DOMAIN = b"kvtiers geometry\n"


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's page.

    ``form`` names the kernel and the number type; only units with equal ``form`` can be compared.
    ``kernel_tokens`` is the number of tokens of one kernel block. ``tokens`` is the same number if
    each token has a separate unit, and 1 if a unit holds all tokens of a kernel block (and head),
    in an order that only the kernel knows.
    """

    layer: str
    split: str
    form: str
    kernel_blocks: int
    kernel_tokens: int
    heads: int
    tokens: int
    unit_bytes: int
    order: str = KERNEL_BLOCK + HEAD + TOKEN

    @property
    def page_bytes(self) -> int:
        """Bytes of the page, as it is stored in a slot."""
        return self.kernel_blocks * self.heads * self.tokens * self.unit_bytes

    @property
    def strides(self) -> dict[str, int]:
        """Strides in bytes, within the page, between kernel blocks, heads and tokens."""
        sizes = {KERNEL_BLOCK: self.kernel_blocks, HEAD: self.heads, TOKEN: self.tokens}
        found, step = {}, self.unit_bytes
        for axis in reversed(self.order):
            found[axis] = step
            step *= sizes[axis]
        return found


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group; ``layers`` in the order in which their pages lie in a block."""

    group: int
    kind: str
    spec: str
    block_tokens: int
    chunk_blocks: int
    layers: tuple[LayerGeometry, ...]

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one chunk."""
        return self.chunk_blocks * self.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return sum(layer.page_bytes for layer in self.layers)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk on this rank, without the padding of its record."""
        return self.chunk_blocks * self.block_bytes


@dataclass(frozen=True)
class Geometry:
    """All groups on rank ``rank`` of ``ranks`` (tensor parallel).

    ``records`` is the namespace of the described records, so a description is never applied to
    other records.
    """

    records: bytes
    rank: int
    ranks: int
    layout: str
    groups: tuple[GroupGeometry, ...]

    @cached_property
    def by_group(self) -> dict[int, GroupGeometry]:
        """The groups by their id."""
        return {group.group: group for group in self.groups}

    def dump(self) -> bytes:
        """One document of JSON with a check value, at most ``GEOMETRY_BYTES_MAX``.

        In folders it is a file; for stores without folders see
        ``offload.geometry.mooncake_source``.
        """
        body = {
            "records": self.records.hex(),
            "rank": self.rank,
            "ranks": self.ranks,
            "layout": self.layout,
            "groups": [asdict(group) | {"layers": _runs(group.layers)} for group in self.groups],
        }
        document = {"format": GEOMETRY_FORMAT, "check": _check(body), "geometry": body}
        found = _text(document) + b"\n"
        if len(found) > GEOMETRY_BYTES_MAX:
            raise ValueError(f"a geometry of {len(found)} bytes is more than {GEOMETRY_BYTES_MAX}")
        return found

    @classmethod
    def load(cls, content: bytes, where: str) -> Geometry:
        """Read the output of ``dump``.

        The content is not trusted: raises ``NamespaceError`` with a text that begins with
        ``where``.
        """
        try:
            document = json.loads(content)
            form = document["format"]
            if type(form) is not int or form > GEOMETRY_FORMAT:
                what = f"{where} has format {form}, but this build reads up to {GEOMETRY_FORMAT}"
                raise NamespaceError(what)
            body = document["geometry"]
            if document["check"] != _check(body):
                raise NamespaceError(f"{where} was changed: it does not match its checksum")
            return _geometry(body)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise NamespaceError(f"{where} is not a geometry: {error!r:.200}") from None


def content_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a namespace that identify the content of a block, whatever its shape: model,
    dtype, hashes, versions. Blocks that differ in one of them belong to another model."""
    return {name: value for name, value in fields.items() if name not in ("geometry", "parallel")}


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _check(body: Any) -> str:
    return hashlib.sha256(_DOMAIN + _text(body)).hexdigest()[:16]


def _runs(layers: Sequence[LayerGeometry]) -> list[list[Any]]:
    """Neighbouring layers that differ only in their names share one description: a model has a
    hundred layers."""
    found: list[list[Any]] = []
    for layer in layers:
        page = asdict(layer)
        name = page.pop("layer")
        if found and found[-1][1] == page:
            found[-1][0].append(name)
        else:
            found.append([[name], page])
    return found


def _geometry(body: Any) -> Geometry:
    groups = []
    for group in body["groups"]:
        layers = tuple(
            _layer({"layer": name} | page) for names, page in group["layers"] for name in names
        )
        groups.append(
            GroupGeometry(
                int(group["group"]),
                str(group["kind"]),
                str(group["spec"]),
                _natural(group["block_tokens"]),
                _natural(group["chunk_blocks"]),
                layers,
            )
        )
    ranks = _natural(body["ranks"])
    rank = int(body["rank"])
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    records = bytes.fromhex(body["records"])
    return Geometry(records, rank, ranks, str(body["layout"]), tuple(groups))


def _layer(body: Any) -> LayerGeometry:
    found = LayerGeometry(**body)
    for name in ("kernel_blocks", "kernel_tokens", "heads", "tokens", "unit_bytes"):
        _natural(getattr(found, name))
    if sorted(found.order) != [KERNEL_BLOCK, HEAD, TOKEN] or found.split not in _SPLITS:
        raise ValueError(f"order {found.order!r}, split {found.split!r}")
    if not isinstance(found.layer, str) or not isinstance(found.form, str):
        raise TypeError("names must be strings")
    return found


_SPLITS = (HEADS, COPIES, OWN)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 40:
        raise ValueError(f"{value!r} is not a count")
    return value
