"""Loads of other connectors that vLLM's ``MultiConnector`` runs beside this one.

vLLM counts the tokens of such a load as computed before it has begun, and its blocks are filled at
any time until the request is scheduled. Until then, no store may read them: neither one of this
request nor one of the blocks' earlier owners.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from offload.connector.scheduler.block_tables import BlockTables

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

Tables = Sequence[Sequence[int]]


class OtherLoads:
    """Finds the loads of other connectors. Runs on vLLM's scheduler thread."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._asked: dict[str, int] = {}  # the tokens that vLLM's own cache holds
        self._allocated: list[tuple[Request, int, Tables]] = []  # in this step
        self._open: dict[str, int] = {}

    def asked(self, request_id: str, computed_tokens: int) -> None:
        """Record that vLLM looks up a request of which its own cache holds ``computed_tokens``."""
        self._asked[request_id] = computed_tokens

    def allocated(self, request: Request, tables: Tables, our_tokens: int) -> None:
        """Record that vLLM has accepted ``our_tokens`` of the lookup, and allocated blocks."""
        start = self._asked.pop(request.request_id, None)
        if start is not None and our_tokens <= 0:
            self._allocated.append((request, start, tables))

    def take(self, output: SchedulerOutput) -> Iterable[int]:
        """The blocks that other connectors may fill from this step on."""
        scheduled = output.num_scheduled_tokens
        found: list[Iterable[int]] = []
        for request, start, tables in self._allocated:
            if request.request_id not in scheduled:
                self._open[request.request_id] = start
            elif not output.has_sync_kv_loads:  # our loads are never synchronous
                continue
            if request.num_computed_tokens > start:
                found.append(self._tables.beyond(tables, start))
        self._allocated.clear()
        if self._open:
            self._open = {name: at for name, at in self._open.items() if name not in scheduled}
        return chain.from_iterable(found)

    def is_open(self, request_id: str) -> bool:
        """True if a request waits for a load of another connector."""
        return request_id in self._open

    def end(self, request_id: str) -> int:
        """Forget a request that has ended. Returns the token up to which its blocks are filled."""
        self._asked.pop(request_id, None)
        return self._open.pop(request_id, sys.maxsize)
