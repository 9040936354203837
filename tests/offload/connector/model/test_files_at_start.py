"""Files of a model that are replaced after vLLM has begun to read them: real files, and
configurations that vLLM itself makes of them."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ResolvedRevision
from vllm.config import ModelConfig, VllmConfig
from vllm.plugins import load_general_plugins

from offload.connector.model import files_at_start
from offload.connector.model.files_at_start import RECORD, Source, changed_file, weights_in
from offload.connector.model.weights_digest import find_model
from offload.connector.plugin import register
from offload.namespaces.manifest import Namespace
from tests.models.configs import LLAMA4
from tests.offload.connector.model.tiny_configs import (
    change_later,
    config_of,
    differing,
    make_model,
    namespace_of,
)

OLD, NEW = "1" * 40, "2" * 40
"""Commits in the Hub."""


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def other(tmp_path: Path, model: Path) -> Path:
    """Files of the same names, sizes and modification times, made later."""
    folder = tmp_path / "other"
    make_model(folder, rope_theta=20000.0)
    rewrite(folder / "model.safetensors", since=model / "model.safetensors")
    return folder


def rewrite(file: Path, since: Path | None = None) -> None:
    """Change a byte, and restore the modification time. Again, until the clock of the file system
    has gone on."""
    before, last = file.stat(), (since or file).stat().st_ctime_ns
    for number in itertools.count(1):
        with file.open("r+b") as changed:
            changed.write(bytes([number % 251]))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        if file.stat().st_ctime_ns != last:
            break
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def kind(namespace: Namespace, part: str = "model") -> str:
    found: str = namespace.fields[part]["weights"]["kind"]
    return found


def swap(model: Path, other: Path) -> None:
    model.rename(model.with_name("previous"))
    other.rename(model)


def swap_the_configuration(model: Path, other: Path) -> None:
    (other / "config.json").replace(model / "config.json")


def add_weights(model: Path, other: Path) -> None:
    (other / "model.safetensors").rename(model / "model-2.safetensors")


def remove_weights(model: Path, other: Path) -> None:
    (model / "chat.safetensors").unlink()


def link_weights(model: Path, other: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(other / "model.safetensors")


def edit_the_configuration(model: Path, other: Path) -> None:
    edited = (model / "config.json").read_text().replace("10000.0", "20000.0")
    change_later(model / "config.json", lambda file: file.write_text(edited))


@pytest.mark.parametrize(
    "change",
    [
        swap,
        swap_the_configuration,
        add_weights,
        remove_weights,
        link_weights,
        lambda model, other: rewrite(model / "model.safetensors"),
        edit_the_configuration,
    ],
    ids=["folder", "configuration", "added", "removed", "linked", "rewritten", "edited"],
)
def test_files_replaced_while_the_model_is_loaded_are_not_its_identity(
    change: Callable[[Path, Path], Any],
    model: Path,
    other: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM has read the configuration, and perhaps the weights, when the files change. The next
    server reads the new files."""
    (model / "chat.safetensors").write_bytes(b"more weights")
    running = config_of(model)
    change(model, other)
    stored, fresh = namespace_of(running), namespace_of(config_of(model))
    assert (kind(stored), kind(fresh)) == ("changed", "files")
    assert stored.digest != fresh.digest
    assert sum("it is not known which version" in line for line in caplog.messages) == 1


def test_a_repointed_link_is_noticed(model: Path, other: Path, tmp_path: Path) -> None:
    """Neither the old files nor the new ones have changed."""
    link, following = tmp_path / "current", tmp_path / "next"
    link.symlink_to(model)
    running = config_of(link)
    following.symlink_to(other)
    following.replace(link)
    stored, fresh = namespace_of(running), namespace_of(config_of(link))
    assert (kind(stored), kind(fresh)) == ("changed", "files")
    assert stored.digest != fresh.digest


def test_a_draft_model_that_changes_is_noticed(model: Path, tmp_path: Path) -> None:
    draft = make_model(tmp_path / "draft", num_hidden_layers=1)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    running = config_of(model, speculative_config=speculative)
    rewrite(draft / "model.safetensors")
    stored = namespace_of(running)
    assert (kind(stored), kind(stored, "draft")) == ("files", "changed")
    assert stored != namespace_of(config_of(model, speculative_config=speculative))


