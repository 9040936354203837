"""Every setting of vLLM counts for the namespace, unless a developer has decided that it cannot
change KV.

New settings of a newer vLLM make this test fail until they are classified; until then they count.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm import config as vllm_configs
from vllm import envs
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

from offload.connector.model import cannot_change_kv, identity
from offload.connector.model import source_code as model_code
from offload.connector.model.cannot_change_kv import FILES, FILES_UNLESS_READ, OTHER_VARIABLES
from offload.connector.model.settings import counting, environment_of
from offload.connector.model.weights_digest import model_files
from offload.namespaces.manifest import Namespace
from tests.offload.connector.model import identity_decisions as decided
from tests.offload.connector.model.tiny_configs import config_of, differing, make_model
from tests.processor import ISA

ROOT = Path(vllm.__file__).parent
CLASS_OF = {
    "vllm_config": "VllmConfig",
    "model_config": "ModelConfig",
    "cache_config": "CacheConfig",
    "scheduler_config": "SchedulerConfig",
    "parallel_config": "ParallelConfig",
    "load_config": "LoadConfig",
    "compilation_config": "CompilationConfig",
    "kernel_config": "KernelConfig",
    "lora_config": "LoRAConfig",
    "attention_config": "AttentionConfig",
    "multimodal_config": "MultiModalConfig",
    "mm_config": "MultiModalConfig",
    "device_config": "DeviceConfig",
    "speculative_config": "SpeculativeConfig",
}
NAMED = "has its own field in the namespace"
DECIDE = (
    "look at what vLLM does with it, then name it in offload/connector/model/cannot_change_kv.py "
    "with the reason why it cannot change KV, or in "
    "tests/offload/connector/model/identity_decisions.py: it counts"
)


@cache
def classes() -> Mapping[str, type[Any]]:
    """The classes of vLLM's configuration."""
    found = {}
    for module in pkgutil.iter_modules(vllm_configs.__path__):
        for value in vars(importlib.import_module(f"vllm.config.{module.name}")).values():
            is_class = inspect.isclass(value) and dataclasses.is_dataclass(value)
            if is_class and value.__module__.startswith("vllm.config."):
                found[value.__name__] = value
    return found


@cache
def texts() -> Mapping[str, str]:
    """vLLM's source files, by their path within vLLM."""
    return {str(file.relative_to(ROOT)): file.read_text() for file in ROOT.rglob("*.py")}


def words(table: Mapping[str, str]) -> list[str]:
    return " ".join(table.values()).split()


@pytest.mark.parametrize("name", sorted(set(classes()) - set(decided.WHOLE.split())))
def test_every_field_is_classified(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(classes()[name])]
    harmless = words(cannot_change_kv.FIELDS.get(name, {}))
    counts = decided.FIELDS.get(name, "").split()
    if harmless == ["*"]:
        assert not counts
        return
    known = Counter(harmless + counts)
    assert not [each for each in fields if each not in known], f"{name}: {DECIDE}"
    gone = [each for each in known if each not in fields]
    assert not [each for each in gone if f"{name}.{each}" not in decided.ABSENT], "no such field"
    assert max(known.values(), default=1) == 1, f"{name}: decided twice"


def test_every_class_is_classified() -> None:
    """The classes include those whose fields are searched, and those that are not part of a
    server."""
    known = {*cannot_change_kv.FIELDS, *decided.FIELDS, *decided.WHOLE.split()}
    assert known - decided.ABSENT == set(classes()), DECIDE


def test_every_variable_is_classified() -> None:
    harmless, counts = words(cannot_change_kv.VARIABLES), decided.VARIABLES.split()
    known = Counter([*harmless, *counts])
    assert set(known) - decided.ABSENT == set(envs.environment_variables), DECIDE
    assert max(known.values()) == 1


