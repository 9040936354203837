"""The findings of ``kvtiers doctor`` about a model, and their text. Pure functions of numbers.

``offload.connector.model.probe`` gets the geometry from vLLM; this module compares it with the
configured tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from offload.config.schema import OffloadConfig, slot_counts
from offload.config.tier_capacity import check_capacity
from offload.layout.checks import (
    GroupInput,
    Hint,
    LayoutInput,
    Misfit,
    find_misfits,
    helping_hints,
    hint_lines,
    unchecked_layout,
)
from offload.layout.groups import GroupLayout, ModelLayout
from offload.layout.prefix_match import PrefixMatcher
from offload.sizes import KIB, rounded_size

SLOT_ALIGNMENT = 4 * KIB
"""Slots and records take whole pages of this size (``tiers.slab.slab``)."""


class ModelVerdict(StrEnum):
    """The verdict in one line."""

    FITS = "can be offloaded"
    REFUSED = "cannot be offloaded"
    WRONG_FLAGS = "unknown: the flags or the configuration are wrong"
    UNKNOWN_MODEL = "unknown: there is no such model here"
    VLLM_REFUSES = "unknown: vLLM itself refuses the model with these flags"


EXIT_CODES = {
    ModelVerdict.FITS: 0,
    ModelVerdict.REFUSED: 1,
    ModelVerdict.WRONG_FLAGS: 2,
    ModelVerdict.UNKNOWN_MODEL: 3,
    ModelVerdict.VLLM_REFUSES: 4,
}


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One KV cache group. Bytes are for one rank, without padding; ``padded_block_bytes`` is the
    size that vLLM reserves."""

    group: int
    kind: str
    rule: str
    layers: tuple[str, ...]
    block_tokens: int
    kernel_block_tokens: int
    chunk_tokens: int
    page_bytes: tuple[int, ...]
    padded_page_bytes: tuple[int, ...]
    block_bytes: int
    window_tokens: int
    span_tokens: int
    draft: bool
    skipped: str


@dataclass(frozen=True, slots=True)
class TierReport:
    """The number of tokens of one long prefix that a tier can hold, all ranks together."""

    name: str
    capacity_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """The values that ``kvtiers doctor`` prints.

    ``ok`` is false if anything is refused. ``parameters`` counts those of the model, all ranks
    together.
    """

    model: str
    ranks: int
    groups: tuple[GroupReport, ...]
    hash_tokens: int
    alignment_tokens: int
    token_bytes: float
    tiers: tuple[TierReport, ...]
    refused: tuple[str, ...]
    fixes: tuple[str, ...]
    notes: tuple[str, ...]
    parameters: int = 0
    verdict: ModelVerdict = ModelVerdict.FITS

    @property
    def ok(self) -> bool:
        """True if the model can be offloaded with this configuration."""
        return self.verdict == ModelVerdict.FITS


@dataclass(frozen=True, slots=True)
class Facts:
    """The result of the probe. ``pages[g]`` are the pages of the layers of group ``g``, without
    and with padding."""

    model: str
    ranks: int
    given: LayoutInput
    kernel_tokens: tuple[int, ...]
    pages: tuple[tuple[tuple[int, int], ...], ...]
    asked_block: int | None = None
    notes: tuple[str, ...] = ()
    parameters: int = 0


def refusal(model: str, verdict: ModelVerdict, *reasons: str, fixes: Sequence[str] = ()) -> Report:
    """A report that contains only the refusal of a model or its configuration, with the reasons."""
    return Report(model, 0, (), 0, 0, 0.0, (), reasons, tuple(fixes), (), verdict=verdict)


AskAgain = Callable[[Sequence[str]], LayoutInput | None]
"""Type of a function that runs vLLM on the model with additional flags and returns ``None`` if vLLM
refuses them."""


def examine(
    facts: Facts,
    config: OffloadConfig,
    problems: Sequence[str] = (),
    ask_again: AskAgain | None = None,
) -> Report:
    """Check the geometry and the tiers' sizes.

    ``problems`` are the problems of the configuration. With ``ask_again``, a hint that changes
    vLLM's flags is given only if the checks pass on the geometry that vLLM derives from these
    flags.
    """
    given = replace(facts.given, chunk_blocks=config.chunk_blocks)
    misfits = find_misfits(given)
    hints = [hint for hint in helping_hints(given) if _helps(hint, ask_again)] if misfits else []
    refused = [misfit.text for misfit in _causes(misfits, hints)]
    fixes = hint_lines(hints)
    layout = unchecked_layout(given)
    tiers: tuple[TierReport, ...] = ()
    verdict = ModelVerdict.REFUSED if refused else ModelVerdict.FITS
    if not refused:
        sizes = [_stored(group.chunk_bytes) for group in layout.groups]
        slot_bytes = max(sizes)
        small = check_capacity(config, slot_bytes, facts.ranks, min(sizes))
        refused += [str(problem) for problem in small]
        tiers = _tier_reports(layout, config, facts.ranks, slot_bytes)
    if verdict == ModelVerdict.FITS and (refused or problems):
        verdict = ModelVerdict.WRONG_FLAGS
    chunks = {group.group: group.chunk_tokens for group in layout.groups}
    return Report(
        model=facts.model,
        ranks=facts.ranks,
        groups=tuple(_group_report(g, facts, chunks.get(g.group, 0)) for g in given.groups),
        hash_tokens=given.hash_tokens,
        alignment_tokens=layout.alignment_tokens,
        token_bytes=_span_bytes(layout) / max(1, layout.alignment_tokens),
        tiers=tiers,
        refused=(*problems, *refused),
        fixes=tuple(fixes),
        notes=(*facts.notes, *_block_notes(facts)),
        parameters=facts.parameters,
        verdict=verdict,
    )


