"""Settings besides the model's files that reach the forward pass make a separate namespace; others
do not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import MultiModalConfig, VllmConfig, WeightTransferConfig

from offload.config.schema import parse_config
from offload.connector.model import files_at_start, settings
from offload.connector.model import source_code as model_code
from offload.connector.startup import agreed_namespace
from offload.connector.startup_checks import startup_warnings
from offload.errors import NamespaceError
from offload.messages.report import RankState
from offload.namespaces.manifest import Namespace
from tests.models import configs
from tests.offload.connector.model.tiny_configs import (
    config_of,
    differing,
    make_model,
    namespace_of,
)

DISK = parse_config({"tiers": [{"type": "lmdb", "path": "/kv", "capacity": "1GiB"}]})


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def llama4(tmp_path: Path) -> Path:
    longer = {"max_position_embeddings": 131072}
    return make_model(tmp_path / "llama4", **configs.LLAMA4 | longer)


def between(one: VllmConfig, other: VllmConfig) -> list[str]:
    return differing(namespace_of(one), namespace_of(other))


# -- the model's code ----------------------------------------------------------------------------


def test_llama4_with_another_max_model_len_is_another_namespace(llama4: Path) -> None:
    """Llama 4 scales its queries from position 8,191 on if ``max_model_len`` is above 32,768."""
    short, long = config_of(llama4, max_model_len=16384), config_of(llama4, max_model_len=65536)
    assert between(short, long) == ["model.max_model_len"]


def test_max_model_len_does_not_count_for_code_that_does_not_mention_it(model: Path) -> None:
    assert between(config_of(model), config_of(model, max_model_len=256)) == []


def test_the_namespace_of_a_long_rope_model_includes_max_model_len(
    model: Path, tmp_path: Path
) -> None:
    """Every model with long RoPE depends on the length, because a layer reads it."""
    make_model(model, note="longrope")
    assert between(config_of(model), config_of(model, max_model_len=256)) == ["model.max_model_len"]
    plain = make_model(tmp_path / "plain")
    elsewhere = [
        config_of(plain, hf_config_path=str(model), max_model_len=length) for length in (512, 256)
    ]
    assert between(*elsewhere) == ["model.max_model_len"]


@pytest.mark.parametrize("where", ["override", "file", "folder"])
def test_llama4_reads_the_generation_defaults(where: str, llama4: Path, tmp_path: Path) -> None:
    """``attn_temperature_tuning`` may be set there too."""
    before = config_of(llama4)
    changes: dict[str, Any] = {}
    text = json.dumps({"attn_temperature_tuning": True})
    names = ["model.generation.override.attn_temperature_tuning"]
    if where == "override":
        changes = {"override_generation_config": {"attn_temperature_tuning": True}}
    elif where == "folder":
        (tmp_path / "generation_config.json").write_text(text)
        changes = {"generation_config": str(tmp_path)}
        names = ["model.generation.file", "model.generation.from"]
    spaces = [namespace_of(before)]
    if where == "file":
        (llama4 / "generation_config.json").write_text(text)
        names = ["model.files.generation_config.json", "model.generation.file"]
    spaces.append(namespace_of(config_of(llama4, **changes)))
    assert differing(*spaces) == names


def test_other_models_do_not_read_the_generation_defaults(model: Path) -> None:
    before = namespace_of(config_of(model))
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    after = namespace_of(config_of(model, override_generation_config={"top_k": 3}))
    assert differing(before, after) == []


def test_code_that_cannot_be_found_is_assumed_to_read_everything(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_code, "_source", lambda module: None)
    monkeypatch.setattr(model_code, "_closure", model_code._closure.__wrapped__)
    assert between(config_of(model), config_of(model, max_model_len=256)) == ["model.max_model_len"]


# -- flags, environment, versions ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("settings.compilation_config.mode", {"enforce_eager": True}),
        ("settings.compilation_config.pass_config.fuse_norm_quant", {
            "compilation_config": {"pass_config": {"fuse_norm_quant": True}}}),
        ("settings.attention_config.flash_attn_version", {
            "attention_config": {"flash_attn_version": 3}}),
        ("settings.lora_config.max_lora_rank", {"enable_lora": True, "max_lora_rank": 32}),
        ("settings.additional_config", {"additional_config": {"a": 1}}),
        ("model.settings.enable_prompt_embeds", {"enable_prompt_embeds": True}),
        ("model.settings.trust_remote_code", {"trust_remote_code": True}),
    ],
)  # fmt: skip
def test_a_flag_that_is_not_known_to_be_harmless_counts(
    field: str, changes: dict[str, Any], model: Path
) -> None:
    assert field in between(config_of(model), config_of(model, **changes))


def test_scheduling_and_memory_do_not_count(model: Path) -> None:
    changed = config_of(
        model,
        max_num_batched_tokens=2048,
        max_num_seqs=7,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 20,
        served_model_name="other",
        disable_log_stats=True,
        seed=3,
    )
    assert between(config_of(model), changed) == []


def test_an_environment_variable_counts_unless_it_is_harmless(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model)
    before = namespace_of(config)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("HOME", "/elsewhere")
    assert namespace_of(config) == before
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp8")
    assert differing(before, namespace_of(config)) == ["environment.VLLM_MARLIN_INPUT_DTYPE"]


@pytest.mark.parametrize("version", ["0.32.1", "0.33.1", "0.32.0+local"])
def test_another_version_of_vllm_is_another_namespace(
    version: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patch versions count too: they may change a kernel or a model's code under the same names."""
    config = config_of(model)
    before = namespace_of(config)
    monkeypatch.setattr(vllm, "__version__", version)
    assert differing(before, namespace_of(config)) == ["vllm"]


