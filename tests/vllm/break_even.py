"""Measures the time to first token over a disk slower than computing, in turns with the same engine
without offloading: ``python -m tests.vllm.break_even [rounds]``. Prints medians and their ratio.

Both engines answer the same prompts in turns in one run; every prompt is on the slow disk, and is
in neither engine's own cache.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from demo.tiny_model import make_llama
from tests.vllm import faults, sick_disk
from tests.vllm.engine import Engine, close_nursery
from tests.vllm.probes import totals
from tests.vllm.protocol import Prompt
from tests.vllm.restored import HASH, config, prompts, settle

PROMPTS = 6


def seconds_to_first_token(engine: Engine, prompt: Prompt) -> float:
    engine.reset_prefix_cache()
    began = time.perf_counter()
    engine.generate_one(prompt, max_tokens=1)
    return time.perf_counter() - began


def measure(folder: Path, rounds: int) -> None:
    model = make_llama(folder / "llama")
    asked = prompts(PROMPTS, tokens=1800)
    limits = {"max_model_len": 2048} | HASH
    offload = config(folder / "kv", cpu="1MiB")
    with (
        Engine(model, log=folder / "plain.log", **limits) as plain,
        Engine(model, log=folder / "disk.log", connector=offload, **limits) as disk,
    ):
        for prompt in asked:
            disk.generate_one(prompt, max_tokens=1)
        settle(disk)
        disk.call(faults.on_workers, sick_disk.infect, "crawls")
        without, slow = [], []
        for turn in range(rounds):
            prompt = asked[turn % PROMPTS]
            without.append(seconds_to_first_token(plain, prompt))
            slow.append(seconds_to_first_token(disk, prompt))
            print(f"{turn:3}  without {without[-1]:.3f} s, slow disk {slow[-1]:.3f} s")
        found = disk.call(totals)
    for name, first in (("all", 0), ("after the first ten", 10)):
        ratio = statistics.median(slow[first:]) / statistics.median(without[first:])
        print(f"{name}: {ratio:.3f} times the time to first token without offloading (medians)")
    print(f"loads {found['loads']}, tokens from disk {found['loaded_tokens:lmdb']}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        try:
            measure(Path(name), int(sys.argv[1]) if len(sys.argv) > 1 else 60)
        finally:
            close_nursery()
