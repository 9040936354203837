"""The types of tiers, compared with the package's extras."""

import tomllib
from pathlib import Path

from offload.config.tier_types import TIER_TYPES

ROOT = Path(__file__).parent.parent.parent.parent


def test_the_package_that_a_message_names_is_that_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    packages = [each.package for each in TIER_TYPES.values() if each.package]
    assert packages
    for package in packages:
        assert [each.partition(";")[0] for each in extras[package.name]] == [package.requirement]