def test_another_version_of_a_library_that_computes_is_another_namespace(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model)
    before = namespace_of(config)
    real = settings.metadata.version
    monkeypatch.setattr(
        settings.metadata, "version", lambda name: "9" if name == "torch" else real(name)
    )
    assert differing(before, namespace_of(config)) == ["libraries.torch"]
    assert before.fields["libraries"]["torch"] == torch.__version__


def test_values_are_plain_and_contain_no_credentials() -> None:
    secret = {"s3_access_key_id": "A", "s3_secret_access_key": "B", "uri": "s3://me:pass@host/x"}
    text = json.dumps(settings.plain({"a": secret, "b": {3, 1}, "c": torch.float32, "d": object()}))
    assert "A" not in text.split('"')
    assert "pass" not in text
    assert '"b": [1, 3], "c": "torch.float32"' in text
    assert "0x" not in text
    assert len(settings.plain("x" * 10_000)) < 100
    assert settings.plain("x" * 10_000) != settings.plain("x" * 10_001)


# -- media ---------------------------------------------------------------------------------------


def with_media(model: Path, **media: Any) -> VllmConfig:
    """A configuration with vLLM's own configuration of a model that takes media."""
    config = config_of(model)
    config.model_config.multimodal_config = MultiModalConfig(**media)
    return config


@pytest.mark.parametrize(
    ("field", "media"),
    [
        ("mm_processor_kwargs.num_crops", {"mm_processor_kwargs": {"num_crops": 4}}),
        ("media_io_kwargs.video.num_frames", {"media_io_kwargs": {"video": {"num_frames": 8}}}),
        ("video_pruning_rate", {"video_pruning_rate": 0.5}),
        ("mm_encoder_attn_dtype", {"mm_encoder_attn_dtype": "fp8"}),
        ("mm_encoder_attn_backend", {"mm_encoder_attn_backend": "TORCH_SDPA"}),
        ("mm_encoder_tp_mode", {"mm_encoder_tp_mode": "data"}),
        ("mm_device_do_normalize", {"mm_device_do_normalize": False}),
    ],
)
def test_settings_for_preparing_media_count(field: str, media: dict[str, Any], model: Path) -> None:
    """The hash of the media in the keys covers the request's arguments, not the server's."""
    found = between(with_media(model), with_media(model, **media))
    assert any(f"model.media.{field}".startswith(name) for name in found)
    assert len(found) == 1


@pytest.mark.parametrize(
    "name",
    ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"],
)
def test_the_files_of_a_media_processor_count_for_models_that_take_media(
    name: str, model: Path
) -> None:
    before = [namespace_of(config_of(model)), namespace_of(with_media(model))]
    (model / name).write_text('{"size": 1}')
    assert namespace_of(config_of(model)) == before[0]
    assert differing(before[1], namespace_of(with_media(model))) == [f"model.files.{name}"]


def test_caches_of_media_do_not_count(model: Path) -> None:
    changed = with_media(
        model, mm_processor_cache_gb=1, mm_hasher_algorithm="sha256", skip_mm_profiling=True
    )
    assert between(with_media(model), changed) == []


