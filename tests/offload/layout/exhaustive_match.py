"""The specification of ``PrefixMatcher.longest_match`` taken literally: try every boundary, token
by token."""

from offload.layout.groups import ModelLayout


def is_hit(layout: ModelLayout, keys, present, start: int, boundary: int) -> bool:
    """True if every group can resume at ``boundary``, directly from the definition."""
    for group, group_keys in zip(layout.groups, keys, strict=True):
        size = group.chunk_tokens
        needed = {
            token // size for token in range(max(start, group.tail_start(boundary)), boundary)
        }
        if group.draft:
            needed.add(boundary // size)
        if any(i >= len(group_keys) or group_keys[i] not in present for i in needed):
            return False
    return True


def brute_force(layout: ModelLayout, keys, present, start: int, limit: int) -> int:
    step = layout.alignment_tokens
    if len(layout.groups) == 1:
        keys = [keys[0][: limit // layout.groups[0].chunk_tokens]]
    for boundary in range(limit // step * step, start, -step):
        if is_hit(layout, keys, present, start, boundary):
            return boundary
    return start
