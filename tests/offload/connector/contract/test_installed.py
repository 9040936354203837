"""The contract with the installed vLLM is complete and up to date, and breaks are detected."""

from __future__ import annotations

import ast
import json
import logging
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import offload.connector
from offload.connector.contract import at_start, calls, snapshots
from offload.connector.contract.__main__ import BREAKS, SAME, UNREADABLE, main
from offload.connector.contract.at_start import VersionError, check_installed, stopping
from offload.connector.contract.check import Checked, check
from offload.connector.contract.declared import declared
from offload.connector.contract.library import Library
from offload.connector.contract.snapshots import (
    Contract,
    contract_of,
    load,
    minor_of,
    snapshot_versions,
)
from offload.connector.contract.source import PackageSource, open_source
from offload.connector.plugin import end_if_wrong
from offload.connector.startup import ServerSetup
from tests.offload.connector.contract.sources import Edited

ROOT = Path(__file__).resolve().parents[4]
COMPAT = ROOT / "offload/connector/compat"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
MIXIN = "vllm/v1/worker/kv_connector_model_runner_mixin.py"
V1, V2 = "vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/kv_connector.py"
SCHEDULER, OUTPUT = "vllm/v1/core/sched/scheduler.py", "vllm/v1/core/sched/output.py"

PLANTED = {
    BASE: (
        ("num_computed_tokens: int,\n    ) -> tuple", "num_computed: int,\n    ) -> tuple"),
        ("WORKER = 1", "WORKER = 7"),
        ("self._connector_metadata", "self._meta"),
    ),
    MIXIN: (
        (
            "            if not defer_finalize:\n                kv_connector.wait_for_save()\n\n"
            "            transfer_results = kv_connector.get_transfer_results(\n"
            "                scheduler_output.finished_req_ids\n            )\n",
            "            transfer_results = kv_connector.get_transfer_results(\n"
            "                scheduler_output.finished_req_ids\n            )\n"
            "            if not defer_finalize:\n                kv_connector.wait_for_save()\n\n",
        ),
    ),
    V2: (
        (
            "        self.kv_connector.handle_preemptions(kv_connector_metadata)\n"
            "        self.kv_connector.bind_connector_metadata(kv_connector_metadata)\n",
            "        self.kv_connector.bind_connector_metadata(kv_connector_metadata)\n"
            "        self.kv_connector.handle_preemptions(kv_connector_metadata)\n",
        ),
    ),
    OUTPUT: (("new_block_ids_to_zero", "blocks_to_zero"),),
    "vllm/v1/core/kv_cache_utils.py": (
        ("def resolve_dcp_kv_block_size(", "def resolve_dcp_block_size("),
    ),
    "vllm/config/kv_transfer.py": (
        ('kv_load_failure_policy: Literal["recompute", "fail"] = "fail"',
         'kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"'),
    ),
    "vllm/v1/metrics/cache_hit_source.py": (('HOST = "host"', 'HOST = "cpu"'),),
    "vllm/distributed/kv_events.py": (('MEDIUM_CPU = "CPU"', 'MEDIUM_CPU = "HOST"'),),
}  # fmt: skip
"""By file: old text and new text. Each kind of break occurs at least once."""

NAMED = {
    "KVConnectorBase_V1.get_num_new_matched_tokens: parameter num_computed_tokens is gone "
    "(num_computed is new)": (True, "offload/connector/connector.py"),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole: member WORKER is 7, it "
    "was 1": (True, "offload/connector/connector.py"),
    "KVConnectorBase_V1._connector_metadata: is gone": (True, "offload/connector/connector.py"),
    "order of vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin."
    "_get_kv_connector_output": (True, "offload/connector/connector.py"),
    "order of vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.pre_forward": (
        True,
        "offload/connector/connector.py",
    ),
    "SchedulerOutput.new_block_ids_to_zero: is gone": (
        True,
        "offload/connector/scheduler/block_tables.py",
    ),
    "vllm.v1.core.kv_cache_utils:resolve_dcp_kv_block_size: is gone": (
        True,
        "offload/connector/model/layout.py",
    ),
    "KVTransferConfig.kv_load_failure_policy: is 'recompute', it was 'fail'": (
        False,
        "offload/connector/startup_checks.py",
    ),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource: member HOST is 'cpu', it was 'host'": (
        True,
        "offload/connector/connector.py",
    ),
    "vllm.distributed.kv_events:MEDIUM_CPU: is 'HOST', it was 'CPU'": (
        False,
        "offload/connector/scheduler/kv_events.py",
    ),
}
"""The name of each, whether it stops a server, and the file of ours that it affects."""


