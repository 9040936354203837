"""Every configuration, option, request and pip command that the documentation prints is accepted.

Commands in console blocks run in ``tests/offload/cli/test_guide.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.config.kv_transfer_config import EXTRA, NAMES, role_problems
from offload.config.schema import parse_config
from offload.errors import ConfigError
from offload.requests.parse_options import parse_controls, parse_hints
from policies.registry import make_policy
from tests.test_docs import PAGES, ROOT, name_of, prose_of

TIERS = (
    {"type": "lmdb", "path": "/var/cache/kv", "capacity": "1TiB"},
    {"type": "file", "path": "/var/cache/kv", "capacity": "1TiB"},
    {"type": "mooncake", "master": "10.0.0.1:50051", "segment": "1GiB"},
)
ANSWERS = ("success", "kvtiers_report")
"""Names that a server sends in an answer."""
WRONG_ON_PURPOSE = ('{"kvtier": {"no_store": true}}', '{"no_store": true}')
NOT_HERE = {"my_policy:MruPolicy": "the guide's: tests/policies/test_guide.py"}


def blocks_of(page: Path) -> Iterator[tuple[str, Any]]:
    """Text and value of every block of JSON. ``...`` stands for what is left out."""
    for text in re.findall(r"^ *```json\n(.*?)^ *```", page.read_text(), re.S | re.M):
        whole = re.sub(r",\s*\.\.\.", "", text.strip())
        yield text, json.loads(whole if whole.startswith("{") else f"{{{whole}}}")


def spans_of(page: Path) -> Iterator[tuple[str, Any]]:
    """Text and value of every object or option in the running text."""
    for match in re.finditer(r"(`{1,2})(?!`)(.+?)\1", prose_of(page), re.S):
        text = " ".join(match[2].split())
        if re.match(r'\{"|"\w+": ', text) and "..." not in text and ": path" not in text:
            yield text, json.loads(text if text.startswith("{") else f"{{{text}}}")


def problems_of(value: dict[str, Any]) -> list[str]:
    """The reason why no part of a configuration accepts this."""
    if value.get("kv_connector") == "OffloadingConnector" or "cpu_bytes_to_use" in value:
        return []  # vLLM's; tests/offload/connector/test_secondary_tier.py
    if "kv_connector" in value:
        roles = [str(problem) for problem in role_problems(value.get("kv_role"))]
        return roles + ([] if value["kv_connector"] in NAMES else ["another connector"])
    if EXTRA in value:
        return problems_of(value[EXTRA])
    if "kv_transfer_params" in value or "kvtiers" in value:
        given = value.get("kv_transfer_params", value)
        wrong = parse_hints(given)[1] + parse_controls(given, ["cpu", "lmdb"])[1]
        return [] if any(name in given for name in ANSWERS) else wrong
    if "name" in value:
        make_policy(value)
        return []
    places: list[dict[str, Any]] = [value, {"cpu": value}]
    tiers = [tier for tier in TIERS if value.get("type", tier["type"]) == tier["type"]]
    places += [{"tiers": [tier | value]} for tier in tiers]
    found = []
    for extra in places:
        try:
            parse_config({"cpu": {"capacity": "1GiB"}} | extra)
        except ConfigError as error:
            found += [str(problem) for problem in error.problems]
        else:
            return []
    return found


def policies_in(value: Any) -> Iterator[Any]:
    """Every policy that a configuration names."""
    if isinstance(value, dict):
        yield from [value["policy"]] if "policy" in value else []
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from policies_in(inner)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_configurations_and_requests_are_accepted(page: Path) -> None:
    for text, value in [*blocks_of(page), *spans_of(page)]:
        if text in WRONG_ON_PURPOSE or set(value) & set(ANSWERS):
            continue
        assert problems_of(value) == [], text
        for policy in policies_in(value):
            name = policy["name"] if isinstance(policy, dict) else policy
            if name not in NOT_HERE:
                make_policy(policy)


def test_wrong_examples_are_detected() -> None:
    assert problems_of({"verify": "devcie"})
    assert problems_of({"sharde": True})
    assert problems_of({"kv_transfer_params": {"kvtiers": {"pin": 600}}})
    assert problems_of({"kv_connector": "KvTierConnector", "kv_role": "kv_both"})
    with pytest.raises(ValueError, match="ghosts"):
        problems_of({"name": "arc", "ghosts": 1000})


def test_the_examples_are_found() -> None:
    found = [text for page in PAGES for text, _ in [*blocks_of(page), *spans_of(page)]]
    assert len(found) > 30


def test_no_page_tells_pip_to_install_a_package_of_this_name() -> None:
    """The package is on no index, and a stranger could take its name there."""
    sources = [*PAGES, ROOT / "Dockerfile"]
    for folder in ("offload", "tiers", "policies", "demo", "bench", "scripts"):
        sources += [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.sh")]
    found = [
        f"{path}: {line}"
        for path in sources
        for line in re.findall(r"pip install [^`\n;]+", path.read_text())
        if re.search(r"(?<![/\w.-])kvtiers(?![/\w-])", line)
    ]
    assert found == []
