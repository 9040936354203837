"""vLLM 0.32."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Add every flag of ``vllm serve`` to the parser. The import takes seconds."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser as add_flags

    return add_flags(parser)


def make_kv_cache_config(
    config: VllmConfig, specs: Mapping[str, KVCacheSpec], memory: int
) -> KVCacheConfig:
    """Plan the KV cache of one worker with layers of these specs and ``memory`` bytes.

    Raises whatever vLLM raises if they do not fit.
    """
    return get_kv_cache_configs(config, [dict(specs)], [memory])[0]
