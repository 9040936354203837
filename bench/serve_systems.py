"""The systems that ``bench serve`` compares, and the model that all of them serve.

A system consists of a ``--kv-transfer-config`` and the other settings of its engine. If it cannot
run on this machine, its start fails.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.mooncake import Master
from demo.ports import free_port
from demo.tiny_model import VOCAB_SIZE, LlamaShape

BLOCK_TOKENS = 32
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BASELINE = "no offloading"
SPARK_CHUNK_TOKENS = 256
"""SparkCache stores and restores multiples of this; by default at least four times as much."""
MOONCAKE_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """A model of equal attention layers. ``folder`` is ``None`` for models that the benchmark
    makes."""

    shape: LlamaShape
    vocabulary: int = VOCAB_SIZE
    folder: Path | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token."""
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * NUMBER_BYTES[shape.dtype]

    @property
    def flops_per_token(self) -> float:
        """Operations per token: two per weight. Those of attention, which grow with the prompt,
        are left out."""
        shape = self.shape
        attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
        layer = attention + 3 * shape.hidden * shape.intermediate
        return 2.0 * (shape.layers * layer + shape.hidden * self.vocabulary)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of an engine with this model, except for its folder."""
        found: dict[str, Any] = {"dtype": self.shape.dtype}
        if self.folder is not None:
            if not any(self.folder.glob("*.safetensors")):
                found["load_format"] = "dummy"
            if not (self.folder / "tokenizer.json").exists():
                found["skip_tokenizer_init"] = True
        return found


MODELS = {
    "small": Model(
        LlamaShape(
            layers=16,
            hidden=512,
            heads=8,
            kv_heads=2,
            head_dim=64,
            intermediate=1792,
            max_positions=16_384,
            dtype="float32",
        )
    ),
    "tiny": Model(LlamaShape()),
}
"""``small`` has the proportions of Llama 3.1 8B (four query heads per KV head, an MLP of 3.5 times
the width) at an eighth of the width and half the layers. float32, because processors without
AVX-512 multiply bfloat16 eight times slower."""
REAL = ("Llama 3.1 8B", 2 * 8.03e9 / (2 * 32 * 8 * 128 * 2))
"""For comparison: a real model, and its arithmetic operations per byte of KV cache (two per weight
and token; 32 layers, 8 KV heads of 128 numbers in bfloat16, from its ``config.json``)."""


def find_model(name: str) -> Model:
    """One of ``MODELS``, or a folder with a ``config.json`` in Hugging Face format. Weights are
    random if the folder has none.

    Raises ``ValueError`` for any other name, and for models whose KV cache cannot be computed from
    their config.
    """
    if name in MODELS:
        return MODELS[name]
    folder = Path(name).resolve()
    try:
        config = json.loads((folder / "config.json").read_text())
        if kinds := set(config.get("layer_types", ())) - {"full_attention"}:
            raise ValueError(f"layers of {', '.join(sorted(kinds))}")
        heads = config["num_attention_heads"]
        shape = LlamaShape(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            max_positions=config["max_position_embeddings"],
            dtype=config.get("dtype") or config.get("torch_dtype", "bfloat16"),
        )
        NUMBER_BYTES[shape.dtype]
        vocabulary = config["vocab_size"]
    except OSError:
        known = ", ".join(MODELS)
        raise ValueError(
            f"{name!r} is neither a model of this benchmark ({known}) nor a folder with a "
            f"config.json"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / 'config.json'}: bench serve needs a model of equal attention layers in "
            f"{', '.join(NUMBER_BYTES)}; wrong or missing: {error}"
        ) from None
    return Model(shape, vocabulary, folder)


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Sizes of the tiers in bytes. A CPU tier alone has the size ``host``. Above a disk tier it has
    the size ``small``, so that hits must come from the disk. ``folder`` is on that disk."""

    host: int
    small: int
    disk: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Start:
    """The settings of one engine in addition to the common ones. ``stop`` ends what was started
    beside the engine, once it has ended."""

    connector: dict[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)
    stop: Callable[[], None] | None = None


def _plain(_sizes: TierSizes) -> Start:
    return Start()


