"""The geometry of a model's KV caches as plain numbers: what each group needs to resume at a token.

This module does not know vLLM or torch. ``offload.layout.checks.build_layout`` makes a
``ModelLayout`` from the findings of ``offload.connector.model.layout`` or the in-process API.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL = "full"
WINDOW = "window"
STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group that is offloaded.

    ``group`` is vLLM's group id. ``kind`` is the restore rule; ``spec`` is vLLM's name of the kind,
    for messages. ``block_tokens`` is the number of tokens that one block covers (all context
    parallel ranks together). ``block_bytes`` is the sum of the layers' pages without padding on
    this rank; 0 if only the token geometry is known.

    To resume at token ``b`` a group needs its blocks from ``tail_start(b)`` to ``b``:

    * full: all of them;
    * window: the last ``window_tokens`` tokens, or, for chunked local attention, those from
      the last multiple of ``span_tokens``;
    * state: the block that ends at ``b``.

    The KV of a draft model at one position depends on the next token. So a chunk of a draft group
    counts only if the chunk after it is also present.
    """

    group: int
    kind: str
    block_tokens: int
    chunk_blocks: int
    layers: tuple[str, ...]
    block_bytes: int = 0
    window_tokens: int = 0
    span_tokens: int = 0
    draft: bool = False
    spec: str = ""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one chunk; chunk ``i`` ends at token ``(i + 1) * chunk_tokens``."""
        return self.chunk_blocks * self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk on this rank."""
        return self.chunk_blocks * self.block_bytes

    def tail_start(self, boundary_tokens: int) -> int:
        """First token whose KV is needed to resume at ``boundary_tokens``."""
        if self.kind == FULL:
            return 0
        if self.span_tokens:
            return boundary_tokens // self.span_tokens * self.span_tokens
        return max(0, boundary_tokens - max(1, self.window_tokens))


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All groups of a model. ``num_blocks`` is vLLM's block count, ``hash_tokens`` the tokens of
    one block hash, ``alignment_tokens`` the granularity of hits. ``skipped`` names the groups
    that take no part in prefix caching, with the reason."""

    num_blocks: int
    hash_tokens: int
    alignment_tokens: int
    groups: tuple[GroupLayout, ...]
    skipped: tuple[str, ...] = ()

    @property
    def restores_whole_prompts(self) -> bool:
        """True if a prompt that ends on a boundary can be restored to its last token.

        vLLM then computes only that token, over the restored block. For this a window would need
        one token more than it keeps, a state would have to end one token earlier, and a draft
        group's last chunk needs another chunk after it as proof.
        """
        return not self.skipped and all(g.kind == FULL and not g.draft for g in self.groups)

    @property
    def token_bytes(self) -> float:
        """Bytes of one token in the groups that keep every token."""
        return sum(g.block_bytes / g.block_tokens for g in self.groups if g.kind == FULL)


def recorded_group(layout: ModelLayout) -> GroupLayout:
    """The group whose chunks represent a prompt in a trace: one that keeps every token, if there is
    one."""
    return next((group for group in layout.groups if group.kind == FULL), layout.groups[0])
