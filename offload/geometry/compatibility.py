"""Whether records of the same model that an engine of other geometry has stored may be read here,
and what to say if not. Where they lie makes no difference: folders
(``offload.geometry.folder_source``) and stores without folders
(``offload.geometry.mooncake_source``) ask the same questions. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import NamespaceError
from offload.geometry.translate import Incompatibility, obstacles
from offload.namespaces.geometry import Geometry
from offload.namespaces.manifest import Namespace

FREE_FIELDS = frozenset({"block_size", "page_bytes", "num_kv_heads", "page_size_padded"})
"""Of a group in the manifest, what may differ: the geometry says the same of every layer."""
LEFT_TO_GEOMETRY = frozenset({"layers", "layer_count", "shapes"})


def problems_with(
    other: Namespace,
    replicas: Mapping[str, Sequence[Geometry]],
    namespace: Namespace,
    now: Geometry,
    how: str,
) -> list[Incompatibility]:
    """Why an engine with geometry ``now`` and the setting ``how`` must not read the namespace
    ``other``, whose ranks describe the order of their records, by replica."""
    problems = _field_obstacles(other.fields, namespace.fields)
    for place, ranks in replicas.items():
        problems += _rank_obstacles(place, ranks, now)
    if how == "refuse" and not problems:
        problems = _differences(other.fields, namespace.fields)
    return problems


def refusal(
    where: str, place: str, another: str, refused: Mapping[str, Sequence[Incompatibility]]
) -> NamespaceError:
    """The message about ``refused`` namespaces in ``place``; ``another`` is the alternative that
    the user may choose."""
    lines = "\n".join(_lines(name, problems) for name, problems in refused.items())
    return NamespaceError(
        f"kvtiers: {where}: {place} holds blocks of this model that this engine must not read:\n"
        f'{lines}\nUse another {another}, start with the same flags, or set "geometry": "own" to '
        "keep blocks of both side by side."
    )


def _rank_obstacles(place: str, ranks: Sequence[Geometry], now: Geometry) -> list[Incompatibility]:
    """Why the records of a replica cannot be read."""
    if not ranks:
        why = (
            f"{place} does not say how its records are ordered. It was written before that "
            "was kept, or imported: an engine with its flags says it at its next start"
        )
        return [Incompatibility("geometry", "not described", "described", why)]
    first = ranks[0]
    for other in ranks[1:]:
        if (other.ranks, other.groups) != (first.ranks, first.groups):
            why = f"ranks {first.rank} and {other.rank} of {place} differ in it"
            return [Incompatibility("groups", "not the same on every rank", "the same", why)]
    return obstacles(first, now)


def _field_obstacles(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[Incompatibility]:
    """Fields of the manifest that no translation can bridge."""
    found = []
    there, here = stored.get("parallel", {}), now.get("parallel", {})
    for name in sorted({*there, *here} - {"tensor"}):
        if there.get(name) != here.get(name):
            why = "only tensor parallel ranks are translated"
            found.append(Incompatibility(f"parallel.{name}", there.get(name), here.get(name), why))
    theirs, ours = stored.get("geometry", {}), now.get("geometry", {})
    name = "hash_block_size"
    if theirs.get(name) != ours.get(name):
        why = "keys are hashes of other stretches of the prompt"
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
    """How two geometries differ, where that alone is reason enough."""
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