def kvtiers(extra: dict[str, Any]) -> Start:
    """The connector with these options."""
    return Start(
        {
            "kv_connector": "KvTiersConnector",
            "kv_connector_module_path": "offload.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    )


def _cpu(sizes: TierSizes) -> Start:
    return kvtiers({"cpu": {"capacity": sizes.host, "policy": "lru"}, "tiers": []})


def _cpu_and_disk(sizes: TierSizes) -> Start:
    disk = {"type": "lmdb", "path": str(sizes.folder), "capacity": sizes.disk, "policy": "lru"}
    return kvtiers({"cpu": {"capacity": sizes.small, "policy": "lru"}, "tiers": [disk]})


def _native(extra: dict[str, Any]) -> Start:
    return Start(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    )


def _vllm_cpu(sizes: TierSizes) -> Start:
    return _native({"cpu_bytes_to_use": sizes.host})


def _vllm_tiering(sizes: TierSizes) -> Start:
    tiers = [{"type": "fs", "root_dir": str(sizes.folder)}]
    return _native(
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": sizes.small,
            "secondary_tiers": tiers,
        }
    )


def _lmcache(sizes: TierSizes) -> Start:
    size_gb = sizes.host / (1 << 30)
    env = {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{size_gb:.3f}"}
    return Start({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, env)


def _lmcache_server(sizes: TierSizes) -> Start:
    size_gb = sizes.host / (1 << 30)
    server = (
        f"--l1-size-gb {size_gb:.3f} --eviction-policy LRU --supported-transfer-mode auto "
        f"--http-port {free_port()} "
        "--disable-observability"  # needs a package that LMCache does not require
    )
    extra = {
        "lmcache.mp.port": free_port(),
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.server_args": server,
    }
    return Start(
        {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    )


def _sparkcache(sizes: TierSizes) -> Start:
    extra = {
        "spark_cache_root": str(sizes.folder),
        "spark_cache_max_bytes": sizes.disk,
        # SparkCache has profiles for two model families only. This one stores pages of any layers;
        # the other needs layers that a Llama does not have.
        "spark_cache_model_profile": "deepseek-v4-fp8-hma",
        "spark_cache_min_span_tokens": SPARK_CHUNK_TOKENS,
        "spark_cache_target_checkpoint_sha256": "0" * 64,  # any value identifies the weights
    }
    return Start(
        {
            "kv_connector": "SparkContextCacheConnector",
            "kv_connector_module_path": "sparkcache.spark_context_cache_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    )


def _mooncake_store(sizes: TierSizes) -> Start:
    """vLLM's own connector for a Mooncake store, with a master beside the engine, over TCP."""
    master = Master(sizes.folder / "master.log")
    master.start()
    client = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master.address,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": sizes.host,
        "local_buffer_size": MOONCAKE_BUFFER_BYTES,
    }
    settings = sizes.folder / "mooncake.json"
    settings.write_text(json.dumps(client))
    connector = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    return Start(connector, {"MOONCAKE_CONFIG_PATH": str(settings)}, master.kill)


@dataclass(frozen=True, slots=True)
class System:
    """One system: the name of its rows, how to start it, and the package that it needs."""

    name: str
    start: Callable[[TierSizes], Start]
    package: str = ""

    @property
    def missing(self) -> str:
        """The reason why it cannot be started; empty if it can."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return ""


SYSTEMS = {
    "none": System(BASELINE, _plain),
    "cpu": System("kvtiers, CPU tier", _cpu),
    "disk": System("kvtiers, disk tier", _cpu_and_disk),
    "vllm": System("vLLM OffloadingConnector", _vllm_cpu),
    "vllm-tiering": System("vLLM tiering, fs", _vllm_tiering),
    "lmcache": System("LMCache in the engine", _lmcache, "lmcache"),
    "lmcache-server": System("LMCache server", _lmcache_server, "lmcache"),
    "sparkcache": System("SparkCache", _sparkcache, "sparkcache"),
    "mooncake-store": System("Mooncake Store", _mooncake_store, "mooncake"),
}
OURS = ("cpu", "disk")
