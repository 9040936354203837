"""Names, paths, entry points, options; and what is said when one of them is wrong."""

from __future__ import annotations

import sys
import textwrap

import pytest

from policies.adaptive import AdaptivePolicy
from policies.admission import SecondUse
from policies.arc import ArcPolicy
from policies.base import AdmissionPolicy, EvictionPolicy
from policies.lru import LruPolicy
from policies.registry import (
    DEFAULT_CPU_POLICY,
    DEFAULT_TIER_POLICY,
    PolicyImportError,
    PolicyOptionError,
    PolicySpecError,
    UnknownPolicyError,
    admission_names,
    make_admission,
    make_policy,
    policy_names,
    policy_options,
)


@pytest.mark.parametrize("name", policy_names())
def test_every_name_makes_an_empty_policy(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, EvictionPolicy)
    assert len(policy) == 0


@pytest.mark.parametrize("name", admission_names())
def test_every_admission_name_makes_one(name: str) -> None:
    options = {"bytes_per_s": 1.0} if name == "write-budget" else {}
    assert isinstance(make_admission({"name": name, **options}), AdmissionPolicy)


def test_defaults_are_known() -> None:
    assert isinstance(make_policy(DEFAULT_CPU_POLICY), AdaptivePolicy)
    assert isinstance(make_policy(DEFAULT_TIER_POLICY), LruPolicy)


def test_a_class_can_be_named_by_its_module() -> None:
    assert isinstance(make_policy("policies.arc:ArcPolicy"), ArcPolicy)
    assert isinstance(make_admission("policies.admission:SecondUse"), SecondUse)


def test_options_reach_the_constructor() -> None:
    admission = make_admission({"name": "second-use", "window": 1})
    assert policy_options("slru") == ["protected_share"]
    info = None
    assert [admission.admit(key, info) for key in "abab"] == [False, False, False, False]


@pytest.fixture
def foreign_package(tmp_path, monkeypatch):
    """An installed distribution with an entry point, as pip would lay it down."""
    (tmp_path / "acme_policies.py").write_text(
        textwrap.dedent(
            """
            from policies.lru import LruPolicy
            class Mine(LruPolicy):
                def __init__(self, speed: int = 1) -> None:
                    super().__init__()
                    self.speed = speed
            """
        )
    )
    info = tmp_path / "acme_policies-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-policies\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[kvtiers.policies]\nmine = acme_policies:Mine\nlru = acme_policies:Mine\n"
        "broken = acme_nothing:Mine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("acme_policies", None)


@pytest.mark.usefixtures("foreign_package")
def test_entry_points_of_other_packages_are_found() -> None:
    assert make_policy({"name": "mine", "speed": 3}).speed == 3
    assert "mine" in policy_names()
    assert type(make_policy("lru")) is LruPolicy  # nobody replaces a built-in name
    with pytest.raises(PolicyImportError, match=r'cannot import policy "broken" \(acme_nothing'):
        make_policy("broken")


BAD = [
    ("lfru", UnknownPolicyError, 'unknown policy "lfru". Did you mean "lru"? Available: lru, '),
    (
        "acme.pol:Foo",
        PolicyImportError,
        'cannot import policy "acme.pol:Foo": No module named \'ac',
    ),
    (
        "policies.lru:LruPolcy",
        PolicyImportError,
        'cannot import policy "policies.lru:LruPolcy": module policies.lru has no LruPolcy. '
        'Did you mean "policies.lru:LruPolicy"?',
    ),
    (
        "policies.base:EntryInfo",
        PolicyImportError,
        'policy "policies.base:EntryInfo" is not a subclass of EvictionPolicy.',
    ),
    (
        "policies.base:EvictionPolicy",
        PolicyImportError,
        'policy "policies.base:EvictionPolicy" does not implement __len__, clear, insert, remove, '
        "touch, victims.",
    ),
    (
        {"name": "slru", "protected": 0.5},
        PolicyOptionError,
        'policy "slru" has no option "protected". Did you mean "protected_share"? '
        "Its options are: protected_share.",
    ),
    ({"name": "lru", "x": 1}, PolicyOptionError, "It takes no options."),
    ({"nome": "lru"}, PolicySpecError, 'policy must be a name, "module:Class", or {"name": ...}'),
    (7, PolicySpecError, "(got 7)"),
]


@pytest.mark.parametrize(("spec", "error", "text"), BAD)
def test_a_bad_spec_says_what_to_write(spec, error, text) -> None:
    with pytest.raises(error) as caught:
        make_policy(spec)
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_constructor_that_refuses_is_quoted() -> None:
    with pytest.raises(PolicyOptionError) as caught:
        make_admission({"name": "write-budget", "bytes_per_s": -1})
    assert "bytes_per_s must be positive (got -1). Its options are: bytes_per_s, burst_bytes." in (
        str(caught.value)
    )