def test_variables_that_vllm_reads_without_listing_them_are_classified() -> None:
    pattern = re.compile(
        r"os\.(?:getenv|environ(?:\.get|\.pop|\.setdefault)?)\s*[(\[]\s*[\"'](\w+)"
    )
    outside = ("benchmarks/", "entrypoints/", "collect_env.py", "third_party/pynvml.py")
    found = {
        name
        for path, text in texts().items()
        if not path.startswith(outside)
        for name in pattern.findall(text)
    }
    others = [*OTHER_VARIABLES.split(), *words(decided.OTHERS_HARMLESS)]
    assert found <= {*envs.environment_variables, *others}, DECIDE


def test_no_model_reads_harmless_settings_unless_that_was_reviewed() -> None:
    pattern = re.compile(rf"\b_?({'|'.join(CLASS_OF)})(?:\(\))?\s*\.\s*(?=(\w+))")
    found = set()
    for path, text in texts().items():
        if path.startswith(("model_executor/models/", "models/")):
            for variable, field in pattern.findall(text):
                name = CLASS_OF[variable]
                table = cannot_change_kv.FIELDS.get(name, {})
                if field in words({why: each for why, each in table.items() if why != NAMED}):
                    found.add(f"{name}.{field}")
    assert found == set(words(decided.READ_BY_MODELS)) - decided.ABSENT, DECIDE


def test_other_code_that_reads_the_maximum_length_was_reviewed() -> None:
    """Layers, kernels and platforms, which all models share."""
    places = ("model_executor/layers/", "model_executor/kernels/", "kernels/", "ir/", "platforms/",
              "v1/attention/", "lora/")  # fmt: skip
    found = {
        path
        for path, text in texts().items()
        if path.startswith(places) and re.search(r"\b(max_model_len|generation_config)", text)
    }
    assert found == set(words(decided.LENGTH_OUTSIDE_MODELS)) - decided.ABSENT, DECIDE


@pytest.mark.parametrize("word", ["max_model_len", "generation_config"])
def test_models_whose_code_mentions_a_setting_are_found_to_read_it(word: str) -> None:
    """Searches every module that contains the word, unlike the code under test, which starts from a
    model. For models that take media, everything counts."""
    named = {path for path, text in texts().items() if re.search(rf"\.\w*{word}\b", text)}
    checked = 0
    for architecture, (module, _) in _TEXT_GENERATION_MODELS.items():
        if f"model_executor/models/{module}.py" in named:
            entry = ModelRegistry.models[architecture]
            assert model_code._closure(entry.module_name).may_read(word), architecture
            checked += 1
    assert checked > 0


def test_models_that_import_a_reader_read_too() -> None:
    """AXK1 takes its attention from DeepSeek V2, whose code mentions the length."""
    module = ModelRegistry.models["AXK1ForCausalLM"].module_name
    own = model_code._names(model_code.ast.parse(texts()["model_executor/models/AXK1.py"]), "")
    assert not own.found.may_read("max_model_len")
    assert model_code._closure(module).may_read("max_model_len")


PLAIN = (
    "LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM MistralForCausalLM "
    "Gemma3ForCausalLM GptOssForCausalLM MixtralForCausalLM Phi3ForCausalLM"
)


@pytest.mark.parametrize("architecture", PLAIN.split())
def test_plain_models_read_none_of_these_settings(architecture: str) -> None:
    code = model_code._closure(ModelRegistry.models[architecture].module_name)
    assert not code.may_read("max_model_len", "generation_config", "tokenizer", "image_processor")


def test_modules_that_nearly_every_model_imports_read_none_of_these_settings() -> None:
    """These modules are left out of the names in a model's code. The hooks in ``config`` are
    checked one by one."""
    for module in sorted(model_code.COMMON - {f"{model_code.MODELS}.config"}):
        path = module.replace(".", "/").removeprefix("vllm/") + ".py"
        assert not re.search("max_model_len|generation_config", texts()[path]), path


