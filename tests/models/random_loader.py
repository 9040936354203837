"""The load format ``unit_gain``: vLLM builds the model, we fill its weights at random.

A model folder then needs only a config and a tokenizer, whatever names its checkpoint would use.
The numbers depend on the parameter's name and the rank alone, so every start gives the same model.
Import registers the format; a worker needs it too, so the worker extension imports this.

Gains as in ``demo.tiny_model``: matrices fan_in^-0.5, queries and keys twice that, embeddings 0.5,
decays of recurrent states slow, so that a wrong cached block or state shows in the output.
"""

from __future__ import annotations

import math
import zlib

import torch
from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "unit_gain"
STATE_DECAY = 0.01
"""Decay rate of recurrent states per unit of time step."""


@register_model_loader(LOAD_FORMAT)
class UnitGainLoader(BaseModelLoader):
    """Fills all parameters in place instead of reading a checkpoint."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: there is nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Modifies every parameter of ``model``."""
        rank = get_tensor_model_parallel_rank()
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                shared = isinstance(module, ReplicatedLinear) or parameter.dim() == 1
                seed = zlib.crc32(f"{prefix}.{name}/{0 if shared else rank}".encode())
                with torch.no_grad():
                    _fill(module, name, parameter, torch.Generator().manual_seed(seed))


def _fill(
    module: torch.nn.Module, name: str, parameter: torch.Tensor, random: torch.Generator
) -> None:
    if not parameter.is_floating_point() or name.endswith("_scale"):
        return
    if name in ("A", "A_log"):  # Mamba-2 keeps -exp(A_log), GDN keeps A_log
        parameter.fill_(-STATE_DECAY if name == "A" else math.log(STATE_DECAY))
    elif "norm" in type(module).__name__.lower() and parameter.dim() == 1:
        parameter.fill_(0.0 if isinstance(module, GemmaRMSNorm) else 1.0)
    elif name == "dt_bias":
        parameter.fill_(-1.0)
    elif name == "sinks":
        parameter.fill_(0.5)
    elif parameter.dim() == 1:
        parameter.fill_(0.0 if "bias" in name else 1.0)
    else:
        std = _gain(module, parameter)
        values = torch.randn(parameter.shape, generator=random, dtype=torch.float32) * std
        if isinstance(module, QKVParallelLinear):
            sharper = (module.num_heads + module.num_kv_heads) * module.head_size
            values[:sharper] *= 2.0  # queries and keys lie in front of the values
        parameter.copy_(values)


def _gain(module: torch.nn.Module, parameter: torch.Tensor) -> float:
    is_head = isinstance(module, ParallelLMHead)
    if isinstance(module, VocabParallelEmbedding) and not is_head:
        return 0.5
    return parameter.shape[-1] ** -0.5
