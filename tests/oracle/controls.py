"""Requests whose clients control the tiers, in a world of the scheduler oracle."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from tests.oracle.features import Feature

CONTROLS: dict[str, tuple[Any, ...]] = {
    "no_store": (True,),
    "no_load": (True,),
    "pin_s": (1, 5, 30),
    "priority": ("low", "normal", "high"),
    "session": ("a", "b", "c"),
}
"""The values that a client may send for each control."""


class Controls(Feature):
    """Half of the requests have controls in their ``kv_transfer_params``."""

    def made(self, request: Request) -> None:
        if self.random.random() < 0.5:
            return
        sent = {
            name: self.random.choice(values)
            for name, values in CONTROLS.items()
            if self.random.random() < 0.3
        }
        request.kv_transfer_params = {"kvtiers": sent}
        self.world.seen["controls"] += len(sent)
