"""The start-up checks of a model's geometry: they report what does not fit, and which changes would
help.

``build_layout`` checks a ``LayoutInput`` and returns the ``ModelLayout`` that the rest of the
package works with. One error lists every misfit of every group. A hint is advice, together with the
input that results from following it. It is printed only if the checks pass on that input. If no
single hint helps, pairs are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from offload.errors import AlignmentError, UnsupportedSpecError
from offload.layout.groups import STATE, WINDOW, GroupLayout, ModelLayout

START_WITH = "start vLLM with "
UNALIGNED = "states that are not kept at block boundaries"


@dataclass(frozen=True, slots=True)
class GroupInput:
    """The facts about one KV cache group before the checks.

    ``spec`` is the name of its kind; ``kind`` its restore rule, empty if it has none. ``refused``
    is the reason why it cannot be offloaded, ``skipped`` the reason why it need not be.
    ``unaligned_state`` marks a recurrent state that is not kept at block boundaries.
    """

    group: int
    spec: str
    kind: str
    layers: tuple[str, ...]
    block_tokens: int
    block_bytes: int = 0
    window_tokens: int = 0
    span_tokens: int = 0
    draft: bool = False
    skipped: str = ""
    refused: str = ""
    unaligned_state: bool = False
    per_token_scales: bool = False

    @property
    def name(self) -> str:
        """``group 1 (sliding_window; 3 layers: a, b, c)``: how messages name a group."""
        shown = ", ".join(self.layers[:3]) + (", ..." if len(self.layers) > 3 else "")
        noun = "layer" if len(self.layers) == 1 else "layers"
        return f"group {self.group} ({self.spec}; {len(self.layers)} {noun}: {shown})"


@dataclass(frozen=True, slots=True)
class LayoutInput:
    """Everything that the checks look at.

    ``scheduler_tokens`` is vLLM's scheduler block size (its hits are multiples of it).
    ``chunk_blocks`` is the configured number of blocks per chunk. ``context_parallel`` is the
    product of the decode and prefill context parallel sizes, ``pipeline_parallel`` the number of
    stages of the layers. ``max_tokens`` is the model's context length, 0 if unknown.
    """

    groups: tuple[GroupInput, ...]
    num_blocks: int
    hash_tokens: int
    scheduler_tokens: int
    chunk_blocks: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    max_tokens: int = 0
    prefix_caching: bool = True

    @property
    def taking_part(self) -> tuple[GroupInput, ...]:
        """The groups to offload."""
        return tuple(group for group in self.groups if not group.skipped)


def build_layout(given: LayoutInput) -> ModelLayout:
    """Check the geometry and derive the chunks.

    Raises ``UnsupportedSpecError`` or ``AlignmentError``, listing every offender.
    """
    raise_if_bad(given)
    return unchecked_layout(given)


def unchecked_layout(given: LayoutInput) -> ModelLayout:
    """The layout that follows from the input, even if it cannot work."""
    return ModelLayout(
        num_blocks=given.num_blocks,
        hash_tokens=given.hash_tokens,
        alignment_tokens=alignment_of(given),
        groups=tuple(_group_layout(group, given) for group in given.taking_part),
        skipped=tuple(f"{g.name}: {g.skipped}" for g in given.groups if g.skipped),
    )


def alignment_of(given: LayoutInput) -> int:
    """Granularity of hits in tokens: a multiple of every group's chunks and of vLLM's own
    alignment."""
    chunks = [_chunk_blocks(group, given) * group.block_tokens for group in given.taking_part]
    return math.lcm(given.scheduler_tokens, *chunks)


def _chunk_blocks(group: GroupInput, given: LayoutInput) -> int:
    """Blocks per chunk of one group.

    A state is one block and is never joined with others. If there are states, chunks of other
    groups must end at the ends of the states' blocks: vLLM keeps few states of a prompt, often only
    the last one, so a hit must be able to end at each of them. A chunk of a window group is at most
    as large as the range that vLLM keeps: otherwise its first blocks would be freed before its last
    block is full.
    """
    if group.kind == STATE or group.block_tokens < 1:
        return 1
    states = [other.block_tokens for other in given.taking_part if other.kind == STATE]

    def fits(blocks: int) -> bool:
        tokens = blocks * group.block_tokens
        if any(state % tokens for state in states):
            return False
        if group.span_tokens:
            return group.span_tokens % tokens == 0
        return group.kind != WINDOW or tokens <= group.window_tokens + 1

    return _largest_part(given.chunk_blocks, fits)


def _largest_part(count: int, fits: Callable[[int], bool]) -> int:
    """The largest divisor of ``count`` that fits, at least 1."""
    return next((n for n in range(count, 0, -1) if count % n == 0 and fits(n)), 1)


def _group_layout(group: GroupInput, given: LayoutInput) -> GroupLayout:
    return GroupLayout(
        group=group.group,
        kind=group.kind,
        block_tokens=group.block_tokens,
        chunk_blocks=_chunk_blocks(group, given),
        layers=group.layers,
        block_bytes=group.block_bytes,
        window_tokens=group.window_tokens,
        span_tokens=group.span_tokens,
        draft=group.draft and group.kind != STATE,
        spec=group.spec,
    )


@dataclass(frozen=True, slots=True)
class Misfit:
    """One reason why the model cannot be offloaded: a group of an ``unsupported`` kind, or sizes
    that do not fit together.

    ``cause`` is set if this misfit can cause others (see ``Hint.cures``).
    """

    text: str
    unsupported: bool = False
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Hint:
    """Advice for the user, and the input that results from following it.

    ``flags`` are the additions to vLLM's command line. ``changed`` is the input that these checks
    expect vLLM to derive from them; ``kvtiers doctor`` asks vLLM instead. ``cures`` names the
    cause that following the hint removes.
    """

    text: str
    changed: LayoutInput
    flags: tuple[str, ...] = ()
    cures: str = ""


def raise_if_bad(given: LayoutInput) -> None:
    """Raise one error that lists every misfit; ``UnsupportedSpecError`` if any kind is refused."""
    misfits = find_misfits(given)
    if not misfits:
        return
    lines = [f"  {misfit.text}" for misfit in misfits]
    lines += [f"  To fix it: {text}" for text in hint_lines(helping_hints(given))]
    noun = "problem" if len(misfits) == 1 else "problems"
    message = f"kvtiers cannot offload this model, {len(misfits)} {noun}:\n" + "\n".join(lines)
    if any(misfit.unsupported for misfit in misfits):
        raise UnsupportedSpecError(message)
    raise AlignmentError(message)


def find_misfits(given: LayoutInput) -> list[Misfit]:
    """Everything that prevents offloading, in the order of the groups."""
    misfits = [misfit for group in given.taking_part for misfit in _kind_misfits(group)]
    misfits += _parallel_misfits(given)
    if not given.taking_part:
        misfits.append(Misfit("no KV cache group takes part in prefix caching", unsupported=True))
    misfits += _chunk_size_misfits(given)
    for group in given.taking_part:
        misfits += _alignment_misfits(group, given)
    return misfits


def helping_hints(given: LayoutInput) -> list[Hint]:
    """The hints that make all checks pass.

    If no single hint does, a pair that does so together, as one hint; empty if there is none.
    """
    hints = [hint for hint in _single_hints(given) if not find_misfits(hint.changed)]
    if hints:
        return hints
    for first, second in combinations(_single_hints(given), 2):
        for both in _single_hints(first.changed):
            if both.text == second.text and not find_misfits(both.changed):
                text, flags = f"{first.text} and {second.text}", (*first.flags, *second.flags)
                return [Hint(text, both.changed, flags)]
    return []


def hint_lines(hints: Sequence[Hint]) -> list[str]:
    """One line with all hints; empty if there are none."""
    texts = [hint.text for hint in hints]
    if texts and all(text.startswith(START_WITH) for text in texts):
        return [START_WITH + " or ".join(text.removeprefix(START_WITH) for text in texts)]
    return [" or ".join(texts)] if texts else []


def _kind_misfits(group: GroupInput) -> list[Misfit]:
    """Misfits caused by the group's kind alone."""
    if group.refused:
        return [Misfit(f"{group.name}: {group.refused}", unsupported=True)]
    if not group.kind:
        what = "this kind of KV cache is not known here and cannot be offloaded"
        return [Misfit(f"{group.name}: {what}", unsupported=True)]
    if group.unaligned_state:
        what = (
            f"its states are not kept at block boundaries (block size {group.block_tokens}, "
            'mamba_cache_mode is not "align"), so no prefix could be restored'
        )
        return [Misfit(f"{group.name}: {what}", unsupported=True, cause=UNALIGNED)]
    if group.per_token_scales:
        what = (
            "KV quantized with one scale per token and head is not reproducible, not even with "
            "vLLM's own prefix cache"
        )
        return [Misfit(f"{group.name}: {what}", unsupported=True)]
    return []