def test_a_normal_start_keeps_its_namespace(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other files may come and go, and every process that gets the configuration agrees."""
    (model / "README.md").write_text("old")
    running = config_of(model)
    ranks = [running, pickle.loads(pickle.dumps(running))]
    (model / "README.md").write_text("new")
    (model / "server.log").write_text("line")
    (model / ".lock").touch()
    (model / "folder").mkdir()
    model.with_name("beside.safetensors").touch()
    spaces = [namespace_of(each) for each in (*ranks, config_of(model))]
    assert len({each.digest for each in spaces}) == 1
    assert kind(spaces[0]) == "files"
    assert not [line for line in caplog.messages if "not known" in line]


def test_ranks_agree_and_starts_do_not(model: Path) -> None:
    """Even under one ``engine_id``, two starts whose files have changed share nothing."""

    def start() -> Namespace:
        running = config_of(model, engine="one name")
        rewrite(model / "model.safetensors")
        ranks = [running, pickle.loads(pickle.dumps(running))]
        one, two = map(namespace_of, ranks)
        assert differing(one, two) == []
        return one

    first, second = start(), start()
    assert (kind(first), kind(second)) == ("changed", "changed")
    assert "model.weights.engine" in differing(first, second)


# -- without a record ----------------------------------------------------------------------------


def without_record(config: VllmConfig) -> VllmConfig:
    """As in a process whose first process did not load the plugin."""
    del vars(config.model_config)[RECORD]
    return config


def on_another_machine(config: VllmConfig) -> VllmConfig:
    """As in a worker that Ray has started elsewhere, with a copy of the files."""
    record = vars(config.model_config)[RECORD]
    states = {path: state | {"files": {}} for path, state in record["states"].items()}
    vars(config.model_config)[RECORD] = record | {"machine": "another", "states": states}
    return config


def a_day_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that began a day later."""
    began = files_at_start._began() + 24 * 3600
    monkeypatch.setattr(files_at_start, "_began", lambda: began)


def test_without_a_record_only_settled_files_are_trusted(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = namespace_of(config_of(model))
    assert kind(namespace_of(without_record(config_of(model)))) == "changed"
    assert "VLLM_PLUGINS" in caplog.text
    a_day_later(monkeypatch)
    assert namespace_of(without_record(config_of(model))) == right


def test_the_time_of_a_mount_does_not_count(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of a file system may be as new as its mount. Any other folder may have been moved
    to its place."""
    running = without_record(config_of(model))
    newest = max(file.stat().st_ctime for file in model.iterdir())
    while model.stat().st_ctime <= newest:  # until the clock of the file system has gone on
        model.touch()
    began = (newest + model.stat().st_ctime) / 2 + files_at_start.SETTLED_S
    monkeypatch.setattr(files_at_start, "_began", lambda: began)
    assert kind(namespace_of(running)) == "changed"
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == model)
    assert kind(namespace_of(running)) == "files"


def test_without_a_record_no_worker_under_ray_trusts_its_files(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy on another machine may be too new."""

    def under_ray(config: VllmConfig) -> VllmConfig:
        config.parallel_config.distributed_executor_backend = "ray"
        return config

    right = namespace_of(config_of(model))
    running = under_ray(without_record(config_of(model)))
    here = namespace_of(running)
    a_day_later(monkeypatch)
    there = namespace_of(pickle.loads(pickle.dumps(running)))
    assert (kind(here), differing(here, there)) == ("changed", [])
    assert namespace_of(under_ray(config_of(model))) == right
    assert namespace_of(without_record(config_of(model))) == right


def test_workers_on_other_machines_compare_nothing(model: Path) -> None:
    """Their files may have just been copied. They must agree with the others."""
    right = namespace_of(config_of(model))
    assert namespace_of(on_another_machine(config_of(model))) == right


def test_the_start_of_a_process_is_on_the_clock_of_files(tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    program = f"from {files_at_start.__name__} import _began; print(_began())"
    first.touch()
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    last.touch()
    assert first.stat().st_ctime - 1 < float(output) < last.stat().st_ctime + 1


def test_a_folder_with_too_many_files_is_trusted_once_it_has_settled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = namespace_of(config_of(model))
    monkeypatch.setattr(files_at_start, "ENTRIES_MAX", 1)
    assert kind(namespace_of(config_of(model))) == "changed"
    a_day_later(monkeypatch)
    assert namespace_of(config_of(model)) == right


def test_a_training_that_writes_below_the_model_does_not_change_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are too many files in subfolders for a record, but their model does not read them."""
    right = namespace_of(config_of(model))
    monkeypatch.setattr(files_at_start, "ENTRIES_MAX", len(list(model.iterdir())))
    (model / "checkpoint-1").mkdir()
    (model / "checkpoint-1" / "model.safetensors").write_bytes(b"weights")
    running = config_of(model)
    (model / "checkpoint-2").mkdir()
    (model / "checkpoint-2" / "model.safetensors").write_bytes(b"weights")
    assert namespace_of(running) == right
    reading = Source(str(model), model, weights_in(model), subfolders=True)
    assert "checkpoint-2" in changed_file(running.model_config, reading)
    (model / "model-2.safetensors").write_bytes(b"weights")
    assert kind(namespace_of(running)) == "changed"


def test_folders_that_the_model_does_not_read_are_not_listed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be large. The first process does not know yet what the model reads."""
    (model / "folder" / "inner").mkdir(parents=True)
    listed, walk = [], os.walk

    def listing(top: Path) -> Iterator[Any]:
        for each in walk(top):
            listed.append(Path(each[0]))
            yield each

    running = config_of(model)
    monkeypatch.setattr(os, "walk", listing)
    assert kind(namespace_of(running)) == "files"
    assert kind(namespace_of(without_record(running))) == "changed"
    assert set(listed) == {model}


def test_separate_weights_are_recorded(model: Path, other: Path) -> None:
    running = config_of(model, model_weights=str(other))
    assert kind(namespace_of(running)) == "files"
    rewrite(other / "model.safetensors")
    assert kind(namespace_of(running)) == "changed"


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "unrecorded"])
def test_the_log_says_if_only_the_inode_has_changed(
    is_recorded: bool, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have been rewritten, but more often its owner was set."""

    def logged(change: Callable[[Path], Any]) -> str:
        running = config_of(model)
        change_later(model / "model.safetensors", change)
        caplog.clear()
        stored = namespace_of(running if is_recorded else without_record(running))
        assert kind(stored) == "changed"
        return caplog.text

    assert "only its inode" in logged(lambda weights: weights.chmod(0o600))
    assert "only its inode" not in logged(lambda weights: weights.write_bytes(b"other weights"))


def test_weights_in_folders_count_for_models_that_read_them(model: Path) -> None:
    (model / "more").mkdir()
    weights = model / "more" / "model.safetensors"
    weights.write_bytes(b"weights")
    running = config_of(model).model_config

    def change(subfolders: bool) -> str:
        source = Source(str(model), model, weights_in(model), subfolders=subfolders)
        return changed_file(running, source)

    assert change(True) == ""
    rewrite(weights)
    assert change(True).startswith(f"{weights} has changed")
    assert change(False) == ""


# -- the Hub's cache -----------------------------------------------------------------------------


def add_to_hub(cache: Path, commit: str, name: str, content: Path, blob: str = "") -> Path:
    """Add a file to a snapshot, as a link if ``blob`` is given; the branch becomes this commit."""
    home = cache / "models--org--tiny"
    snapshot = home / "snapshots" / commit
    for folder in (home / "refs", home / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    file = home / "blobs" / blob if blob else snapshot / name
    file.write_bytes(content.read_bytes())
    if blob:
        (snapshot / name).symlink_to(Path("../../blobs") / blob)
    (home / "refs" / "main").write_text(commit)
    return snapshot


def of_branch(config: VllmConfig, revision: str | None) -> VllmConfig:
    """The same configuration, given by the name of the repository."""
    config.model_config.model = "org/tiny"
    config.model_config.revision = revision
    return config


@pytest.mark.parametrize("blob", ["a" * 64, ""], ids=["links", "files"])
def test_files_may_be_downloaded_while_the_model_is_loaded(
    blob: str, model: Path, tmp_path: Path
) -> None:
    hub = tmp_path / "hub"
    snapshot = add_to_hub(hub, OLD, "config.json", model / "config.json")
    first = config_of(snapshot)
    add_to_hub(hub, OLD, "model.safetensors", model / "model.safetensors", blob)
    assert namespace_of(first) == namespace_of(config_of(snapshot))
    assert kind(namespace_of(first)) == "files"


def test_a_branch_that_moves_is_the_commit_that_vllm_has_resolved(
    model: Path, other: Path, tmp_path: Path
) -> None:
    hub = tmp_path / "hub"
    for name in ("config.json", "model.safetensors"):
        snapshot = add_to_hub(hub, OLD, name, model / name)
    resolved = ResolvedRevision(OLD, None, "org/tiny", "model")
    running = of_branch(config_of(snapshot, download_dir=str(hub)), resolved)
    before = namespace_of(running)
    assert before.fields["model"]["revision"] is None, "as without a connection to the Hub"
    for name in ("config.json", "model.safetensors"):
        moved = add_to_hub(hub, NEW, name, other / name)
    assert find_model("org/tiny", None, str(hub)) == moved
    assert namespace_of(running) == before
    assert kind(before) == "files"
    fresh = of_branch(
        config_of(moved, download_dir=str(hub)), ResolvedRevision(NEW, None, "org/tiny", "model")
    )
    assert differing(before, namespace_of(fresh)) == [
        "model.files.config.json",
        "model.weights.digest",
    ]


def test_a_branch_that_vllm_could_not_resolve_must_not_move(
    model: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    for name in ("config.json", "model.safetensors"):
        snapshot = add_to_hub(hub, OLD, name, model / name)
    running = of_branch(config_of(snapshot, download_dir=str(hub)), "main")
    assert kind(namespace_of(running)) == "files"
    for name in ("config.json", "model.safetensors"):
        add_to_hub(hub, NEW, name, other / name)
    assert kind(namespace_of(running)) == "changed"


def test_a_branch_that_vllm_could_not_resolve_is_trusted_once_it_has_settled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download folder is not known yet when files are recorded."""
    hub = tmp_path / "hub"
    for name in ("config.json", "model.safetensors"):
        add_to_hub(hub, OLD, name, model / name)

    def start() -> Namespace:
        return namespace_of(of_branch(config_of(model, download_dir=str(hub)), None))

    assert kind(start()) == "changed"
    a_day_later(monkeypatch)
    assert kind(start()) == "files"


def test_the_commit_of_another_repository_is_not_used(model: Path, tmp_path: Path) -> None:
    snapshot = add_to_hub(tmp_path, OLD, "config.json", model / "config.json")
    elsewhere = ResolvedRevision(NEW, "main", "org/other", "model")
    assert find_model("org/tiny", elsewhere, str(tmp_path)) == snapshot
    assert find_model("org/tiny", ResolvedRevision(NEW, "main"), str(tmp_path)) is None


def test_the_configuration_of_a_model_with_a_download_folder_counts(
    model: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM downloads only the weights into that folder."""
    hub, weights = tmp_path / "hub", tmp_path / "weights"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    add_to_hub(weights, OLD, "model.safetensors", model / "model.safetensors", "a" * 64)
    snapshot = add_to_hub(hub, OLD, "config.json", model / "config.json")
    resolved = ResolvedRevision(OLD, None, "org/tiny", "model")
    config = of_branch(config_of(snapshot, download_dir=str(weights)), resolved)
    before = namespace_of(config)
    assert kind(before) == "files"
    assert list(before.fields["model"]["config_files"]) == ["config.json"]


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("beside", [False, True], ids=["model", "folder"])
def test_the_defaults_of_generation_are_compared(
    beside: bool, changed: bool, model: Path, tmp_path: Path
) -> None:
    """For models whose code reads them."""
    make_model(model, **LLAMA4 | {"max_position_embeddings": 131072})
    folder = tmp_path if beside else model
    file = folder / "generation_config.json"
    file.write_text("{}")
    given = {"generation_config": str(folder)} if beside else {}
    running = config_of(model, **given)
    if changed:
        rewrite(file)
    assert kind(namespace_of(running)) == ("changed" if changed else "files")


# -- the plugin ----------------------------------------------------------------------------------


def test_records_are_made_once_and_name_no_class_of_ours(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Processes without kvtiers can read them."""
    caplog.set_level(logging.INFO)
    load_general_plugins()
    create = vars(ModelConfig)["__post_init__"]
    register()
    assert vars(ModelConfig)["__post_init__"] is create
    record = vars(config_of(model).model_config)[RECORD]
    assert record["states"][str(model)]["whole"]
    assert b"offload" not in pickle.dumps(record)
    assert not [line for line in caplog.messages if "were not recorded" in line]
