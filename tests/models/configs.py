"""Configurations of tiny models, one for each kind of KV cache, as Hugging Face ``config.json``."""

from __future__ import annotations

from typing import Any

from demo.tiny_model import BYTE_TOKENS, VOCAB_SIZE

Config = dict[str, Any]

SHARED: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": BYTE_TOKENS,
    "eos_token_id": BYTE_TOKENS + 1,
    "pad_token_id": BYTE_TOKENS + 3,
    "dtype": "bfloat16",
}


def _config(architecture: str, model_type: str, **others: Any) -> Config:
    return SHARED | {"architectures": [architecture], "model_type": model_type} | others


QWEN3 = _config("Qwen3ForCausalLM", "qwen3")

MISTRAL = _config("MistralForCausalLM", "mistral", sliding_window=128)

GEMMA3 = _config(
    "Gemma3ForCausalLM",
    "gemma3_text",
    num_hidden_layers=6,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    sliding_window=128,
    query_pre_attn_scalar=32,
    tie_word_embeddings=True,
)

GPT_OSS = _config(
    "GptOssForCausalLM",
    "gpt_oss",
    layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=128,
    num_local_experts=4,
    num_experts_per_tok=2,
)

GEMMA4 = _config(
    "Gemma4ForCausalLM",
    "gemma4_text",
    num_hidden_layers=6,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    sliding_window=128,
    global_head_dim=64,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=VOCAB_SIZE,
    tie_word_embeddings=True,
)

LLAMA4 = _config(
    "Llama4ForCausalLM",
    "llama4_text",
    layer_types=["chunked_attention"] * 3 + ["full_attention"],
    no_rope_layers=[1, 1, 1, 0],
    attention_chunk_size=128,
    intermediate_size_mlp=256,
    num_local_experts=2,
    num_experts_per_tok=1,
    interleave_moe_layer_step=2,
)

QWEN3_NEXT = _config(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)

QWEN3_NEXT_SMALL = QWEN3_NEXT | {"linear_num_key_heads": 1, "linear_num_value_heads": 1}
"""Uses half of the state, because vLLM's CPU code is slow with drafts; blocks become shorter,
too."""

FALCON_H1 = _config(
    "FalconH1ForCausalLM",
    "falcon_h1",
    num_hidden_layers=2,
    mamba_d_ssm=256,
    mamba_n_heads=8,
    mamba_d_head=32,
    mamba_n_groups=2,
    mamba_d_state=16,
    mamba_chunk_size=128,
    mlp_multipliers=[1.0, 1.0],
    ssm_multipliers=[1.0] * 5,
)

NEMOTRON_H = _config(
    "NemotronHForCausalLM",
    "nemotron_h",
    hybrid_override_pattern="M-M*",
    ssm_state_size=16,
    mamba_num_heads=8,
    mamba_head_dim=32,
    n_groups=2,
    chunk_size=128,
    mamba_ssm_cache_dtype="float32",
)

GRANITE_HYBRID = _config(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    layer_types=["mamba", "mamba", "mamba", "attention"],
    num_local_experts=2,
    num_experts_per_tok=1,
    shared_intermediate_size=128,
    attention_multiplier=0.18,
    mamba_n_heads=8,
    mamba_d_head=32,
    mamba_n_groups=2,
    mamba_d_state=16,
    mamba_chunk_size=128,
)

LFM2 = _config(
    "Lfm2ForCausalLM",
    "lfm2",
    layer_types=["conv", "conv", "conv", "full_attention"],
    conv_dim=128,
    conv_L_cache=3,
    conv_bias=False,
    block_dim=128,
    block_ff_dim=256,
    block_auto_adjust_ff_dim=False,
    norm_eps=1e-5,
    tie_word_embeddings=True,
)

MLA: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}

DEEPSEEK_V2 = _config("DeepseekV2ForCausalLM", "deepseek_v2", **MLA | {"q_lora_rank": None})

DEEPSEEK_V3 = _config(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    **MLA
    | {
        "q_lora_rank": 64,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    },
)

DRAFT_WIDE = _config(
    "LlamaForCausalLM",
    "llama",
    num_hidden_layers=1,
    num_key_value_heads=4,
    head_dim=64,
)
"""A draft for ``make_llama``'s model whose pages are four times as large."""

DRAFT_GEMMA3 = GEMMA3 | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