def _parallel_misfits(given: LayoutInput) -> list[Misfit]:
    misfits = []
    if given.pipeline_parallel > 1:
        what = (
            f"pipeline parallelism of {given.pipeline_parallel} is not supported: its ranks hold "
            "different layers"
        )
        misfits.append(Misfit(what, unsupported=True))
    if given.context_parallel > 1 and len(given.taking_part) > 1:
        names = "; ".join(group.name for group in given.taking_part)
        what = (
            f"context parallelism of {given.context_parallel} with {len(given.taking_part)} KV "
            f"cache groups is not supported, because it shards their tokens differently: {names}"
        )
        misfits.append(Misfit(what, unsupported=True))
    return misfits


def _chunk_size_misfits(given: LayoutInput) -> list[Misfit]:
    """Misfits if the chunk size is impossible, or if the smallest hit is longer than any
    request."""
    if given.chunk_blocks < 1:
        return [Misfit(f'"chunk_blocks" must be at least 1 (got {given.chunk_blocks})')]
    smallest = alignment_of(given)
    if not given.max_tokens or smallest <= given.max_tokens:
        return []
    what = (
        f"the smallest prefix that could be reused is {smallest} tokens (chunk_blocks="
        f"{given.chunk_blocks}, scheduler block size {given.scheduler_tokens}), more than the "
        f"model's context of {given.max_tokens}: there would never be a hit"
    )
    return [Misfit(what)]


