"""Tests that no server is stopped by names of vLLM that only ``kvtiers doctor`` needs."""

from __future__ import annotations

from offload.connector.contract.declared import declared
from offload.connector.contract.snapshots import load
from tests.imports import imports_of, name_of, python_files

PACKAGE = "offload.connector.compat.doctor"


def test_no_module_of_a_server_imports_it() -> None:
    users = [
        name_of(path)
        for path in python_files("offload")
        if any(name.startswith(PACKAGE) for name in imports_of(path))
    ]
    assert "offload/connector/model/probe.py" in users
    assert [user for user in users if declared().runs_in_server(user)] == []


def test_its_names_are_not_needed_by_a_server() -> None:
    """A version of vLLM that has moved them again is not refused."""
    planning = {
        (0, 32): "vllm.v1.core.kv_cache_utils:get_kv_cache_configs",
        (0, 33): "vllm.v1.core.kv_cache_planning:get_kv_cache_configs",
    }
    assert not any(load(version).needs[name].in_server for version, name in planning.items())