def test_scales_of_an_encoder_count_by_content(model: Path, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("1")
    config = with_media(model, mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales))
    before = namespace_of(config)
    scales.write_text("2")
    assert differing(before, namespace_of(config)) == ["model.media.fp8_scales"]


# -- where weights come from ---------------------------------------------------------------------


def loaded_by(model: Path, load_format: str, extra: dict[str, Any], engine: str) -> VllmConfig:
    config = config_of(model, engine=engine)
    config.load_config.load_format = load_format
    config.load_config.model_loader_extra_config = extra
    return config


def tensorized(model: Path, uri: str, engine: str = "e") -> VllmConfig:
    extra = {"tensorizer_config": {"tensorizer_uri": uri, "num_readers": 4}}
    return loaded_by(model, "tensorizer", extra, engine)


def test_the_address_of_tensorized_weights_counts(model: Path) -> None:
    one, two = tensorized(model, "s3://weights/one"), tensorized(model, "s3://weights/two")
    assert between(one, two) == ["model.loader.tensorizer_uri"]
    again = tensorized(model, "s3://weights/one", engine="later")
    assert between(one, again) == ["model.weights.engine"]  # the file's present content is unknown


def test_tensorized_weights_on_this_machine_count_by_content(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_at_start, "_began", lambda: time.time() + 24 * 3600)
    file = tmp_path / "model.tensors"
    file.write_bytes(b"one")
    before = namespace_of(tensorized(model, str(file)))
    assert namespace_of(tensorized(model, str(file), engine="later")) == before
    file.write_bytes(b"two")
    assert differing(before, namespace_of(tensorized(model, str(file)))) == ["model.weights.digest"]


def test_an_unknown_loader_may_take_weights_from_anywhere(model: Path) -> None:
    one, two = (loaded_by(model, "mine", {}, engine) for engine in ("a", "b"))
    assert between(one, two) == ["model.weights.engine"]


def test_threads_of_a_loader_do_not_count(model: Path) -> None:
    extra = {"enable_multithread_load": True, "num_threads": 8}
    assert between(loaded_by(model, "auto", {}, "e"), loaded_by(model, "auto", extra, "e")) == []


@pytest.mark.parametrize("how", ["dummy", "pushed"])
def test_weights_that_may_be_pushed_before_the_first_request_are_separate_for_each_start(
    how: str, model: Path
) -> None:
    """Nothing is cached at that time, so there is no reason for a reset; after the next start,
    other weights are pushed. An engine id chosen by the operator identifies the weights."""

    def start(engine: str) -> VllmConfig:
        config = config_of(model, engine=engine)
        if how == "dummy":
            config.load_config.load_format = "dummy"
        else:
            config.weight_transfer_config = WeightTransferConfig()
        return config

    assert between(start("a"), start("b")) == ["model.weights.engine"]
    assert between(start("a"), start("a")) == []
    lines = "\n".join(startup_warnings(start("a"), DISK))
    assert "pushed" in lines
    assert '"engine_id"' in lines


# -- processes -----------------------------------------------------------------------------------


def said_by(rank: int, namespace: Namespace) -> RankState:
    return RankState(rank, namespace, 0, 1, 4096, ())


def test_the_scheduler_adopts_the_namespace_of_the_workers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sets variables in its workers, and models change their configuration there."""
    whole = namespace_of(config_of(model))
    own = Namespace.of({name: whole.fields[name] for name in ("hash", "geometry")})
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    said = namespace_of(config_of(model))
    assert said != whole
    assert agreed_namespace(own, [said_by(0, said), said_by(1, said)]) == said


def test_workers_that_disagree_are_refused_with_the_field(model: Path) -> None:
    one = namespace_of(config_of(model))
    two = Namespace.of(one.fields | {"vllm": "9"})
    own = Namespace.of({"hash": one.fields["hash"]})
    with pytest.raises(NamespaceError, match=r"rank 1 and rank 0 differ in vllm \(9 and 0"):
        agreed_namespace(own, [said_by(0, one), said_by(1, two)])
    other = Namespace.of({"hash": {**one.fields["hash"], "seed": "7"}})
    with pytest.raises(NamespaceError, match=r"the scheduler differ in hash\.seed"):
        agreed_namespace(other, [said_by(0, one)])