def _alignment_misfits(group: GroupInput, given: LayoutInput) -> list[Misfit]:
    """Misfits between this group's block size and the sizes of hash, scheduler and chunk."""
    block, misfits = group.block_tokens, []
    if group.unaligned_state or group.refused or not group.kind:
        return []
    if block < 1 or given.hash_tokens < 1 or given.scheduler_tokens < 1:
        what = (
            f"sizes must be above 0: block {block}, hash block {given.hash_tokens}, scheduler "
            f"block {given.scheduler_tokens}"
        )
        return [Misfit(f"{group.name}: {what}")]
    if block % given.hash_tokens:
        what = f"block size {block} is not a multiple of the hash block size {given.hash_tokens}"
        misfits.append(Misfit(f"{group.name}: {what}"))
    for divisor, name in ((block, "block size"), (given.hash_tokens, "hash block size")):
        if given.scheduler_tokens % divisor:
            what = (
                f"the scheduler block size {given.scheduler_tokens} is not a multiple of the "
                f"{name} {divisor}"
            )
            misfits.append(Misfit(f"{group.name}: {what}"))
    return misfits


def _single_hints(given: LayoutInput) -> list[Hint]:
    """All single changes that could help; the caller checks which of them do."""
    hints = [_aligned_states(given), _finer_hash(given), _smaller_chunk(given)]
    hints += [_no_context_parallel(given), _no_pipeline(given)]
    hints += [_no_token_scales(given, dtype) for dtype in ("auto", "fp8")]
    return [hint for hint in hints if hint is not None]


def _with_flags(flags: str, changed: LayoutInput, more: str = "", cures: str = "") -> Hint:
    return Hint(START_WITH + flags + more, changed, tuple(flags.split()), cures)


def _aligned_states(given: LayoutInput) -> Hint | None:
    """The hint to start vLLM with aligned states: it then keeps states at block boundaries and
    widens all blocks to match."""
    if not any(group.unaligned_state for group in given.taking_part):
        return None
    others = [g.block_tokens for g in given.taking_part if not g.unaligned_state]
    block = math.lcm(*others) if others else given.taking_part[0].block_tokens
    groups = tuple(
        replace(group, unaligned_state=False, block_tokens=block)
        if group.unaligned_state
        else group
        for group in given.groups
    )
    changed = _with_block_sizes(replace(given, groups=groups, prefix_caching=True))
    flags = "" if given.prefix_caching else "--enable-prefix-caching "
    return _with_flags(f"{flags}--mamba-cache-mode align", changed, cures=UNALIGNED)


def _finer_hash(given: LayoutInput) -> Hint | None:
    if all(group.block_tokens % given.hash_tokens == 0 for group in given.taking_part):
        return None
    changed = _with_block_sizes(given)
    return _with_flags(f"--prefix-match-unit {changed.hash_tokens}", changed)


def _with_block_sizes(given: LayoutInput) -> LayoutInput:
    """The input with the hash and scheduler block sizes that vLLM derives by itself: the gcd and
    the lcm of the groups' block sizes."""
    sizes = [group.block_tokens for group in given.taking_part]
    if min(sizes) < 1:
        return given
    every = [group.block_tokens for group in given.groups]
    return replace(given, hash_tokens=math.gcd(*sizes), scheduler_tokens=math.lcm(*every))


def _smaller_chunk(given: LayoutInput) -> Hint | None:
    for blocks in range(min(given.chunk_blocks - 1, 64), 0, -1):
        changed = replace(given, chunk_blocks=blocks)
        if not _chunk_size_misfits(changed):
            return Hint(f'set "chunk_blocks" to {blocks}', changed)
    return None


def _no_context_parallel(given: LayoutInput) -> Hint | None:
    if given.context_parallel <= 1:
        return None
    flags = "--decode-context-parallel-size 1 --prefill-context-parallel-size 1"
    return _with_flags(flags, replace(given, context_parallel=1))


def _no_pipeline(given: LayoutInput) -> Hint | None:
    if given.pipeline_parallel <= 1:
        return None
    changed = replace(given, pipeline_parallel=1)
    return _with_flags("--pipeline-parallel-size 1", changed, " (and more tensor parallelism)")


def _no_token_scales(given: LayoutInput, dtype: str) -> Hint | None:
    if not any(group.per_token_scales for group in given.taking_part):
        return None
    groups = tuple(replace(group, per_token_scales=False) for group in given.groups)
    return _with_flags(f"--kv-cache-dtype {dtype}", replace(given, groups=groups))
