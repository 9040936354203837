"""Runs ``bench serve`` with random weights: what offloading gains and costs, compared with vLLM's
own offloading. The rows of systems that do not start say why.

All engines run at once. If their memory or their files would not fit, the prompts are made shorter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from site_path import use_site

use_site()

from common import result  # noqa: E402  # after the path

from bench.serve import Config, engine_arguments, sizes_for  # noqa: E402  # after the path
from bench.serve_systems import Model, find_model  # noqa: E402  # after the path
from tiers.slab.host_memory import available_bytes  # noqa: E402  # after the path

MODELS = Path(__file__).resolve().parents[1] / "models"
GPU = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.1}
"""FlashAttention 3 is packed, but was not tested with another torch. All engines are on the GPU at
once, so none may require most of its memory to be free; the size of the KV cache is given."""
GIB = 2**30
ENGINE = {"GPU": 5 * GIB, "host": 6 * GIB}
"""Estimates for one engine without weights, KV cache and tiers: activations, libraries."""


def needs(config: Config, model: Model) -> dict[str, int]:
    """The bytes that all engines need together, by medium."""
    sizes, engines = sizes_for(config, model, Path()), len(config.systems)
    weights = int(model.flops_per_token) + 2 * model.vocabulary * model.shape.hidden
    cache = engine_arguments(config, model, Path())["kv_cache_memory_bytes"]
    batch = config.requests * max(config.sizes) * model.kv_bytes_per_token
    batches = config.rounds * (config.misses + len(config.hits)) + 2
    tiers = {
        "cpu": sizes.host,
        "vllm": sizes.host,
        "disk": sizes.small,
        "vllm-tiering": sizes.small,
    }
    files = {"disk": sizes.disk, "vllm-tiering": batches * batch}  # vLLM's are not limited
    return {
        "GPU": engines * (weights + cache + ENGINE["GPU"]),
        "host": engines * ENGINE["host"] + sum(tiers.get(name, 0) for name in config.systems),
        "disk": sum(files.get(name, 0) for name in config.systems),
    }


def there_are() -> dict[str, int]:
    """The free bytes of each medium for which they are known."""
    disk = shutil.disk_usage(tempfile.gettempdir())
    found = {"disk": disk.free - max(2 * GIB, disk.total // 20)}  # disk tiers keep this free
    if (host := available_bytes()) is not None:
        found["host"] = host
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        found["GPU"] = int(done.stdout) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        pass  # there is no GPU, or its free memory is unknown
    return found


def fitting(config: Config, model: Model, free: dict[str, int]) -> Config:
    """The configuration with prompts that are short enough. Exits if none are."""
    while any(needs(config, model)[medium] > size for medium, size in free.items()):
        shorter = max(config.sizes) * 7 // 8
        if shorter < 512:
            sys.exit(f"too small: {in_gib(free)} are free, {in_gib(needs(config, model))} needed")
        config = dataclasses.replace(config, sizes=(shorter,))
    return config


def in_gib(sizes: dict[str, int]) -> dict[str, float]:
    return {f"{medium}, GiB": round(size / GIB, 1) for medium, size in sizes.items()}


def configuration(options: argparse.Namespace, model: Path) -> Config:
    return Config(
        sizes=(options.tokens,),
        hits=tuple(float(hit) for hit in options.hits.split(",")),
        rounds=options.rounds,
        misses=options.misses,
        requests=options.requests,
        in_flight=options.in_flight,
        systems=tuple(options.systems.split(",")),
        model=str(model),
        engine={} if options.cpu else GPU,
    )


def command_of(config: Config) -> list[str]:
    names = ("sizes", "hits", "systems")
    command = [sys.executable, "-m", "bench.serve", "--json", "--model", config.model]
    for name in names:
        command += [f"--{name}", ",".join(map(str, getattr(config, name)))]
    for name in ("rounds", "misses", "requests", "in_flight"):
        command += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    return [*command, "--engine", json.dumps(config.engine)]


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a model of the box, or a folder")
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument("--check", action="store_true", help="only start bench serve")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per prompt")
    parser.add_argument("--systems", default="none,cpu")
    parser.add_argument("--hits", default="1")
    for name, value in (("rounds", 1), ("misses", 1), ("requests", 1), ("in-flight", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args(words)


def main() -> int:
    options = arguments(sys.argv[1:])
    folder = MODELS / options.model
    model = folder if (folder / "config.json").exists() else Path(options.model)
    if options.check:
        config = configuration(options, model)
        return subprocess.run([*command_of(config), "--help"]).returncode
    free = {} if options.cpu else there_are()  # the estimates are for a GPU
    shape = find_model(str(model))
    config = fitting(configuration(options, model), shape, free)
    found: dict[str, Any] = {
        "prompt tokens": config.sizes[0],
        "free": in_gib(free),
        "needed": in_gib(needs(config, shape)),
    }
    result(found)
    done = subprocess.run(command_of(config), stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    result(found | {"report": report})
    refused = [row["series"] for row in report["rows"] if row["case"] == "does not run here"]
    print("\n".join(refused))
    return int(any(text.startswith("kvtiers") for text in refused))


if __name__ == "__main__":
    sys.exit(main())
