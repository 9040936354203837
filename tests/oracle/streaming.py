"""Clients that stream their prompts, under vLLM's real scheduler (``Request.resumable``).

vLLM answers each part of such a prompt. Then the request waits, with its blocks, for the next part:
vLLM drops the last token of the answer, which was sampled but not computed, and continues.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from tests.oracle.forward import VOCABULARY
from tests.oracle.serving import OracleEngine

SESSIONS_MAX = 2
"""Sessions at a time. A waiting session keeps its place among the four that may run."""
SESSION_TOKENS = 140
STOP_TOKENS = 16
EVENTS = ("continued", "queued", "replaced", "closed")
"""The events that a world must see: a session continued with a part that it had waited for, or that
had waited for it; a token other than the dropped one ended a chunk; a session ended."""


class StreamingEngine(OracleEngine):
    """A world in which about half of the requests are sessions. With ``early_stops``, all answers
    often end before their limit: asynchronous scheduling then has a step too many in flight, and
    accepted drafts may come after the end."""

    def __init__(self, *args: Any, early_stops: bool = True) -> None:
        self.seen: Counter[str] = Counter()
        self._early_stops = early_stops
        self._left: dict[str, int] = {}  # tokens that each open session may still use
        super().__init__(*args)

    def _start(self) -> None:
        super()._start()
        self._continue = self.scheduler._update_request_as_session
        self.scheduler._update_request_as_session = self._continue_and_note
        chunks = self.connector.serving.side.layout.groups
        self._chunk_tokens = min(group.chunk_tokens for group in chunks)

    # -- actions of clients -----------------------------------------------------------------------

    def add(self) -> None:
        if len(self._left) < SESSIONS_MAX and self.random.random() < 0.6:
            self._names += 1
            self.open(f"r{self._names}", self._opening())
        else:
            super().add()

    def _opening(self) -> list[int]:
        rng = self.random
        earlier = rng.choice(self._prompts) if self._prompts else []
        start = earlier[: rng.randint(0, 50)] if rng.random() < 0.7 else []
        return [*start, *self._part()]

    def _part(self) -> list[int]:
        # A part must be longer than what vLLM 0.32 takes for computed: otherwise the engine ends.
        first = 1 + self._model.drafts if self._conditions.vllm_errs else 1
        return [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(first, 14))]

    def open(self, name: str, prompt: list[int]) -> Request:
        """Begin a session with the first part of its prompt."""
        self._salts[name] = self.random.choice([None, None, None, "other"])
        self._left[name] = SESSION_TOKENS
        request = self._send_part(name, prompt)
        self._prompts = [*self._prompts[-7:], request._all_token_ids]
        return request

    def send_more(self, name: str) -> None:
        """Send a session the next part of its prompt, or end it if it has become too long."""
        part = self._part()
        if self._left[name] > len(part) + 12:
            self._send_part(name, part)
        else:
            self.close(name)

    def _send_part(self, name: str, tokens: list[int]) -> Request:
        answer = self.random.randint(1, 10)
        self._left[name] -= len(tokens) + answer
        request = self.make_request(name, tokens, answer)
        request.resumable = True
        self.scheduler.add_request(request)
        return request

    def make_request(
        self, name: str, prompt: list[int], answer_tokens: int, **options: Any
    ) -> Request:
        if self._early_stops:
            options["stop_token_ids"] = self.random.sample(range(VOCABULARY), STOP_TOKENS)
        return super().make_request(name, prompt, answer_tokens, **options)

    def close(self, name: str) -> None:
        """End a session after the parts that were sent."""
        del self._left[name]
        self.seen["closed"] += 1
        self.scheduler.add_request(self.make_request(name, [0], 1))

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        self._act()
        super().step()

    def _act(self) -> None:
        for name in list(self._left):
            session = self.scheduler.requests.get(name)
            if session is None or session.is_finished():
                del self._left[name]
                continue
            is_waiting = session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
            chance = self.random.random()
            if chance < 0.02:
                self.close(name)
            elif chance < (0.5 if is_waiting else 0.05):
                self.send_more(name)

    def drain(self, most: int = 1000) -> None:
        for name in list(self._left):
            if name in self.scheduler.requests:
                self.close(name)
        self._left.clear()
        super().drain(most)

    def _continue_and_note(self, session: Request, update: StreamingUpdate) -> None:
        before = list(session._all_token_ids)
        was_waiting = session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        self._continue(session, update)
        after = session._all_token_ids[: len(before)]
        ends_chunk = len(before) % self._chunk_tokens == 0
        self.seen["continued" if was_waiting else "queued"] += 1
        self.seen["replaced"] += ends_chunk and len(after) == len(before) and after != before
