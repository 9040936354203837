"""``kvtiers doctor`` on real models' configurations, without weights.

The groups that it finds must be those that a real engine makes of the same model (other tests
compare ``Family.groups`` with engines). Folders hold only config and tokenizer: nothing is loaded.
"""

import json
import subprocess
import sys

import pytest
import vllm
from typer.testing import CliRunner
from vllm.platforms import current_platform

from offload.admin.doctor import EXIT_CODES, ModelVerdict
from offload.cli import app
from offload.connector.doctor import examine_model
from tests.models.families import FAMILIES, write_model
from tests.models.inspection import inspect_models_here
from tests.offload.cli.rank_folders import writer
from tests.offload.connector.model.tiny_configs import config_of, make_model, namespace_of
from tests.processor import has_avx512
from tests.texts import same_text

KINDS = {
    "FullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla_attention",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "MambaSpec": "mamba",
    "UniformTypeKVCacheSpecs": "full_attention",
}
NOT_THE_DOCTORS = {"load_format", "kv_cache_memory_bytes"}
TOKEN_SCALES = ["--kv-cache-dtype", "int8_per_token_head", "--block-size", "32"]
VLLM_REFUSES_TOKEN_SCALES = vllm.__version_tuple__ >= (0, 33) and current_platform.is_cpu()
"""From 0.33 on vLLM's CPU platform checks the dtype itself, before it asks the connector."""


ALIGNED = ["--enable-prefix-caching", "--mamba-cache-mode", "align"]


@pytest.fixture(scope="module", autouse=True)
def _models_are_inspected_here():
    inspect_models_here()


