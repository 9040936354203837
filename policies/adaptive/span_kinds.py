"""The kinds of spans that the adaptive policy distinguishes, and their labels from hints.

Separate from the policy, because these functions use none of its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies import hints as names
from policies.adaptive.reuse_table import Kind, ReuseTable, age_bin
from policies.adaptive.span_tree import Span, Taken

_LABELS = (
    (names.SESSION_END, "end"),
    (names.ONE_SHOT, "once"),
    (names.PINNED, "pinned"),
    (names.TOOL_CALL, "tool"),
)


def keeps_head(taken: Sequence[Taken]) -> bool:
    """True if a request shares exactly one complete shared span."""
    span, _, _, rest, _ = taken[0]
    if rest or not span.shared:
        return False
    for i in range(1, len(taken)):
        span, _, _, rest, _ = taken[i]
        if span.shared or (rest and not span.fresh):
            return False
    return True


def shared_kind(table: ReuseTable, span: Span) -> int:
    return table.row(("shared", min(6, span.turn.bit_length())))


def label_of(hints: Mapping[str, Any]) -> str:
    """The label of the strongest hint, or empty if no hint has a label."""
    return next((label for name, label in _LABELS if hints.get(name)), "")


def kind_of(span: Span) -> Kind:
    """The kind: label, turn (exact up to 8, then in powers of two), gap in coarse steps, size in
    powers of two."""
    turn = span.turn if span.turn <= 8 else min(12, 8 + (span.turn // 8).bit_length())
    return (span.label, turn, age_bin(span.gap) // 4, span.size.bit_length())
