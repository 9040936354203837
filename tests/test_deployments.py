"""The values files of ``docs/deployments``: vLLM and the connector accept the flags, the charts
know the keys, and the volumes hold the tiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from offload.config.schema import parse_config
from offload.sizes import parse_size
from tests.test_doc_examples import problems_of

FOLDER = Path(__file__).resolve().parents[1] / "docs/deployments"

KEYS = {
    "llm-d.yaml": {
        "": {"modelArtifacts", "routing", "decode", "prefill"},
        "modelArtifacts": {"name", "uri", "size", "labels"},
        "modelArtifacts.labels": {"llm-d.ai/inferenceServing", "llm-d.ai/model"},
        "routing": {"servicePort", "proxy"},
    },
    "production-stack.yaml": {"": {"servingEngineSpec", "extraObjects"}},
}
"""Keys that the charts' schemas allow where they allow no others, copied by hand. The guide names
the commits."""


def deployment(name: str) -> tuple[dict[str, Any], list[str], list[dict[str, Any]], str]:
    """The values, vLLM's flags, the mounts, and the memory."""
    values = yaml.safe_load((FOLDER / name).read_text())
    if name == "llm-d.yaml":
        [container] = values["decode"]["containers"]
        memory = container["resources"]["limits"]["memory"]
        return values, container["args"], container["volumeMounts"], memory
    [model] = values["servingEngineSpec"]["modelSpec"]
    flags = model["vllmConfig"]["extraArgs"]
    return values, flags, model["extraVolumeMounts"], model["requestMemory"]


def volume_bytes(values: dict[str, Any]) -> int:
    """The size of the only volume."""
    if "decode" in values:
        [volume] = values["decode"]["volumes"]
        return parse_size(f"{volume['emptyDir']['sizeLimit']}B")
    [claim] = values["extraObjects"]
    [volume] = values["servingEngineSpec"]["modelSpec"][0]["extraVolumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    return parse_size(f"{claim['spec']['resources']['requests']['storage']}B")


deployments = pytest.mark.parametrize("name", KEYS)


def test_every_file_is_checked() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(KEYS)


@deployments
def test_the_charts_know_the_keys(name: str) -> None:
    values, *_ = deployment(name)
    for place, known in KEYS[name].items():
        inner = values
        for key in filter(None, place.split(".")):
            inner = inner[key]
        assert set(inner) <= known, place


@deployments
def test_the_connector_accepts_the_configuration_and_the_volumes_hold_it(name: str) -> None:
    values, flags, [mount], memory = deployment(name)
    assert all(isinstance(flag, str) for flag in flags), "the schemas require strings"
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given["--prefix-caching-hash-algo"] == "sha256_cbor"
    transfer = json.loads(given["--kv-transfer-config"])
    assert problems_of(transfer) == []
    config = parse_config(transfer["kv_connector_extra_config"])
    assert config.cpu.capacity * 1.25 < parse_size(f"{memory}B")
    [tier] = config.tiers
    assert Path(mount["mountPath"]) in Path(tier.path).parents
    assert tier.capacity * 1.1 <= volume_bytes(values)


def test_a_second_start_finds_the_claim_as_the_first_one_left_it() -> None:
    """The chart disables prefix caching by default, and starts a new pod before the old one ends.
    Kubernetes makes a volume with a group writable for it at each start, which a tier refuses."""
    spec = deployment("production-stack.yaml")[0]["servingEngineSpec"]
    assert spec["strategy"] == {"type": "Recreate"}
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    [model] = spec["modelSpec"]
    assert model["vllmConfig"]["enablePrefixCaching"] is True
    assert model["replicaCount"] == 1


@deployments
@pytest.mark.thorough
def test_vllm_accepts_the_flags(name: str, tmp_path: Path) -> None:
    from demo.tiny_model import make_llama
    from tests.offload.cli.test_guide import check_serve

    _, flags, _, _ = deployment(name)
    check_serve(flags, make_llama(tmp_path / "llama"), tmp_path)