def transfer(extra: dict) -> dict:
    """A ``--kv-transfer-config`` of this project's connector."""
    return {
        "kv_connector": "OffloadConnector",
        "kv_connector_module_path": "offload.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


CHUNKS_OF_9 = ["--kv-transfer-config", json.dumps(transfer({"chunk_blocks": 9}))]


def flags_of(family, folder) -> list[str]:
    """The family's engine arguments as flags of ``vllm serve``, added to those of the test
    engines."""
    kwargs = {"block_size": 32, "max_model_len": 2048} | family.kwargs(folder)
    flags = []
    for name, value in kwargs.items():
        if name not in NOT_THE_DOCTORS:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            flags += [f"--{name.replace('_', '-')}", text]
    return flags


def ask(folder, *flags: str):
    """Exit code and report of one call in this process (importing vLLM takes long)."""
    result = CliRunner().invoke(app, ["doctor", str(folder), "--json", *flags])
    report = json.loads(result.stdout)
    assert result.exit_code == EXIT_CODES[ModelVerdict(report["verdict"])], result.output
    return result.exit_code, report


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_can_be_offloaded(name, tmp_path):
    family = FAMILIES[name]
    folder = family.make(tmp_path / name)
    code, report = ask(folder, *flags_of(family, folder))
    if family.needs_avx512 and not has_avx512() and not report["ok"]:
        # From 0.33 on, vLLM refuses these data types on such a host; 0.32 fails at the first step.
        assert report["verdict"] == ModelVerdict.VLLM_REFUSES.value, report
        assert "this host" in report["refused"][0], report
        return
    assert (code, report["ok"], report["refused"]) == (0, True, [])
    found = [(group["kind"], group["block_tokens"]) for group in report["groups"]]
    if family.groups:
        assert sorted(found) == sorted((KINDS[kind], block) for kind, block in family.groups)
    assert report["alignment_tokens"] % report["hash_tokens"] == 0
    assert report["token_bytes"] > 0
    assert report["tiers"][0]["tokens"] > report["alignment_tokens"]


def test_wider_draft_model_shows_both_pages(tmp_path):
    family = FAMILIES["llama_draft"]
    folder = family.make(tmp_path / "llama_draft")
    (group,) = ask(folder, *flags_of(family, folder))[1]["groups"]
    assert len(group["page_bytes"]) == 2
    assert len(group["layers"]) == 5


HYBRID_WITHOUT_CACHE = ["--no-enable-prefix-caching", "--max-model-len", "4096"]


def test_hybrid_without_prefix_caching_is_refused_and_the_fix_works(tmp_path):
    """With the flags of the hint, the doctor accepts the model; problems that only follow from the
    unaligned states are not listed."""
    family = FAMILIES["qwen3_next"]
    folder = family.make(tmp_path / "model")
    code, report = ask(folder, *HYBRID_WITHOUT_CACHE)
    assert code == 1
    assert report["fixes"] == ["start vLLM with --enable-prefix-caching --mamba-cache-mode align"]
    assert all("states are not kept at block boundaries" in text for text in report["refused"])
    assert len(report["refused"]) == 3, "one for each group of states"
    fixed = report["fixes"][0].removeprefix("start vLLM with ").split()
    assert ask(folder, *HYBRID_WITHOUT_CACHE, *fixed)[0] == 0


@pytest.mark.parametrize(
    ("name", "flags", "with_hint"),
    [
        # With aligned states, blocks are longer than this context: there could be no hit.
        ("qwen3_next", ["--max-model-len", "128"], 1),
        # Our checks alone would accept the hint; vLLM refuses its flags together with this unit.
        ("lfm2", ["--block-size", "32", "--max-model-len", "4096", "--prefix-match-unit", "24"], 4),
    ],
)
def test_a_hint_that_vllm_does_not_fulfil_is_not_given(name, flags, with_hint, tmp_path):
    folder = FAMILIES[name].make(tmp_path / "model")
    flags = ["--no-enable-prefix-caching", *flags]
    code, report = ask(folder, *flags)
    assert (code, report["fixes"]) == (1, [])
    assert "states are not kept at block boundaries" in report["refused"][0]
    assert ask(folder, *flags, *ALIGNED)[0] == with_hint


@pytest.mark.parametrize(
    "flags",
    [
        *([] if VLLM_REFUSES_TOKEN_SCALES else [TOKEN_SCALES]),
        ["--pipeline-parallel-size", "2"],
        ["--max-model-len", "256", *CHUNKS_OF_9],
    ],
)
def test_every_hint_that_is_printed_helps(flags, tmp_path, monkeypatch):
    """Each alternative, when applied, makes the doctor accept the model."""
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")
    folder = FAMILIES["llama"].make(tmp_path / "llama")
    code, report = ask(folder, *flags)
    assert code == 1
    (fix,) = report["fixes"]
    for way in fix.removeprefix("start vLLM with ").split(" or "):
        more = way.split(" (")[0].split()
        if way.startswith("set"):
            blocks = int(way.split()[-1])
            more = ["--kv-transfer-config", json.dumps(transfer({"chunk_blocks": blocks}))]
        assert ask(folder, *flags, *more)[0] == 0, way


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-model-len", "512", "--block-size", "64"],
        ["--max_model_len=512", "--block_size", "64"],
        ["--config", "serve.yaml"],
        ["--port", "8000", "--max-model-len", "512", "--block-size", "64"],
    ],
)
def test_flags_are_read_as_vllm_serve_reads_them(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.yaml").write_text("max-model-len: 512\nblock_size: 64\n")
    folder = FAMILIES["llama"].make(tmp_path / "llama")
    code, report = ask(folder, *flags)
    assert (code, report["groups"][0]["block_tokens"]) == (0, 64)


def test_a_configuration_in_dotted_flags_is_read(tmp_path):
    """A wrong configuration is also read, and ignored when the geometry is determined."""
    folder = FAMILIES["llama"].make(tmp_path / "llama")
    plain = transfer({})
    dotted = [
        part
        for name in ("kv_connector", "kv_connector_module_path", "kv_role")
        for part in (f"--kv-transfer-config.{name}", plain[name])
    ]
    extra = "--kv-transfer-config.kv_connector_extra_config"
    code, report = ask(folder, *dotted, f"{extra}.chunk_blocks", "4")
    group = report["groups"][0]
    assert (code, group["chunk_tokens"]) == (0, 4 * group["block_tokens"])
    code, report = ask(folder, *dotted, f"{extra}.tires", "4")
    assert (code, len(report["groups"])) == (2, 1)
    assert report["refused"] == ['$.tires: unknown option. Did you mean "tiers"?']


def test_warnings_of_a_server_start_are_noted(tmp_path):
    """Warnings for this configuration."""
    folder = FAMILIES["llama"].make(tmp_path / "llama")
    assert "sha256_cbor" not in "\n".join(ask(folder)[1]["notes"])
    disk = {"type": "lmdb", "path": str(tmp_path / "kv"), "capacity": "1GiB"}
    settings = transfer({"cpu": {"capacity": "256MiB"}, "tiers": [disk]})
    code, report = ask(folder, "--kv-transfer-config", json.dumps(settings))
    notes = "\n".join(report["notes"])
    assert code == 0, report["refused"]
    assert "Use --prefix-caching-hash-algo sha256_cbor" in notes
    flags = ["--prefix-caching-hash-algo", "sha256_cbor"]
    notes = "\n".join(ask(folder, "--kv-transfer-config", json.dumps(settings), *flags)[1]["notes"])
    assert "sha256_cbor" not in notes


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-len", "long"], "--max-model-len"),
        (["--max-modle-len", "512"], "--max-modle-len. Did you mean --max-model-len?"),
        (["--tensor_paralel_size=2"], "=2. Did you mean --tensor-parallel-size?"),
        (["--kv-transfer-confg.kv_role", "kv_both"], "Did you mean --kv-transfer-config?"),
        (["--prot", "8000", "--entirely-new"], "--prot --entirely-new. Did you mean --port?"),
        (["512"], "unrecognized arguments: 512"),
    ],
)
def test_unknown_flags_are_named(flags, words, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code, report = ask(tmp_path, *flags)
    assert (code, report["verdict"]) == (2, ModelVerdict.WRONG_FLAGS)
    assert "vLLM does not understand these flags: " in report["refused"][0]
    assert words in report["refused"][0]


def test_flags_before_the_model():
    code, report = ask("--max-model-len", "512", "/models/llama")
    assert (code, report["refused"]) == (
        2,
        ["the model comes first: kvtiers doctor MODEL [vllm flags]"],
    )


def test_the_report_names_the_platform_of_vllm(tmp_path):
    report = ask(FAMILIES["llama"].make(tmp_path / "llama"))[1]
    assert f"vLLM {vllm.__version__} on its {current_platform.device_name} platform" in str(
        report["notes"]
    )


def test_tensor_parallel_size_halves_the_pages(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")
    family = FAMILIES["llama"]
    folder = family.make(tmp_path / "llama")
    one = ask(folder, *flags_of(family, folder))[1]
    two = ask(folder, *flags_of(family, folder), "--tensor-parallel-size", "2")[1]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert one["token_bytes"] == 2 * two["token_bytes"]
    assert one["tiers"][0]["tokens"] == two["tiers"][0]["tokens"]


def test_scales_per_token_and_head_are_refused(tmp_path):
    folder = FAMILIES["llama"].make(tmp_path / "llama")
    code, report = ask(folder, *TOKEN_SCALES)
    if VLLM_REFUSES_TOKEN_SCALES:
        assert code == 4
        assert "--kv-cache-dtype int8_per_token_head is not supported" in report["refused"][0]
        return
    assert (code, len(report["refused"])) == (1, 1)
    assert report["fixes"] == ["start vLLM with --kv-cache-dtype auto or --kv-cache-dtype fp8"]


def test_encoder_decoder_is_refused(tmp_path):
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": 300,
        "pad_token_id": 0,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 256,
        "max_target_positions": 256,
        "dtype": "bfloat16",
    }
    code, report = ask(write_model(tmp_path / "whisper", config))
    assert code == 1
    same_text("layout_doctor_encoder_decoder", "\n".join(report["refused"]))


def test_every_problem_of_the_configuration_is_listed(tmp_path):
    wrong = json.dumps(transfer({"chunk_blocks": 0, "tires": []}))
    folder = FAMILIES["llama"].make(tmp_path / "llama")
    code, report = ask(folder, "--kv-transfer-config", wrong)
    assert code == 2
    assert len(report["refused"]) == 2
    assert report["groups"] == [], "vLLM was not asked"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("--kv-transfer-config", json.dumps(transfer({"tires": []})), "$.tires: unknown option"),
        ("--kv_transfer_config", "{", "--kv-transfer-config: is not JSON: "),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_a_wrong_configuration_is_reported_without_vllm(
    name, text, words, joined, tmp_path, monkeypatch
):
    def ask_vllm(*_):
        raise SystemExit(99)

    monkeypatch.setattr("offload.cli.doctor.ask_vllm", ask_vllm)
    folder = FAMILIES["llama"].make(tmp_path / "llama")
    flags = [f"{name}={text}"] if joined else ["--port", "8000", name, text]
    result = CliRunner().invoke(app, ["doctor", str(folder), *flags])
    assert result.exit_code == 2
    assert f"\nRefused  {words}" in result.stdout
    assert "Verdict  unknown: the flags or the configuration are wrong" in result.stdout
    right = json.dumps(transfer({}))
    assert CliRunner().invoke(app, ["doctor", str(folder), name, right]).exit_code == 99


def test_a_folder_that_a_server_holds_does_not_hide_the_geometry(tmp_path, monkeypatch):
    """The server may be the one that the user asks about, or be about to end."""
    monkeypatch.setattr("offload.cli.doctor.ask_vllm", lambda *_: sys.exit(99))
    folder = FAMILIES["llama"].make(tmp_path / "llama")
    disk = {"type": "lmdb", "path": str(tmp_path / "kv"), "capacity": "64MiB", "reserve": 0}
    flags = ["--kv-transfer-config", json.dumps(transfer({"tiers": [disk]}))]
    with writer(tmp_path / "kv"):
        assert CliRunner().invoke(app, ["doctor", str(folder), *flags]).exit_code == 99


def test_a_missing_model_is_reported(tmp_path):
    code, report = ask(tmp_path / "nothing")
    assert code == 3
    assert report["refused"] == [f"{tmp_path / 'nothing'} does not exist"]
    (tmp_path / "empty").mkdir()
    code, report = ask(tmp_path / "empty")
    assert code == 3
    assert report["refused"] == [f"{tmp_path / 'empty'} has no config.json"]


def test_a_model_that_only_vllm_finds_missing_is_reported(tmp_path):
    """For example a name on a hub that answers too late."""
    report = examine_model(str(tmp_path), [])
    assert report.verdict == ModelVerdict.UNKNOWN_MODEL
    assert report.refused[0].startswith("vLLM itself refuses: ")


def test_a_model_that_vllm_refuses_with_these_flags(tmp_path):
    folder = FAMILIES["llama"].make(tmp_path / "llama")
    code, report = ask(folder, "--tensor-parallel-size", "7")
    assert code == 4
    assert "must be divisible by tensor parallel size" in report["refused"][0]


def test_a_reason_is_not_repeated_for_each_layer(tmp_path):
    folder = FAMILIES["llama"].make(tmp_path / "llama")
    code, report = ask(folder, "--block-size", "7")
    assert code == 4
    [reason] = report["refused"]
    parts = reason.partition("(")[2].rstrip(")").split("; ")
    assert len(parts) == len(set(parts)), reason


PROGRAM = """
import runpy, sys
from tests.processor import pretend
pretend()
try:
    runpy.run_module("offload.cli", run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code
from tests.offload.cli.rank_folders import writer
from tests.offload.connector.model.tiny_configs import config_of, namespace_of
print("namespace", namespace_of(config_of(sys.argv[2])).name, file=sys.stderr)
sys.exit(code)
"""
"""Runs ``python -m offload.cli`` for everything that only a separate process shows: importing vLLM
there takes 15 s."""


@pytest.mark.thorough
def test_the_command_as_a_program(tmp_path, monkeypatch):
    """Exit code 0, and stdout contains only the report. The process computes the same namespace as
    this one, as the scheduler and each worker must with their separate hash seeds."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # as a doctor in this process leaves it
    folder = make_model(tmp_path / "model")
    command = [sys.executable, "-c", PROGRAM, "doctor", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == str(folder)
    assert done.stderr.split()[-2:] == ["namespace", namespace_of(config_of(folder)).name]
    assert "Triton" not in done.stderr, "a warning that says nothing about the model"
