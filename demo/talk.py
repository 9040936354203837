"""The demo's conversation, asked of plain vLLM for the reference and of servers with offloading."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from demo.conversation import ANSWER_TOKENS, QUESTIONS, SYSTEM
from demo.server import Answer, VllmServer
from demo.sources import Sources, read_sources

FLAGS = (
    "--enforce-eager",
    "--max-model-len=4096",
    "--max-num-batched-tokens=4096",
    "--block-size=32",
    "--kv-cache-memory-bytes=67108864",
)
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Row:
    """One request with offloading. ``ttft_computed_s``: plain vLLM, nothing cached."""

    phase: str
    turn: int
    prompt_tokens: int
    sources: Sources
    ttft_s: float
    ttft_computed_s: float
    tokens_equal: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """The answers of plain vLLM to each turn: in the conversation, with its prefix cache warm, and
    with an empty one."""

    requests: list[Messages]
    talk: list[Answer]
    warm: list[Answer]
    cold: list[Answer]


def run_reference(model: Path, log: Path) -> Reference:
    """Answer the conversation with plain vLLM, which also fixes the text of all requests."""
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


CAPTION = (
    "TTFT: time to the first token. A fresh engine answers its first requests slowly, whatever "
    "they ask, because it prepares kernels for each size of input. So every engine was warmed up "
    "with other texts of the same sizes; a first row that is slow all the same shows the rest."
)


def warm_up(server: VllmServer, requests: list[Messages]) -> None:
    """Ask everything with its text reversed, computed and then cached, before anything is measured.

    The first requests of a fresh engine are slow whatever they ask: kernels are prepared for each
    size of input when it first comes up. Reversed texts have the same sizes and share no block.
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
    """Ask every request of the reference, with ``reset`` after emptying vLLM's own cache; ``lower``
    is the tier below the CPU."""
    rows = []
    for turn, request in enumerate(reference.requests):
        if reset:
            server.reset_prefix_cache()
        before = server.metrics()
        answer = server.chat(request, ANSWER_TOKENS)
        sources = read_sources(server, before, answer.prompt_tokens, lower)
        equal = answer.tokens == wanted[turn].tokens
        cold_s = reference.cold[turn].ttft_s
        rows.append(
            Row(phase, turn + 1, answer.prompt_tokens, sources, answer.ttft_s, cold_s, equal)
        )
    return rows


def make_table(rows: list[Row], lower: str = "disk tier") -> Table:
    """One row for each request; times in milliseconds."""
    table = Table(title="Prompt tokens by where they came from", caption=CAPTION)
    for heading in ("phase", "turn", "prompt", "computed", "GPU cache", "CPU tier", lower):
        table.add_column(heading, justify="left" if heading == "phase" else "right", no_wrap=True)
    table.add_column("TTFT ms", justify="right")
    table.add_column("TTFT ms,\nall computed", justify="right", no_wrap=True)
    table.add_column("tokens\nequal", no_wrap=True)
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous and previous.phase != row.phase:
            table.add_section()
        table.add_row(
            row.phase,
            str(row.turn),
            str(row.prompt_tokens),
            *(str(tokens) for tokens in dataclasses.astuple(row.sources)),
            f"{row.ttft_s * 1000:.0f}",
            f"{row.ttft_computed_s * 1000:.0f}",
            "yes" if row.tokens_equal else "[red]NO[/red]",
        )
    return table
