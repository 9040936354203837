"""Decides whether this engine may read the records of another engine of the same model but another
geometry.

It also writes the error message for a refusal. The same rules apply to every kind of storage:
folders (``offload.geometry.folder_source``) and stores without folders
(``offload.geometry.mooncake_source``). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import NamespaceError
from offload.geometry.translate import Incompatibility, obstacles
from offload.namespaces.geometry import Geometry
from offload.namespaces.manifest import Namespace

FREE_FIELDS = frozenset({"block_size", "page_bytes", "num_kv_heads", "page_size_padded"})
"""Fields of a manifest's group that may differ, because the geometry states the same facts for
every layer."""
LEFT_TO_GEOMETRY = frozenset({"layers", "layer_count", "shapes"})


def problems_with(
    other: Namespace,
    replicas: Mapping[str, Sequence[Geometry]],
    namespace: Namespace,
    now: Geometry,
    how: str,
) -> list[Incompatibility]:
    """The reasons why an engine with geometry ``now`` and the setting ``how`` must not read
    ``other``.

    The ranks of the namespace ``other`` describe the order of their records, by replica.
    """
    problems = _field_obstacles(other.fields, namespace.fields)
    for replica, ranks in replicas.items():
        problems += _rank_obstacles(replica, ranks, now)
    if how == "refuse" and not problems:
        problems = _differences(other.fields, namespace.fields)
    return problems


def refusal(
    where: str, source: str, another: str, refused: Mapping[str, Sequence[Incompatibility]]
) -> NamespaceError:
    """The error about ``refused`` namespaces in ``source``, a path or a store; ``another`` names
    the alternative that the user has."""
    lines = "\n".join(_lines(name, problems) for name, problems in refused.items())
    return NamespaceError(
        f"kvtiers: {where}: {source} holds blocks of this model that this engine must not read:\n"
        f'{lines}\nUse another {another}, start with the same flags, or set "geometry": "own" to '
        "keep blocks of both side by side."
    )


def _rank_obstacles(
    replica: str, ranks: Sequence[Geometry], now: Geometry
) -> list[Incompatibility]:
    """The reason why the records of a replica cannot be read."""
    if not ranks:
        why = (
            f"{replica} does not describe the order of its records. Either it was imported, or an "
            f"earlier version wrote it: an engine with the same flags adds the description at its "
            f"next start"
        )
        return [Incompatibility("geometry", "not described", "described", why)]
    first = ranks[0]
    for other in ranks[1:]:
        if (other.ranks, other.groups) != (first.ranks, first.groups):
            why = f"ranks {first.rank} and {other.rank} of {replica} differ in this field"
            return [Incompatibility("groups", "not the same on every rank", "the same", why)]
    return obstacles(first, now)


def _field_obstacles(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[Incompatibility]:
    """Fields of the manifest whose differences no translation can bridge."""
    found = []
    there, here = stored.get("parallel", {}), now.get("parallel", {})
    for name in sorted({*there, *here} - {"tensor"}):
        if there.get(name) != here.get(name):
            why = "only tensor parallel ranks are translated"
            found.append(Incompatibility(f"parallel.{name}", there.get(name), here.get(name), why))
    theirs, ours = stored.get("geometry", {}), now.get("geometry", {})
    name = "hash_block_size"
    if theirs.get(name) != ours.get(name):
        why = "keys are hashes of other ranges of the prompt"
        found.append(Incompatibility(f"geometry.{name}", theirs.get(name), ours.get(name), why))
    pairs = zip(theirs.get("groups", ()), ours.get("groups", ()), strict=False)
    for number, (group, mine) in enumerate(pairs):
        for name in sorted({*group, *mine} - FREE_FIELDS - LEFT_TO_GEOMETRY):
            if group.get(name) != mine.get(name):
                field = f"geometry.groups[{number}].{name}"
                why = "another kind of KV cache"
                found.append(Incompatibility(field, group.get(name), mine.get(name), why))
    return found


def _differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[Incompatibility]:
    """The differences between two geometries, if they alone are a reason to refuse."""
    found = []
    for part in ("parallel", "geometry"):
        there, here = stored.get(part, {}), now.get(part, {})
        for name in sorted({*there, *here} - {"tensors", "groups"}):
            if there.get(name) != here.get(name):
                field = f"{part}.{name}"
                why = '"geometry" is "refuse"'
                found.append(Incompatibility(field, there.get(name), here.get(name), why))
    if not found:
        found.append(
            Incompatibility("geometry.groups", "other ones", "these", '"geometry" is "refuse"')
        )
    return found


def _lines(name: str, problems: Sequence[Incompatibility]) -> str:
    """The lines about one namespace."""
    unique = list(dict.fromkeys(problems))
    lines = [f"  namespace {name}:", *(f"    {problem}" for problem in unique)]
    flags = sorted({problem.flags for problem in unique if problem.flags})
    if flags:
        lines.append(f"    (it was written with {', '.join(flags)})")
    return "\n".join(lines)
