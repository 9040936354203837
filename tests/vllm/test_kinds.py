"""Every kind of KV cache that vLLM's CPU platform runs, stored and restored on a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.kinds import Expected, Kind, show_stored_and_restored

TP2 = {"tensor_parallel_size": 2}

KINDS = {
    "llama_544": Kind("llama_544"),
    "llama_fp8_e4m3": Kind("llama_fp8_e4m3"),
    "llama_ngram": Kind("llama_ngram"),
    "llama_draft": Kind("llama_draft"),
    "mistral": Kind("mistral"),
    "gemma3": Kind("gemma3"),
    "gemma3_draft": Kind("gemma3_draft"),
    "gpt_oss": Kind("gpt_oss"),
    "gemma4": Kind("gemma4"),
    "llama4": Kind("llama4"),
    "qwen3_next": Kind("qwen3_next"),
    "falcon_h1": Kind("falcon_h1"),
    "nemotron_h": Kind("nemotron_h"),
    "granite_hybrid": Kind("granite_hybrid"),
    "lfm2": Kind("lfm2"),
    "deepseek_v2": Kind("deepseek_v2"),
    "deepseek_v3": Kind("deepseek_v3"),
    "deepseek_v3_ngram": Kind("deepseek_v3_ngram"),
    "deepseek_v3_mtp": Kind("deepseek_v3_mtp"),
    "llama_tp2": Kind("llama", changes=TP2),
    "deepseek_v2_tp2": Kind("deepseek_v2", changes=TP2),
    "qwen3_next_tp2": Kind("qwen3_next", changes=TP2),
}


@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    expected = Expected.record(kind, tmp_path / "model", tmp_path / "plain.log")
    show_stored_and_restored(kind, expected, tmp_path / "model", tmp_path)
