"""Configurations that vLLM itself makes of tiny model folders, and their namespaces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from offload.connector.model.identity import namespace_fields
from offload.namespaces.manifest import Namespace, differing_fields
from tests.offload.connector.kv_cache_configs import full, groups_of, sliding

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
WEIGHT_BYTES = 5 * 1024 * 1024


def make_model(folder: Path, **changes: Any) -> Path:
    """A folder with a configuration and weights of a few MiB, which cannot be loaded."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(range(256)) * (WEIGHT_BYTES // 256))
    os.utime(weights, ns=(10**18, 10**18))
    return folder


def change_later(file: Path, change: Callable[[Path], Any]) -> None:
    """Change a file. Again, until its change time differs: the clock of the file system has gone
    on."""
    last = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == last:
        change(file)


def config_of(model: Path | str, **changes: Any) -> VllmConfig:
    """vLLM's configuration for these engine arguments; ``engine`` is the engine's id."""
    transfer = KVTransferConfig(
        kv_connector="OffloadConnector", kv_role="kv_both", engine_id=changes.pop("engine", "e")
    )
    settings = {"skip_tokenizer_init": True, "max_model_len": 512, "block_size": 32}
    config = EngineArgs(model=str(model), **{**settings, **changes}).create_engine_config()
    config.kv_transfer_config = transfer
    return config


def kv_config(num_blocks: int = 8, block: int = 32) -> KVCacheConfig:
    """One group of full attention and one of sliding windows."""
    groups = groups_of(full(block), sliding(block, 64))
    tensors = [
        KVCacheTensor(size=num_blocks * 2 * 4096, layers=["a", "b"], layer_stride=4096 * num_blocks,
                      block_stride=4096),
        KVCacheTensor(size=num_blocks * 2 * 4096, layers=["c"], layer_stride=4096,
                      block_stride=8192, offset=4096),
    ]  # fmt: skip
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout="LBHNC",
        hash_block_size=block,
    )


def namespace_of(config: VllmConfig, kv: KVCacheConfig | None = None, chunk: int = 1) -> Namespace:
    """The namespace of a worker."""
    return Namespace.of(namespace_fields(config, kv or kv_config(), chunk))


def differing(one: Namespace, other: Namespace) -> list[str]:
    """The fields in which these differ."""
    return [name for name, _, _ in differing_fields(one, other)]