@cache
def installed() -> PackageSource:
    return open_source("installed")


@cache
def now() -> Contract:
    return contract_of(installed())


def same_minor() -> Contract:
    version = minor_of(installed().version())
    if version not in snapshot_versions():
        pytest.skip(f"no contract of {version} is kept")
    return load(version)


def test_the_kept_contract_is_that_of_the_installed_version() -> None:
    """If this fails after a change of our code, run ``python -m offload.connector.contract WHEEL
    --keep VERSION`` for each kept version (docs/versions.md)."""
    before = same_minor()
    assert now().facts == before.facts
    assert now().needs == before.needs
    assert (now().classes, now().modules) == (before.classes, before.modules)


@pytest.mark.parametrize(
    "path", sorted(COMPAT.rglob("v0_*.py")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_module_for_one_version_imports_what_that_version_has(path: Path) -> None:
    facts = load(minor_of(path.stem.removeprefix("v").replace("_", "."))).facts
    names = [
        f"{node.module}:{alias.name}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
    ]
    assert [name for name in names if facts.get(name) is None] == []


@cache
def planted() -> Checked:
    return check(Edited(installed(), PLANTED), minor_of(same_minor().version))


def test_each_break_that_is_planted_in_vllm_is_named_with_its_line() -> None:
    checked = planted()
    for text, (is_fatal, file) in NAMED.items():
        named = [each for each in checked.breaks if str(each).startswith(text)]
        assert named, f"{text}: not named in\n" + "\n".join(map(str, checked.breaks))
        assert named[0].is_fatal is is_fatal, text
        assert any(each.startswith(f"{file}:") for each in named[0].lines), (text, named[0])
        for each in named[0].lines:
            path, _, line = each.rpartition(":")
            assert int(line) <= len((snapshots.ours().read(path) or "").splitlines())


def test_a_start_detects_the_breaks_that_stop_the_whole_check() -> None:
    """The start does so without deriving uses and without parsing the runners."""
    before = same_minor()
    assert stopping(installed(), before) == []
    found = stopping(Edited(installed(), PLANTED), before)
    for text, (is_fatal, _) in NAMED.items():
        assert any(str(each).startswith(text) for each in found) is is_fatal, text


def test_call_orders_read_from_text_equal_those_of_the_parser() -> None:
    library = Library(installed())
    for order in declared().orders:
        node = calls.function_at(library, order.at)
        steps = calls.names_in_order(library, order.at, order.watch)
        if node is None:
            assert steps is None, order.at
            continue
        parsed = calls.order_of(node, order.watch)["steps"]
        assert steps == [name for name, _ in parsed], order.at
        assert steps or "sleep" in order.at or "wake" in order.at


def test_modules_are_split_as_the_parser_splits_them() -> None:
    library = Library(installed())
    for name in {at.partition(":")[0] for at in now().classes.values()} | {*now().modules}:
        module = library.module(name)
        assert module is not None
        tree = ast.parse(module.text)
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        expected = [node.name for node in tree.body if isinstance(node, kinds)]
        defined = {*expected}
        assert [each for each in module.outline.names if each in defined] == expected, name


# -- a start ---------------------------------------------------------------------------------


class Renamed(Edited):
    """The installed vLLM, presented as another version."""

    def version(self) -> str:
        return "9.9.1+cpu"


@pytest.fixture
def fresh_check(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    check_installed.cache_clear()
    monkeypatch.setattr(snapshots, "TESTED", (same_minor().version,))
    return monkeypatch


def test_a_tested_version_is_not_examined(fresh_check: pytest.MonkeyPatch) -> None:
    fresh_check.setattr(at_start, "stopping", None)
    assert check_installed() == ""


def test_an_unknown_version_is_used_and_logged(
    fresh_check: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_check.setattr(at_start, "open_source", lambda where: Renamed(installed(), {}))
    said = check_installed()
    assert said.startswith("vLLM 9.9.1 was not tested")
    assert same_minor().version in said
    setup = object.__new__(ServerSetup)  # the rest needs a server
    with caplog.at_level(logging.WARNING, "offload"), pytest.raises(AttributeError):
        setup.announce()
    assert f"kvtiers: {said}" in caplog.text
    check_installed.cache_clear()


def test_an_unknown_version_that_lacks_what_we_need_is_refused(
    fresh_check: pytest.MonkeyPatch,
) -> None:
    """The version is refused before our connector is imported, which may be impossible with such a
    version."""
    broken = Renamed(installed(), PLANTED)
    fresh_check.setattr(at_start, "open_source", lambda where: broken)
    with pytest.raises(VersionError) as refused:
        _ = offload.connector.OffloadConnector
    assert "vLLM 9.9.1 lacks what this version of kvtiers needs" in str(refused.value)
    assert f"Use vLLM {same_minor().version}" in str(refused.value)
    assert "SchedulerOutput.new_block_ids_to_zero: is gone" in str(refused.value)
    check_installed.cache_clear()


@pytest.mark.parametrize("connector", ["KvTiersConnector", "SomeOtherConnector"])
def test_the_first_process_of_a_server_refuses_such_a_version_with_one_message(
    connector: str, fresh_check: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process ends before anything is loaded. Servers with other connectors are not checked."""
    broken = Renamed(installed(), PLANTED)
    fresh_check.setattr(at_start, "open_source", lambda where: broken)
    extra = {"cpu": {"capacity": "64MiB"}}
    transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if connector == "KvTiersConnector":
        with pytest.raises(SystemExit) as ended:
            end_if_wrong(transfer)
        assert ended.value.code == 1
        assert capsys.readouterr().err.startswith("kvtiers: vLLM 9.9.1 lacks what this version")
    else:
        end_if_wrong(transfer)
        assert not capsys.readouterr().err
    check_installed.cache_clear()


def test_a_failing_check_does_not_stop_a_server(fresh_check: pytest.MonkeyPatch) -> None:
    fresh_check.setattr(at_start, "open_source", lambda where: Renamed(installed(), {}))

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    fresh_check.setattr(at_start, "stopping", fail)
    assert "could not be compared" in check_installed()
    check_installed.cache_clear()


def test_contracts_of_the_tested_versions_are_kept() -> None:
    for version in snapshots.TESTED:
        assert load(minor_of(version)).version == version


def test_the_oldest_kept_version_is_refused_by_its_contract() -> None:
    """0.31 has no ``CacheHitSource``, so that our connector cannot be imported there."""
    old, new = load((0, 31)), load((0, 32))
    gone = "vllm.v1.metrics.cache_hit_source:CacheHitSource"
    assert old.facts.get(gone) is None
    assert new.facts[gone] is not None
    assert new.needs[gone].in_server


# -- the command -----------------------------------------------------------------------------


def test_the_command_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from offload.connector.contract.__main__ import main; "
        "code = main(['installed', '--json']); "
        "assert not {'vllm', 'torch'} & sys.modules.keys(); sys.exit(code)"
    )
    same_minor()
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == SAME, ran.stderr
    said = json.loads(ran.stdout)
    assert said["breaks"] == []
    assert said["not_in_snapshot"] == []
    assert said["compared"] > 300


def test_the_command_reports_what_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offload.connector.contract.__main__.check", lambda *_: planted())
    assert main(["installed"]) == BREAKS
    said = capsys.readouterr().out
    assert "STOPS  SchedulerOutput.new_block_ids_to_zero: is gone" in said
    assert "offload/connector/scheduler/block_tables.py:" in said


def test_the_command_reports_what_it_cannot_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such.whl"]) == UNREADABLE
    assert "there is no such file" in capsys.readouterr().err
    assert main(["installed", "--against", "0.1"]) == UNREADABLE
    assert "no contract of vLLM 0.1 is kept" in capsys.readouterr().err


def test_the_page_on_versions_shows_a_true_comparison() -> None:
    """The number of facts, and differences between two kept contracts. The whole output needs the
    wheel of 0.31."""
    page = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    shown = re.findall(r"^vLLM (\S+) \(.*\), compared with (\S+): (\d+) things", page, re.M)
    [(version, against, count)] = shown
    before, now = load(minor_of(against)), load(minor_of(version))
    assert int(count) == len(before.facts)
    gone = re.findall(r"^(?:STOPS |breaks) (\S+): is gone\n +(\S+):\d+$", page, re.M)
    assert gone
    for name, file in gone:
        keys = [key for key in before.facts if key.endswith(name)]
        assert keys, name
        assert not [key for key in keys if now.facts.get(key) is not None], name
        assert (ROOT / file).is_file()
