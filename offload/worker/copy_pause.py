"""Keeps every copy away from the KV cache while vLLM sleeps and has unmapped it.

Part of the executor. ``begin`` and ``end`` belong to the model-runner thread, which posts no plan
in between. This thread and the loop share the states of loads and stores, which are safe to share
(`offload.worker.open_loads`, `offload.worker.fences`): whichever thread comes second sees what the
first one did, so no copy begins after ``begin`` has looked.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from offload.worker.fences import Fences
from offload.worker.open_loads import OpenLoads
from tiers.copy.base import TransferError

if TYPE_CHECKING:
    from offload.worker.block_verifier import Verifier

POLL_S = 0.001
ASLEEP = "the KV cache is unmapped (sleep mode)"


class CopyPause:
    """Ends all access to the KV cache, and allows it again."""

    def __init__(self, loads: OpenLoads, fences: Fences, verifier: Verifier | None) -> None:
        self._loads = loads
        self._fences = fences
        self._verifier = verifier
        self.reason = ""
        """The reason why plans must be refused at present; empty if there is none."""

    def begin(self, timeout_s: float) -> None:
        """End all access to the KV cache before returning. Copies in progress complete. Stores and
        loads that have not begun to copy fail. Loads whose end the model-runner thread has not seen
        fail as well, because their blocks lose their content. Idempotent.

        Raises ``TransferError`` if a copy has not ended within ``timeout_s``; the KV cache must
        then stay mapped, and can be used as before.
        """
        self.reason = ASLEEP
        self._loads.fail_all()
        self._fences.fail_unstarted()
        deadline = time.monotonic() + timeout_s
        while self.is_copying and time.monotonic() < deadline:
            self._let_copies_go_on()
        is_unread = self._verifier is None or self._verifier.suspend(deadline - time.monotonic())
        if self.is_copying or not is_unread:
            self.end()
            raise TransferError(f"copies of the KV cache have not ended within {timeout_s:g} s")

    def end(self) -> None:
        """Allow access again: the KV cache is mapped at its old address. Idempotent."""
        self.reason = ""
        if self._verifier is not None:
            self._verifier.resume()

    @property
    def is_copying(self) -> bool:
        """True if a copy may be reading or writing the KV cache."""
        return self._fences.any_reading or self._loads.is_copying

    @staticmethod
    def _let_copies_go_on() -> None:
        time.sleep(POLL_S)
