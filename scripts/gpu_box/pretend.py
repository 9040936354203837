"""Configures engines and builds the box's models without weights, as if there were an H200.

``rehearse.py`` runs this after unpacking the carries. On the CUDA platform vLLM imports more
modules than without a GPU (for example the kernels of FlashAttention), so importing the runner
alone is not a sufficient test.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "probes"))

from site_path import use_site  # noqa: E402  # after the path

use_site()

import torch  # noqa: E402  # after the path
import vllm.platforms  # noqa: E402  # after the path
from serve import COMPILED, CONNECTOR, GRAPHS, MODELS  # noqa: E402  # after the path
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402  # after the path
from vllm.platforms.interface import DeviceCapability  # noqa: E402  # after the path


class Pretended(NonNvmlCudaPlatform):  # type: ignore[misc]  # vLLM is untyped
    """Pretends to be an H200."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H200"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 139 << 30

    @classmethod
    def device_count(cls) -> int:
        return 1


KINDS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": GRAPHS},
    "compiled": {"compilation_config": COMPILED},
}


def configure(model: Path, kind: dict[str, Any]) -> Any:
    """The configuration that the serving probe uses."""
    from vllm.engine.arg_utils import EngineArgs

    extra = {"cpu": {"capacity": "16GiB"}, "tiers": [], "verify": "device"}
    arguments = EngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        block_size=16,
        max_model_len=2112,
        attention_backend="TRITON_ATTN",
        num_gpu_blocks_override=2048,
        kv_transfer_config=CONNECTOR | {"kv_connector_extra_config": extra},
        **kind,
    )
    return arguments.create_engine_config()


def build(config: Any) -> float:
    """Build the model, and return its weights in billions."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:29555", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            model = initialize_model(config)
    return sum(weight.numel() for weight in model.parameters()) / 1e9


def main() -> None:
    vllm.platforms._current_platform = Pretended()
    for model in sorted(MODELS.iterdir()):
        for name, kind in KINDS.items():
            config = configure(model, kind)
            graphs = config.compilation_config.cudagraph_mode.name
            if (graphs == "NONE") is not (name == "eager"):
                sys.exit(f"{model.name}, {name}: CUDA graphs: {graphs}")
            size = build(config)
            text = f"{model.name}, {name}: {size:.1f} billion weights, CUDA graphs: {graphs}"
            print(text, flush=True)


if __name__ == "__main__":
    main()
