"""A tiny Llama with random weights and a byte-level tokenizer, written in Hugging Face format.

It has everything that vLLM needs (config, safetensors, tokenizer, chat template) and a few MiB.
Making it takes about a second and no download, and the same seed gives the same bytes.

The weights have unit gain (standard deviation fan_in^-0.5), the query and key projections twice
that, the embeddings 0.5. With ordinary random weights the output hardly depends on the prefix. With
these, attention is peaked, so a wrong cached block changes the log-probabilities and often the
tokens.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Weights = dict[str, npt.NDArray[np.float32]]

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|role|>", "<|pad|>")
BYTE_TOKENS = 256
VOCAB_SIZE = 320
"""256 bytes, the special tokens, and unused rows up to a multiple of 64 (vLLM's padding)."""

CHAT_TEMPLATE = (
    "<|begin|>{% for m in messages %}<|role|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of the model. A vLLM block of n tokens takes ``2 * n * kv_heads * head_dim`` numbers
    per layer."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256
    max_positions: int = 8192
    dtype: str = "bfloat16"


def make_llama(folder: Path, seed: int = 0, shape: LlamaShape | None = None) -> Path:
    """Write the model into ``folder`` unless it already exists, and return ``folder``.

    The config is written last, so that a folder with a config is complete.
    """
    shape = shape or LlamaShape()
    config = folder / "config.json"
    if config.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, shape.max_positions)
    save_bfloat16(_weights(shape, seed), folder / "model.safetensors")
    config.write_text(json.dumps(_config(shape), indent=2) + "\n")
    return folder


def save_bfloat16(weights: Weights, path: Path) -> None:
    """Write a safetensors file of bfloat16 matrices, rounded to nearest even.

    Layout (huggingface/safetensors, "Format"): u64 little-endian header length, JSON header with
    dtype, shape and ``[begin, end)`` of each matrix, then the bytes. Implemented here because the
    library's numpy functions would need bfloat16, which numpy does not have.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    begin = 0
    for name, matrix in weights.items():
        bits = np.ascontiguousarray(matrix).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        parts.append(rounded.astype("<u2").tobytes())
        end = begin + len(parts[-1])
        header[name] = {"dtype": "BF16", "shape": matrix.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def byte_ids(text: str) -> list[int]:
    """The token ids of ``text``: one per UTF-8 byte, without chat template and special tokens."""
    order = {char: index for index, char in enumerate(sorted(_byte_alphabet().values()))}
    alphabet = _byte_alphabet()
    return [order[alphabet[byte]] for byte in text.encode()]


def write_tokenizer(folder: Path, max_positions: int) -> None:
    """Write a byte-level tokenizer (one token per byte) with a chat template into ``folder``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(_byte_alphabet().values())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    begin, end, _, pad = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "pad_token": pad,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def mute_unprintable(head: npt.NDArray[np.float32]) -> None:
    """Zero the rows of an output matrix ``[vocab, hidden]`` that are not for printable characters,
    so that greedy text is readable and no end token stops it. Modifies ``head``."""
    printable = byte_ids("".join(chr(code) for code in range(32, 127)))
    mask = np.ones(head.shape[0], dtype=bool)
    mask[printable] = False
    head[mask] = 0.0


def _byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE uses for each byte (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in kept}
    moved = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + index) for index, byte in enumerate(moved)})
    return table


def _weights(shape: LlamaShape, seed: int) -> Weights:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        std = gain / math.sqrt(columns)
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    embeddings = rng.standard_normal((VOCAB_SIZE, shape.hidden), dtype=np.float32)
    weights: Weights = {"model.embed_tokens.weight": embeddings * np.float32(0.5)}
    ones = np.ones(shape.hidden, dtype=np.float32)
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        weights[f"{name}.self_attn.q_proj.weight"] = matrix(queries, shape.hidden, gain=2.0)
        weights[f"{name}.self_attn.k_proj.weight"] = matrix(keys, shape.hidden, gain=2.0)
        weights[f"{name}.self_attn.v_proj.weight"] = matrix(keys, shape.hidden)
        weights[f"{name}.self_attn.o_proj.weight"] = matrix(shape.hidden, queries)
        weights[f"{name}.mlp.gate_proj.weight"] = matrix(shape.intermediate, shape.hidden)
        weights[f"{name}.mlp.up_proj.weight"] = matrix(shape.intermediate, shape.hidden)
        weights[f"{name}.mlp.down_proj.weight"] = matrix(shape.hidden, shape.intermediate)
        weights[f"{name}.input_layernorm.weight"] = ones.copy()
        weights[f"{name}.post_attention_layernorm.weight"] = ones.copy()
    weights["model.norm.weight"] = ones
    weights["lm_head.weight"] = matrix(VOCAB_SIZE, shape.hidden)
    mute_unprintable(weights["lm_head.weight"])
    return weights


def _config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BYTE_TOKENS,
        "eos_token_id": BYTE_TOKENS + 1,
        "pad_token_id": BYTE_TOKENS + 3,
        "dtype": shape.dtype,
    }