def _helps(hint: Hint, ask_again: AskAgain | None) -> bool:
    if ask_again is None or not hint.flags:
        return True
    answer = ask_again(hint.flags)
    chunk_blocks = hint.changed.chunk_blocks
    return answer is not None and not find_misfits(replace(answer, chunk_blocks=chunk_blocks))


def _causes(misfits: Sequence[Misfit], hints: Sequence[Hint]) -> Sequence[Misfit]:
    """Remove misfits that are consequences of others: they disappear when their cause is fixed."""
    cured = {hint.cures for hint in hints if hint.cures}
    causes = [misfit for misfit in misfits if misfit.cause in cured]
    return causes or misfits


def _group_report(group: GroupInput, facts: Facts, chunk_tokens: int) -> GroupReport:
    pages = facts.pages[group.group]
    return GroupReport(
        group=group.group,
        kind=group.spec,
        rule=group.kind,
        layers=group.layers,
        block_tokens=group.block_tokens,
        kernel_block_tokens=facts.kernel_tokens[group.group],
        chunk_tokens=chunk_tokens,
        page_bytes=tuple(sorted({page for page, _ in pages})),
        padded_page_bytes=tuple(sorted({padded for _, padded in pages})),
        block_bytes=group.block_bytes,
        window_tokens=group.window_tokens,
        span_tokens=group.span_tokens,
        draft=group.draft,
        skipped=group.skipped,
    )


def _stored(chunk_bytes: int) -> int:
    return -(-chunk_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def _chunks_per_span(layout: ModelLayout, group: GroupLayout) -> int:
    """Number of chunks of a group that are kept per ``alignment_tokens`` tokens, far from the
    start."""
    matcher = PrefixMatcher(layout)
    count = layout.alignment_tokens // group.chunk_tokens
    first = 64 * count
    return sum(matcher.reachable(group, chunk) for chunk in range(first, first + count))


def _span_bytes(layout: ModelLayout) -> int:
    """Bytes kept per ``alignment_tokens`` tokens on one rank."""
    return sum(_chunks_per_span(layout, group) * group.chunk_bytes for group in layout.groups)


def _tier_reports(
    layout: ModelLayout, config: OffloadConfig, ranks: int, slot_bytes: int
) -> tuple[TierReport, ...]:
    counts = {group.group: _chunks_per_span(layout, group) for group in layout.groups}
    slots = slot_counts(config, slot_bytes, ranks).slots
    cpu_tokens = slots // sum(counts.values()) * layout.alignment_tokens
    stored = ranks * sum(counts[g.group] * _stored(g.chunk_bytes) for g in layout.groups)
    reports = [TierReport("cpu", config.cpu.capacity, cpu_tokens)]
    for tier in config.tiers:
        tokens = tier.capacity // stored * layout.alignment_tokens
        reports.append(TierReport(f"{tier.type} {tier.path}", tier.capacity, tokens))
    return tuple(reports)


def _block_notes(facts: Facts) -> list[str]:
    """Describe where the block size in use differs from the requested one."""
    if facts.asked_block is None:
        return []
    sizes = {group.block_tokens for group in facts.given.groups}
    if sizes == {facts.asked_block}:
        return []
    used = " and ".join(map(str, sorted(sizes)))
    return [f"--block-size {facts.asked_block} was requested; vLLM uses blocks of {used} tokens"]


def to_json(report: Report) -> dict[str, Any]:
    """The report with the verdict, as plain values."""
    return {"ok": report.ok, **asdict(report)}


def to_text(report: Report) -> str:
    """The report as text for people."""
    lines = [f"Model    {report.model}"]
    if report.groups:
        lines += _geometry_lines(report)
    lines += [f"Note     {note}" for note in report.notes]
    lines += [f"Refused  {reason}" for reason in report.refused]
    lines += [f"Fix      {fix}" for fix in report.fixes]
    lines.append(f"Verdict  {report.verdict}")
    return "\n".join(lines)


def _geometry_lines(report: Report) -> list[str]:
    ranks = "" if report.ranks == 1 else f" on each of {report.ranks} ranks"
    lines = [
        f"Hashing  one hash per {report.hash_tokens} tokens; the smallest reusable prefix is "
        f"{report.alignment_tokens} tokens",
        f"Size     {rounded_size(round(report.token_bytes))} per token{ranks}",
        "",
        *_table(report.groups),
        "",
    ]
    for tier in report.tiers:
        size = rounded_size(tier.capacity_bytes)
        lines.append(f"Tier     {tier.name}: {size} holds {tier.tokens:,} tokens")
    return lines


def _table(groups: Sequence[GroupReport]) -> list[str]:
    head = ("group", "kind", "restores", "layers", "block", "kernel", "chunk", "page")
    rows = [head, *(_row(group) for group in groups)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [f"  {line}" for line in lines]


def _row(group: GroupReport) -> tuple[str, ...]:
    padding = "" if group.page_bytes == group.padded_page_bytes else " padded to "
    pages = "/".join(map(rounded_size, group.page_bytes)) + padding
    if padding:
        pages += "/".join(map(rounded_size, group.padded_page_bytes))
    return (
        str(group.group),
        group.kind + (" (draft)" if group.draft else ""),
        "nothing" if group.skipped else _restores(group),
        str(len(group.layers)),
        str(group.block_tokens),
        str(group.kernel_block_tokens),
        str(group.chunk_tokens),
        pages,
    )


def _restores(group: GroupReport) -> str:
    if group.span_tokens:
        return f"last span of {group.span_tokens} tokens"
    names = {"full": "all blocks", "state": "last state"}
    return names.get(group.rule, f"last {group.window_tokens} tokens" if group.rule else "-")