def other(value: Any) -> Iterator[Any]:
    """Another value of the same kind."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, list | tuple):
        yield [*value, "another"]
    elif isinstance(value, dict):
        yield {**value, "another": 1}
    elif value is None or isinstance(value, str):
        yield "another"


def parts(config: Any) -> Iterator[Any]:
    """A configuration object and the objects in it that are searched."""
    yield config
    harmless = cannot_change_kv.fields_of(type(config).__name__)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and harmless is not None and field.name not in harmless:
            yield from parts(value)


def test_every_counting_setting_appears_under_its_name(tmp_path: Path) -> None:
    """A harmless one does not: every field of every object is set to another value."""
    config = config_of(make_model(tmp_path / "model"), enable_lora=True)
    seen: Counter[str] = Counter()
    for part in parts(config):
        harmless = cannot_change_kv.fields_of(type(part).__name__)
        before = dict(counting(part))
        for field in dataclasses.fields(part):
            old = getattr(part, field.name, None)
            for new in other(old):
                object.__setattr__(part, field.name, new)
                after = dict(counting(part))
                object.__setattr__(part, field.name, old)
                is_harmless = harmless is None or field.name in harmless
                assert (before == after) == is_harmless, field.name
                assert is_harmless or before.get(field.name) != after[field.name]
                seen[type(part).__name__] += not is_harmless
    assert len(+seen) > 12
    assert seen.total() > 70


def test_counting_variables_appear_under_their_names() -> None:
    for name in envs.environment_variables:
        found = environment_of({name: "1"})
        assert found == ({} if name in cannot_change_kv.variables() else {name: "1"})


HUB_FILES = (
    "config.json params.json hf_quant_config.json quantize_config.json modeling_x.py "
    "configuration_x.py model.safetensors.index.json tokenizer.json tokenizer_config.json "
    "vocab.json merges.txt tokenizer.model special_tokens_map.json chat_template.jinja "
    "chat_template.json generation_config.json preprocessor_config.json processor_config.json "
    "video_preprocessor_config.json README.md LICENSE USE_POLICY.md .gitattributes figure.png "
    "trainer_state.json something_new.json sentence_bert_config.json modules.json "
    "adapter_config.json"
)


@pytest.mark.parametrize("may_read", [False, True])
def test_every_file_of_a_models_folder_counts_or_is_harmless(
    may_read: bool, tmp_path: Path
) -> None:
    """Changes one file after the other. Unknown ones count."""
    code = model_code.CodeNames(whole=not may_read)
    folder = make_model(tmp_path / "model")
    harmless = words(FILES) + ([] if may_read else words(FILES_UNLESS_READ))
    for name in HUB_FILES.split():
        file = folder / name
        old = file.read_text() if file.exists() else "{}"
        file.write_text(old)
        before = Namespace.of(model_files(folder, code.may_read))
        file.write_text(old + " ")
        after = Namespace.of(model_files(folder, code.may_read))
        is_harmless = name.startswith(".") or cannot_change_kv.matches(name, harmless)
        assert differing(before, after) == ([] if is_harmless else [name])
        file.write_text(old)


def test_every_extension_of_the_cpu_by_which_vllm_chooses_kernels_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them alone may differ between two machines: AMX for float16 came later than AMX."""
    pattern = re.compile(r"torch\.cpu\.(_is_\w+_supported)")
    names = {name for text in texts().values() for name in pattern.findall(text)}
    capabilities = dict(torch.cpu.get_capabilities())

    def seen() -> tuple[list[bool], dict[str, Any]]:
        return [getattr(torch.cpu, name)() for name in sorted(names)], identity._instructions()

    chosen, extensions = seen()
    tried = 0
    for name, value in capabilities.items():
        changed = capabilities | {name: not value}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda changed=changed: changed)
        found, now = seen()
        if found != chosen:
            tried += 1
            assert now != extensions, name
    if platform.machine() == "x86_64":  # others have other extensions
        assert tried >= (1 if ISA else 4), "KVTIERS_TEST_ISA fixes all but one of the answers"
