"""Serves a model with random weights: first with only vLLM's own prefix cache, then with the
connector and a GPU cache that holds a part of the prompts.

Before the prompts are sent to the connector's engine again, vLLM's own cache is emptied, so that
they come from the CPU tier. ``"verify": "device"`` compares every loaded chunk with the computed
one, on the device. In a second run the probe flips a bit in each load, which the comparison must
detect. Tokens are compared too, but differences are only counted: with random weights the two
highest logits are close together, and a different batch may swap them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from site_path import use_site

use_site()

from common import result  # noqa: E402  # after the path

from bench.serve_engine import PINNED_S, wait_until_pinned  # noqa: E402  # after the path
from tests.vllm import copy_faults  # noqa: E402  # after the path

MODELS = Path(__file__).resolve().parents[1] / "models"
CONNECTOR = {
    "kv_connector": "OffloadConnector",
    "kv_connector_module_path": "offload.connector",
    "kv_role": "kv_both",
}
OUTPUT_TOKENS = 16
CAPTURED = [1, 2, 4, 8, 16, 32, 64]
"""Batch sizes for which CUDA graphs are captured: fewer than by default, to save time."""
GRAPHS: dict[str, Any] = {
    "mode": 0,  # nothing is compiled
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": CAPTURED,
}
COMPILED: dict[str, Any] = {"cudagraph_capture_sizes": CAPTURED}
LOADED_ENOUGH = 0.5
"""Minimum share of the prompts' distinct tokens that must be loaded. Not all are, because a prompt
that shares a prefix with another one in flight finds it in vLLM's own cache."""
SETTLE_S = 60.0
SETTLED = ("stored_chunks", "store_bytes", "loads", "load_failures", "verified_chunks")
"""Counters that stop changing when all transfers have ended."""


Prompts = list[dict[str, list[int]]]
Answers = list[list[int]]


