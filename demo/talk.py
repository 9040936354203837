"""Sends the demo's conversation to plain vLLM, as the reference, and to servers with offloading."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from demo.conversation import ANSWER_TOKENS, QUESTIONS, SYSTEM
from demo.server import Answer, VllmServer
from demo.sources import Compared, Sources, load_failures, read_sources

FLAGS = (
    "--enforce-eager",
    "--max-model-len=4096",
    "--max-num-batched-tokens=4096",
    "--block-size=32",
    "--kv-cache-memory-bytes=67108864",
    "--enable-prompt-tokens-details",
)
PATIENT = {
    "load_timeout_s": 300,
    "tier_timeout_s": 300,
    "fence_timeout_s": 60,
    "lookup_timeout_s": 10,
    "break_even": False,
}
"""With these settings, no load or store is abandoned because a busy machine is late, and no load is
skipped because this small model computes faster than any tier loads."""
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one request with offloading. ``ttft_computed_s`` is the time of plain vLLM with
    an empty cache. ``tokens_equal`` is None if the answers cannot be compared; see `compare`."""

    phase: str
    turn: int
    prompt_tokens: int
    sources: Sources
    ttft_s: float
    ttft_computed_s: float
    tokens_equal: bool | None


@dataclass(frozen=True, slots=True)
class Reference:
    """The answers of plain vLLM to each turn: during the conversation, with a warm prefix cache,
    and with an empty prefix cache."""

    requests: list[Messages]
    talk: list[Answer]
    warm: list[Answer]
    cold: list[Answer]


def run_reference(model: Path, log: Path) -> Reference:
    """Answer the conversation with plain vLLM. Its answers become part of all later requests."""
    requests: list[Messages] = []
    messages: Messages = [{"role": "system", "content": SYSTEM}]
    talk: list[Answer] = []
    with VllmServer(model, log=log, flags=FLAGS) as server:
        warm_up(server, [[{"role": "user", "content": question}] for question in QUESTIONS])
        for question in QUESTIONS:
            messages = [*messages, {"role": "user", "content": question}]
            requests.append(messages)
            talk.append(server.chat(messages, ANSWER_TOKENS))
            messages = [*messages, {"role": "assistant", "content": talk[-1].text}]
        warm = [server.chat(request, ANSWER_TOKENS) for request in requests]
        cold = []
        for request in requests:
            server.reset_prefix_cache()
            cold.append(server.chat(request, ANSWER_TOKENS))
    return Reference(requests, talk, warm, cold)


def compare(answer: Answer, wanted: Answer, has_failed: bool) -> bool | None:
    """Return True if the tokens are those of plain vLLM, False if not.

    Returns None if the numbers of cached prompt tokens differ between the answers, or if a load
    failed: the rest of the prompt was then computed in pieces of other sizes, for which the kernels
    may produce different lowest bits.
    """
    if has_failed or answer.cached_tokens != wanted.cached_tokens:
        return None
    return answer.tokens == wanted.tokens


CAPTION = (
    "TTFT: time to the first token, as served, and with the whole prompt computed. "
    "A fresh engine answers its first requests slowly because it "
    "prepares kernels for each input size. So every engine was warmed up with other texts of the "
    "same sizes; if the first row is still slow, some preparation was missing. Median: "
    "{restored_ms:.0f} ms where the prompt was restored, {computed_ms:.0f} ms where it was "
    "computed; a model this small computes in almost no time."
)
COLUMNS_MIN = 80
TOKENS_EQUAL = {True: "yes", False: "[red]NO[/red]", None: "other hit"}
"""The text for ``Row.tokens_equal`` in the table."""


def warm_up(server: VllmServer, requests: list[Messages]) -> None:
    """Warm up: send every text reversed, first computed and then cached.

    The first requests of a fresh engine are slow, because it prepares kernels for each new input
    size. Reversed texts have the same sizes and share no block.
    """
    for request in requests:
        mirrored = [{**message, "content": message["content"][::-1]} for message in request]
        server.chat(mirrored, 1)
        server.reset_prefix_cache()
        server.chat(mirrored, 1)
    server.reset_prefix_cache()


def ask_all(
    server: VllmServer,
    phase: str,
    reference: Reference,
    wanted: list[Answer],
    reset: bool,
    lower: str = "lmdb",
) -> list[Row]:
    """Send every request of the reference, each after calling ``reset`` to empty vLLM's own cache.
    ``lower`` is the tier below the CPU tier."""
    rows = []
    for turn, request in enumerate(reference.requests):
        if reset:
            server.reset_prefix_cache()
        before = server.metrics()
        answer = server.chat(request, ANSWER_TOKENS)
        sources = read_sources(server, before, answer.prompt_tokens, lower)
        has_failed = load_failures(server.metrics()) > load_failures(before)
        equal = compare(answer, wanted[turn], has_failed)
        cold_s = reference.cold[turn].ttft_s
        rows.append(
            Row(phase, turn + 1, answer.prompt_tokens, sources, answer.ttft_s, cold_s, equal)
        )
    return rows


def problems_of(rows: list[Row], compared: Compared) -> list[str]:
    """The problems with these answers and restored blocks."""
    problems = [
        f"{row.phase}, turn {row.turn}: other tokens than plain vLLM"
        for row in rows
        if row.tokens_equal is False
    ]
    phases = dict.fromkeys(row.phase for row in rows)
    with_answers = {row.phase for row in rows if row.tokens_equal is not None}
    problems += [
        f"{phase}: no answer could be compared with one of plain vLLM"
        for phase in phases
        if phase not in with_answers
    ]
    if compared.different:
        problems.append(f"{compared.different} restored blocks differ from what was computed")
    if not compared.equal or compared.unknown:
        problems.append(f"restored blocks were not all compared: {compared}")
    return problems


def answers_shown(rows: list[Row]) -> str:
    """The part of the final sentence that is about the tokens of these answers."""
    equal = sum(row.tokens_equal is True for row in rows)
    if equal == len(rows):
        return "every answer has the tokens of vLLM without offloading"
    return (
        f"{equal} of {len(rows)} answers have the tokens of vLLM without offloading (the others "
        "cannot be compared, because their prompts were cached to another length)"
    )


def make_table(rows: list[Row], restored_phases: Container[str], lower: str = "disk tier") -> Table:
    """One row per request, with times in milliseconds; readable in ``COLUMNS_MIN`` columns."""
    restored = [row for row in rows if row.phase in restored_phases]
    restored_ms, computed_ms = (
        1000 * median(times)
        for times in zip(*((row.ttft_s, row.ttft_computed_s) for row in restored), strict=True)
    )
    caption = CAPTION.format(restored_ms=restored_ms, computed_ms=computed_ms)
    table = Table(
        title="Prompt tokens by where they came from",
        caption=caption,
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("phase", no_wrap=True)
    sources = ("prompt", "computed", "GPU\ncache", "CPU\ntier", lower.replace(" ", "\n"))
    for heading in ("turn", *sources, "TTFT\nms", "TTFT ms,\ncomputed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("tokens\nequal")
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous and previous.phase != row.phase:
            table.add_section()
        table.add_row(
            row.phase,
            str(row.turn),
            f"{row.prompt_tokens:,}",
            *(f"{tokens:,}" for tokens in dataclasses.astuple(row.sources)),
            f"{row.ttft_s * 1000:,.0f}",
            f"{row.ttft_computed_s * 1000:,.0f}",
            TOKENS_EQUAL[row.tokens_equal],
        )
    return table
