"""The identity of a model, from configurations that vLLM itself makes for files created here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ResolvedRevision
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)

from offload.config.schema import parse_config
from offload.connector.model.cannot_change_kv import FIELDS
from offload.connector.model.identity import namespace_fields
from offload.connector.model.weights_digest import (
    HEAD_BYTES,
    SAMPLE_BYTES,
    find_model,
    weights_identity,
)
from offload.connector.startup_checks import (
    check_vllm_config,
    recompute_failed_loads,
    startup_warnings,
)
from offload.namespaces.manifest import Namespace, differing_fields, write_manifest
from tests.offload.connector.kv_cache_configs import full
from tests.offload.connector.model.test_identity_sweep import NAMED
from tests.offload.connector.model.tiny_configs import (
    WEIGHT_BYTES,
    config_of,
    differing,
    kv_config,
    make_model,
    namespace_of,
)

DISK = {"tiers": [{"type": "lmdb", "path": "/kv", "capacity": "1GiB"}]}


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_two_starts_of_one_server_share_a_namespace(model: Path, tmp_path: Path) -> None:
    one, two = namespace_of(config_of(model)), namespace_of(config_of(model, engine="other"))
    assert differing_fields(one, two) == []
    assert one.digest == two.digest
    write_manifest(tmp_path, one)


def test_the_number_of_blocks_and_vllms_measurements_do_not_count(model: Path) -> None:
    few = namespace_of(config_of(model), kv_config(num_blocks=8))
    many = namespace_of(
        config_of(model, gpu_memory_utilization=0.5, max_num_seqs=3, seed=7), kv_config(10_000)
    )
    assert differing_fields(few, many) == []


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("model.dtype", {"dtype": "float32"}),
        ("model.revision", {"revision": "v2"}),
        ("model.hf_overrides.rope_theta", {"hf_overrides": {"rope_theta": 5000.0}}),
        ("cache.dtype", {"kv_cache_dtype": "fp8"}),
        ("hash.algorithm", {"prefix_caching_hash_algo": "sha256_cbor"}),
        ("model.load_format", {"load_format": "safetensors"}),
        ("model.weights.kind", {"load_format": "dummy"}),
    ],
)
def test_a_flag_that_changes_blocks_changes_the_namespace(
    field: str, changes: dict[str, Any], model: Path
) -> None:
    one, two = namespace_of(config_of(model)), namespace_of(config_of(model, **changes))
    assert one.digest != two.digest
    assert field in differing(one, two)


def test_each_parallel_size_is_part_of_the_namespace(model: Path) -> None:
    """All parallel sizes that the sweep over vLLM's settings lists are covered
    (``test_every_field_is_classified``)."""
    plain = namespace_of(config_of(model))
    names = FIELDS["ParallelConfig"][NAMED].split()
    assert len(names) >= 7
    for name in names:
        config = config_of(model)
        config.parallel_config.is_moe_model = None  # replicas of other models are independent
        setattr(config.parallel_config, name, 2)
        assert len(differing_fields(plain, namespace_of(config))) == 1, name
    config = config_of(model)
    config.parallel_config.data_parallel_index = 1
    assert namespace_of(config) == plain


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("geometry.chunk_blocks", lambda kv: (kv, 2)),
        ("geometry.layout", lambda kv: (replace(kv, kv_cache_layout="BLHNC"), 1)),
        ("geometry.hash_block_size", lambda kv: (replace(kv, hash_block_size=16), 1)),
        ("geometry.groups[0].block_size", lambda kv: (kv_config(block=64), 1)),
        (
            "geometry.groups[0].layers",
            lambda kv: (replace(kv, kv_cache_groups=kv.kv_cache_groups[::-1]), 1),
        ),
        (
            "geometry.tensors[0].block_stride",
            lambda kv: (replace(kv, kv_cache_tensors=kv.kv_cache_tensors[::-1]), 1),
        ),
    ],
)
def test_geometry_is_part_of_the_namespace(
    field: str, changed: Callable[[KVCacheConfig], tuple[KVCacheConfig, int]], model: Path
) -> None:
    config = config_of(model)
    one, two = namespace_of(config), namespace_of(config, *changed(kv_config()))
    assert field in differing(one, two)


def test_scheduler_and_workers_agree_on_layers_with_different_pages(model: Path) -> None:
    """vLLM flattens such a group for the scheduler; the pages are distinguished all the same."""

    def worker_config(wide: int) -> KVCacheConfig:
        specs = {"a": full(32), "b": full(32, num_kv_heads=wide)}
        merged = UniformTypeKVCacheSpecs.from_specs(specs)
        assert merged is not None
        stride = specs["b"].page_size_bytes
        return replace(
            kv_config(),
            kv_cache_groups=[KVCacheGroupSpec(["a", "b"], merged)],
            kv_cache_tensors=[
                KVCacheTensor(size=8 * 4096, layers=["a"], layer_stride=1, block_stride=4096),
                KVCacheTensor(size=8 * stride, layers=["b"], layer_stride=1, block_stride=stride),
            ],
        )

    config = config_of(model)
    worker = worker_config(4)
    scheduler = generate_scheduler_kv_cache_config([worker])
    assert scheduler.kv_cache_groups[0].kv_cache_spec != worker.kv_cache_groups[0].kv_cache_spec
    assert differing_fields(namespace_of(config, worker), namespace_of(config, scheduler)) == []
    assert namespace_of(config, worker) != namespace_of(config, worker_config(8))


@pytest.mark.parametrize("offset", [0, HEAD_BYTES + 100, WEIGHT_BYTES - 1])
def test_weights_swapped_at_the_same_path_change_the_namespace(offset: int, model: Path) -> None:
    """The namespace changes even if size and modification time are restored, because the changed
    byte is in a sample."""
    before = namespace_of(config_of(model))
    weights = model / "model.safetensors"
    found = weights.stat()
    with weights.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xee")
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    after = namespace_of(config_of(model))
    assert differing(before, after) == ["model.weights.digest"]


def test_a_newer_modification_time_alone_changes_the_namespace(model: Path) -> None:
    """The modification time reveals a change between the samples: a cold cache is better than a
    wrong one."""
    before = namespace_of(config_of(model))
    os.utime(model / "model.safetensors", ns=(10**18, 10**18 + 1))
    assert namespace_of(config_of(model)) != before


def test_another_rope_in_the_config_file_changes_the_namespace(model: Path) -> None:
    before = namespace_of(config_of(model))
    make_model(model, rope_theta=20000.0)
    after = namespace_of(config_of(model))
    assert differing(before, after) == ["model.files.config.json"]


def make_hub(cache: Path, commit: str, blob: str) -> None:
    home = cache / "models--org--tiny"
    for folder in (home / "refs", home / "blobs", home / "snapshots" / commit):
        folder.mkdir(parents=True, exist_ok=True)
    (home / "refs" / "main").write_text(commit)
    (home / "blobs" / blob).write_bytes(b"weights")
    link = home / "snapshots" / commit / "model.safetensors"
    link.unlink(missing_ok=True)
    link.symlink_to(Path("../../blobs") / blob)


def test_a_model_of_the_hub_is_identified_by_its_blobs(tmp_path: Path) -> None:
    make_hub(tmp_path, "1" * 40, "a" * 64)
    place = find_model("org/tiny", None, str(tmp_path))
    first = weights_identity(place)
    blob = tmp_path / "models--org--tiny" / "blobs" / ("a" * 64)
    os.utime(blob, (1, 1))
    assert weights_identity(place) == first
    make_hub(tmp_path, "2" * 40, "b" * 64)
    assert weights_identity(find_model("org/tiny", None, str(tmp_path))) != first
    assert weights_identity(find_model("org/tiny", "1" * 40, str(tmp_path))) == first


def test_a_branch_of_the_hub_is_the_commit_to_which_vllm_has_resolved_it(
    model: Path, tmp_path: Path
) -> None:
    """The namespace contains the revision that the user gave, as without a connection."""
    make_hub(tmp_path, "1" * 40, "a" * 64)
    place = find_model("org/tiny", "main", str(tmp_path))
    make_hub(tmp_path, "2" * 40, "b" * 64)
    resolved = ResolvedRevision("1" * 40, "main", "org/tiny", "model")
    assert find_model("org/tiny", resolved, str(tmp_path)) == place
    one, two = config_of(model, revision="main"), config_of(model)
    two.model_config.revision = resolved
    assert differing(namespace_of(one), namespace_of(two)) == []


@pytest.mark.parametrize("name", ["s3://bucket/model", "org/absent", "../../absent", "a/b/c", ""])
def test_missing_files_have_no_identity(name: str, tmp_path: Path) -> None:
    assert find_model(name, None, str(tmp_path)) is None
    assert weights_identity(None) == {"kind": "unknown"}


@pytest.mark.parametrize(
    "size", [1, 2, HEAD_BYTES, HEAD_BYTES + 12 * SAMPLE_BYTES, WEIGHT_BYTES], ids=str
)
def test_large_files_are_sampled_and_small_ones_read_completely(size: int, tmp_path: Path) -> None:
    """A change of any byte in the head or in the last sample is detected."""
    file = tmp_path / "model.safetensors"
    places = {0, min(size, HEAD_BYTES) - 1, max(0, size - SAMPLE_BYTES), size - 1}
    digests = set()
    for changed in (None, *places):
        data = bytearray(size)
        if changed is not None:
            data[changed] = 1
        file.write_bytes(data)
        os.utime(file, ns=(1, 1))
        digests.add(weights_identity(tmp_path)["digest"])
    assert len(digests) == 1 + len(places)


@pytest.mark.parametrize("part", range(12))
def test_samples_are_spread_over_a_large_file(part: int, tmp_path: Path) -> None:
    """A change of any twelfth of the weights is detected."""
    file = tmp_path / "model.safetensors"
    size = 12 * WEIGHT_BYTES
    digests = []
    for changed in (None, part):
        with file.open("wb") as made:
            made.truncate(size)
            if changed is not None:
                made.seek(changed * WEIGHT_BYTES)
                made.write(b"\1" * WEIGHT_BYTES)
        os.utime(file, ns=(1, 1))
        digests.append(weights_identity(tmp_path)["digest"])
    assert digests[0] != digests[1]


def test_a_draft_model_counts_with_its_weights(model: Path, tmp_path: Path) -> None:
    """The draft model's KV lies in the same blocks as the target's."""
    draft = make_model(tmp_path / "draft", num_hidden_layers=1)

    def with_draft() -> Namespace:
        speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        return namespace_of(config_of(model, speculative_config=speculative))

    plain, first = namespace_of(config_of(model)), with_draft()
    assert differing(plain, first)
    assert differing(first, with_draft()) == []
    weights = draft / "model.safetensors"
    found = weights.stat()
    with weights.open("r+b") as file:
        file.write(b"\xee")
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert differing(first, with_draft()) == ["draft.weights.digest"]


def test_a_random_hash_seed_gives_every_start_a_separate_namespace(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(engine: str) -> Namespace:
        return namespace_of(config_of(model, prefix_caching_hash_algo="xxhash_cbor", engine=engine))

    assert differing(start("a"), start("b")) == ["hash.seed"]
    assert start("a") == start("a")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert start("a") == start("b")


def test_the_seed_is_the_one_that_vllm_resolves(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    for algorithm in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
        for seed in (None, "0", "random"):
            if seed is None:
                monkeypatch.delenv("PYTHONHASHSEED", raising=False)
            else:
                monkeypatch.setenv("PYTHONHASHSEED", seed)
            config = config_of(model, prefix_caching_hash_algo=algorithm)
            ours = namespace_fields(config, kv_config(), 1)["hash"]["seed"]
            function = get_hash_fn_by_name(algorithm)
            theirs = {resolve_none_hash_seed(function), resolve_none_hash_seed(function)}
            assert theirs == {ours} or (len(theirs) == 2 and ours.startswith("random"))


def warnings_of(config: VllmConfig, extra: dict[str, Any]) -> str:
    return "\n".join(startup_warnings(config, parse_config(extra)))


def test_warnings_name_the_flag_to_change(model: Path) -> None:
    config = config_of(model)
    assert "sha256_cbor" in warnings_of(config, DISK)
    assert "sha256_cbor" not in warnings_of(config, {})
    random = config_of(model, prefix_caching_hash_algo="xxhash")
    assert "change at every start" in warnings_of(random, DISK)
    assert "no weight files" not in warnings_of(config, DISK)
    (model / "model.safetensors").unlink()
    assert "no weight files" in warnings_of(config_of(model), DISK)


def test_a_good_configuration_gives_no_warnings(model: Path) -> None:
    config = config_of(model, prefix_caching_hash_algo="sha256_cbor")
    assert warnings_of(config, DISK) == ""
    assert check_vllm_config(config) == []


def test_a_role_that_only_stores_or_only_loads_is_refused(model: Path) -> None:
    config = config_of(model)
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_role = "kv_producer"
    (problem,) = check_vllm_config(config)
    assert str(problem) == (
        'kv_role: must be "kv_both", because this connector loads and stores (got "kv_producer")'
    )


def test_failed_loads_are_recomputed_whatever_the_configuration_says(model: Path) -> None:
    """vLLM's default ends requests whose load fails. Its scheduler reads the setting after it has
    created the connector."""
    config = config_of(model, engine="alone")
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    assert recompute_failed_loads(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert not recompute_failed_loads(config)


def test_failed_loads_of_a_connector_within_a_connector_are_recomputed(model: Path) -> None:
    """An inner connector has a copy of the configuration; vLLM's scheduler reads the outer one."""
    outer = config_of(model, engine="nested")
    entry = {"kv_connector": "OffloadConnector", "kv_role": "kv_both",
             "kv_connector_module_path": "offload.connector"}  # fmt: skip
    outer.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id="nested",
        kv_connector_extra_config={"connectors": [entry]},
    )
    [(_, inner)] = MultiConnector._get_connector_classes_and_configs(outer)
    assert inner.kv_transfer_config is not outer.kv_transfer_config
    assert recompute_failed_loads(inner)
    assert outer.kv_transfer_config.kv_load_failure_policy == "recompute"
