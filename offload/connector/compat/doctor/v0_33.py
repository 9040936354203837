"""vLLM 0.33: KV cache planning is in a separate module and creates groups first."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.kv_cache_planning import (
    get_global_kv_cache_groups,
    get_kv_cache_configs,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """See ``v0_32``."""
    from vllm.entrypoints.common.cli_args import make_arg_parser as add_flags

    return add_flags(parser)


def make_kv_cache_config(
    config: VllmConfig, specs: Mapping[str, KVCacheSpec], memory: int
) -> KVCacheConfig:
    """See ``v0_32``."""
    layers = [dict(specs)]
    groups = get_global_kv_cache_groups(config, layers)
    config.adjust_dcp_kv_cache_interleave_size(groups)
    return get_kv_cache_configs(config, layers, [memory], groups)[0]
