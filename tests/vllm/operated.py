"""Runs the command line beside a serving engine: checks what it sees, and that it disturbs
nothing."""

from __future__ import annotations

from pathlib import Path

from demo.server import VllmServer
from tests.offload.cli.rank_folders import kvtiers


def operate(server: VllmServer, root: Path, export: Path) -> None:
    """Inspect the store of a running server with every command."""
    looked = kvtiers("inspect", root, "--json")
    [namespace] = looked.json["namespaces"]
    [found] = namespace["rank_folders"]
    assert looked.code == 0
    assert found["records"] > 0
    assert namespace["model"]
    assert found["owner_pid"] > 0
    assert found["capacity_bytes"] > 0
    assert found["ages"]["1h"] == found["records"]
    verified = kvtiers("verify", root, "--json", "--rate", "0")
    assert (verified.code, verified.json["ok"]) == (0, True)
    [scrubbed] = verified.json["rank_folders"]
    assert scrubbed["good"] > 0
    assert scrubbed["owner_pid"] == found["owner_pid"]
    exported = kvtiers("export", root, export, "--json", "--overwrite")
    assert exported.json["rank_folders"][0]["records"] > 0
    refused = kvtiers("clear", root, "--all", "--yes")
    assert refused.code == 1
    assert f"in use by pid {found['owner_pid']}" in refused.err
    refused = kvtiers("import", export, root)
    assert refused.code == 1
    assert f"in use by pid {found['owner_pid']}" in refused.err
    seen = kvtiers("top", f"127.0.0.1:{server.port}", "--json", "--interval", "0.5").json
    tiers = {tier["name"]: tier for tier in seen["tiers"]}
    assert tiers.keys() == {"cpu", "lmdb"}
    assert all(tier["resident_chunks"] > 0 for tier in tiers.values())
    assert all(0 < tier["used_ratio"] <= 1 for tier in tiers.values())
    assert tiers["lmdb"]["breaker"] == "closed"
    assert tiers["lmdb"]["loaded_tokens"] > 0
    assert seen["hit_ratio_since_start"] > 0
    text = kvtiers("top", f"127.0.0.1:{server.port}", "--once", "--interval", "0").out
    assert "lmdb" in text


def operate_at_rest(root: Path, export: Path, copy: Path) -> None:
    """Check, after the server has ended, that everything is intact, and can be exported and
    cleared."""
    assert kvtiers("verify", root, "--json").json["ok"]
    imported = kvtiers("import", export, copy, "--capacity", "64MiB", "--json")
    assert imported.json["complete"], imported.out
    assert kvtiers("verify", copy, "--json").json["ok"]
    assert kvtiers("clear", root, "--all", "--yes").code == 0
    assert {path.name for path in root.iterdir()} == {".kvtiers.lock"}