def prompts(count: int, length: int, vocabulary: int) -> Prompts:
    """Make prompts in groups of four that share three quarters of their tokens."""
    found = []
    for number in range(count):
        family = number // 4
        shared = [(family * 7919 + at * 31) % (vocabulary - 10) for at in range(length * 3 // 4)]
        own = [(number * 104729 + at * 17) % (vocabulary - 10) for at in range(length // 4)]
        found.append({"prompt_token_ids": shared + own})
    return found


def model_folder(options: argparse.Namespace) -> Path:
    """One of the models of the box, or a folder elsewhere."""
    folder = MODELS / options.model
    return folder if (folder / "config.json").exists() else Path(options.model)


def engine(options: argparse.Namespace, **others: Any) -> Any:
    from vllm import LLM

    if options.cpu:
        device: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20}
    else:  # FlashAttention 3 is packed, but was not tested with another torch
        device = {"gpu_memory_utilization": 0.6, "attention_backend": "TRITON_ATTN"}
    if not options.eager:
        device["compilation_config"] = GRAPHS if options.graphs else COMPILED
    return LLM(
        model=str(model_folder(options)),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=options.eager,
        block_size=options.block_size,
        max_model_len=options.tokens + 4 * OUTPUT_TOKENS,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **device,
        **others,
    )


def generate(llm: Any, asked: Prompts) -> tuple[Answers, float]:
    """The tokens of each answer, and the total time in seconds."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    began = time.perf_counter()
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


def counters(llm: Any) -> dict[str, float]:
    """kvtiers' metrics and vLLM's preemptions, summed over labels."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:kvtiers_") or "preempt" in metric.name:
            name = metric.name.removeprefix("vllm:kvtiers_")
            found[name] = found.get(name, 0) + getattr(metric, "value", 0)
    return found


def empty_cache(llm: Any) -> None:
    """Wait for all stores, and empty vLLM's own prefix cache. A tiny prompt makes the engine run
    steps, in which it also publishes its counters."""
    end = time.monotonic() + SETTLE_S
    before: list[float | None] = []
    while True:
        found = counters(llm)
        now = [found.get(name) for name in SETTLED]
        if now == before and llm.reset_prefix_cache():
            return
        if time.monotonic() > end:
            raise TimeoutError(f"not settled, or the cache cannot be emptied: {before}, {now}")
        before = now
        generate(llm, [{"prompt_token_ids": [1, 2, 3]}])
        time.sleep(1.1)  # counters are published about once a second


def reference(options: argparse.Namespace, asked: Prompts, found: dict[str, Any]) -> Answers:
    """The answers of vLLM alone."""
    llm = engine(options)
    answers, found["reference, cold s"] = generate(llm, asked)
    _, found["reference, warm s"] = generate(llm, asked)
    result(found)
    close(llm)
    return answers


def connected(
    options: argparse.Namespace, asked: Prompts, right: Answers, found: dict[str, Any]
) -> list[str]:
    """The answers with the connector. Returns the problems."""
    extra = {"cpu": {"capacity": options.capacity}, "tiers": [], "verify": "device"}
    blocks = options.cache_tokens // options.block_size
    transfer = CONNECTOR | {"kv_connector_extra_config": extra}
    llm = engine(options, kv_transfer_config=transfer, num_gpu_blocks_override=blocks)
    # Otherwise chunks would be evicted while only a few slots are pinned.
    began = time.monotonic()
    if not all(llm.collective_rpc(wait_until_pinned)):
        return [f"the CPU tier was not pinned after {PINNED_S:.0f} s"]
    found["pinned after s"] = round(time.monotonic() - began, 1)
    for name in ("cold", "warm"):
        answers, found[f"connector, {name} s"] = generate(llm, asked)
        found[f"answers equal, {name}"] = sum(map(list.__eq__, right, answers))
        empty_cache(llm)
        found[f"counters, {name}"] = counters(llm)
        result(found)
    llm.collective_rpc(copy_faults.plant, args=(copy_faults.wrong_bit, None))
    answers, _ = generate(llm, asked[:4])
    found["answers equal, wrong bits"] = sum(map(list.__eq__, right, answers))
    llm.collective_rpc(copy_faults.heal)
    empty_cache(llm)
    found["counters, wrong bits"] = counters(llm)
    result(found)
    close(llm)
    return wrong(found)


def wrong(found: dict[str, Any]) -> list[str]:
    """Messages about counters with unexpected values."""
    warm, planted = found["counters, warm"], found["counters, wrong bits"]
    loaded = warm.get("loaded_tokens", 0) - found["counters, cold"].get("loaded_tokens", 0)
    enough = LOADED_ENOUGH * found["distinct tokens"]
    checks = {
        f"{loaded:,.0f} tokens were loaded, fewer than {enough:,.0f}": loaded < enough,
        "nothing was verified": not warm.get("verified_chunks"),
        "loads were not verified": bool(warm.get("unverified_chunks")),
        "loaded bytes differ from what was computed": bool(warm.get("differing_chunks")),
        "loads failed": bool(warm.get("load_failures")),
        "hooks failed": bool(warm.get("hook_faults")),
        "no request was preempted": not warm.get("vllm:num_preemptions"),
        "wrong bits were not detected": not planted.get("differing_chunks"),
    }
    return [text for text, is_wrong in checks.items() if is_wrong]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="use CUDA graphs, compile nothing")
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--cache-tokens", type=int, default=32_768, help="size of the small cache")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--capacity", default="16GiB")
    options = parser.parse_args()
    # Faults are planted by functions that are sent to the engine's process.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    vocabulary = json.loads((model_folder(options) / "config.json").read_text())["vocab_size"]
    asked = prompts(options.requests, options.tokens, vocabulary)
    distinct = options.tokens * (options.requests + 3 * -(-options.requests // 4)) // 4
    found: dict[str, Any] = {"requests": options.requests, "prompt tokens": options.tokens}
    found["distinct tokens"] = distinct
    complaints = connected(options, asked, reference(options, asked, found), found)
    print("\n".join(complaints) or "everything as expected")
    return int(bool(complaints))


def close(llm: Any) -> None:
    """End the engine and release its memory."""
    import gc

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


if __name__ == "__main__":
    sys.exit(main())
