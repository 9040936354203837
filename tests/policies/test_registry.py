"""Names, paths, entry points and options of policies, and the messages when one of them is
wrong."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import get_args

import pytest

from policies.adaptive import AdaptivePolicy
from policies.admission import SecondUse
from policies.base import AdmissionPolicy, EntryInfo, EvictionPolicy
from policies.eviction.arc import ArcPolicy
from policies.eviction.lru import LruPolicy
from policies.options import Range
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
)
from policies.simulation.simulator import simulate
from policies.testing import synthetic_trace


@pytest.mark.parametrize("name", policy_names())
def test_every_name_gives_an_empty_policy(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, EvictionPolicy)
    assert len(policy) == 0


@pytest.mark.parametrize("name", admission_names())
def test_every_admission_name_gives_a_policy(name: str) -> None:
    options = {"bytes_per_s": 1.0} if name == "write-budget" else {}
    assert isinstance(make_admission({"name": name, **options}), AdmissionPolicy)


def test_defaults_are_known() -> None:
    assert isinstance(make_policy(DEFAULT_CPU_POLICY), AdaptivePolicy)
    assert isinstance(make_policy(DEFAULT_TIER_POLICY), LruPolicy)


def test_a_class_can_be_named_by_its_module() -> None:
    assert isinstance(make_policy("policies.eviction.arc:ArcPolicy"), ArcPolicy)
    assert isinstance(make_admission("policies.admission:SecondUse"), SecondUse)


def test_options_reach_the_constructor() -> None:
    admission = make_admission({"name": "second-use", "window": 1})
    info = None
    assert [admission.admit(key, info) for key in "abab"] == [False, False, False, False]


@pytest.fixture
def installed_package(tmp_path, monkeypatch):
    """An installed distribution with an entry point, as pip would install it."""
    (tmp_path / "acme_policies.py").write_text(
        textwrap.dedent(
            """
            from policies.eviction.lru import LruPolicy
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


@pytest.mark.usefixtures("installed_package")
def test_entry_points_of_other_packages_are_found() -> None:
    assert make_policy({"name": "mine", "speed": 3}).speed == 3
    assert "mine" in policy_names()
    assert type(make_policy("lru")) is LruPolicy  # no package can replace a built-in name
    with pytest.raises(PolicyImportError, match=r'cannot import policy "broken" \(acme_nothing'):
        make_policy("broken")


BAD = [
    ("lfru", UnknownPolicyError, 'unknown policy "lfru". Did you mean "lru"? Available: lru, '),
    (
        "acme.pol:Foo",
        PolicyImportError,
        "cannot import policy \"acme.pol:Foo\": No module named 'acme'. Install it, or add its "
        "folder to PYTHONPATH.",
    ),
    (
        "policies.eviction.lru:LruPolcy",
        PolicyImportError,
        'cannot import policy "policies.eviction.lru:LruPolcy": module policies.eviction.lru has '
        'no LruPolcy. Did you mean "policies.eviction.lru:LruPolicy"?',
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
def test_a_bad_spec_gets_a_message_with_the_remedy(spec, error, text) -> None:
    with pytest.raises(error) as caught:
        make_policy(spec)
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_the_message_quotes_a_constructor_that_refuses() -> None:
    with pytest.raises(PolicyOptionError) as caught:
        make_policy({"name": f"{__name__}:ThirdParty", "speed": 13})
    assert "with speed=13: 13 brings bad luck. Its options are: speed, name, how." in str(
        caught.value
    )


# -- values of options -------------------------------------------------------------------------


def options_of_ours() -> list[tuple[str, str, Range | None]]:
    """Policy, option and range of all built-in policies."""
    found = []
    for names, base, make in (
        (policy_names(), EvictionPolicy, make_policy),
        (admission_names(), AdmissionPolicy, make_admission),
    ):
        for name in names:
            options = {"bytes_per_s": 1.0} if name == "write-budget" else {}
            made = type(make({"name": name, **options}))
            assert issubclass(made, base)
            parameters = inspect.signature(made, eval_str=True).parameters
            found += [
                (name, option, _range_of(parameter.annotation))
                for option, parameter in parameters.items()
                if option != "kwargs"
            ]
    return found


def _range_of(annotation: object) -> Range | None:
    return next((each for each in get_args(annotation) if isinstance(each, Range)), None)


@pytest.mark.parametrize(("name", "option", "limits"), options_of_ours())
def test_every_option_has_a_range_and_works_at_its_ends(
    name: str, option: str, limits: Range | None
) -> None:
    assert limits is not None, "otherwise a request would reveal the wrong value"
    make = make_admission if name in admission_names() else make_policy
    whole = isinstance(limits.low, int) and option in WHOLE
    needed = {"bytes_per_s": 1.0} if name == "write-budget" else {}
    low = limits.low if not limits.above else (1 if whole else 1e-6)
    high = limits.high if limits.high < 1 << 28 else 1 << 20
    for value in (low, high):
        made = make({"name": name, **needed, option: value})
        if isinstance(made, EvictionPolicy):
            simulate(synthetic_trace(3), made, 90)
        else:
            assert made.admit(b"k", EntryInfo()) in (True, False)
    wrong = [limits.low - 1, "x", None, True, float("nan"), [1]]
    wrong += [limits.low] if limits.above else []
    wrong += [limits.high + 1] if limits.high < float("inf") else []
    wrong += [1.5] if whole else []
    for value in wrong:
        with pytest.raises(PolicyOptionError, match=f"{option} must be a ") as caught:
            make({"name": name, **needed, option: value})
        assert [one.name for one in caught.value.invalid] == [option]
        assert str(value)[:3] in str(caught.value)


WHOLE = {"capacity", "moves_at", "relearn_every", "window", "uses", "width"}


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(PolicyOptionError) as caught:
        make_policy({"name": "ttl", "ttl_s": -5, "hold_s": "long"})
    assert str(caught.value) == (
        'policy "ttl": ttl_s must be a number above 0 (got -5); hold_s must be a number of at '
        "least 0 (got 'long'). Its options are: ttl_s, hold_s."
    )


def test_a_number_larger_than_any_float_is_refused() -> None:
    with pytest.raises(PolicyOptionError, match="ttl_s must be a number above 0"):
        make_policy({"name": "ttl", "ttl_s": 10**400})


class ThirdParty(LruPolicy):
    """A third party's constructor: types without ranges, and some that are not checked."""

    def __init__(self, speed: int = 1, name: str = "", how: list[int] | None = None) -> None:
        super().__init__()
        if speed == 13:
            raise ArithmeticError("13 brings bad luck")
        self.given = (speed, name, how)


def test_types_that_a_third_party_policy_declares_are_checked() -> None:
    path = f"{__name__}:ThirdParty"
    assert make_policy(path).given == (1, "", None)
    assert make_policy({"name": path, "speed": -7, "how": "anything"}).given[0] == -7
    with pytest.raises(PolicyOptionError, match="speed must be a whole number"):
        make_policy({"name": path, "speed": "fast"})


class Ends(BaseException):
    """Not a subclass of ``Exception``."""


@pytest.mark.parametrize(
    "line",
    ["sys.exit(3)", "raise SystemExit", "raise KeyError(3)", "raise Ends", "raise Unprintable"],
)
@pytest.mark.parametrize("where", ["import", "constructor", "entry point"])
def test_a_policy_that_ends_the_process_is_refused(
    line: str, where: str, tmp_path, monkeypatch
) -> None:
    body = f"    def __init__(self): {line}" if where == "constructor" else "    pass"
    text = (
        f"import sys\nfrom policies.eviction.lru import LruPolicy\n"
        f"from {__name__} import Ends\nfrom tests.unprintable import Unprintable\n"
        f"class Mine(LruPolicy):\n{body}\n"
    )
    (tmp_path / "acme_ends.py").write_text(text + ("" if where == "constructor" else line + "\n"))
    info = tmp_path / "acme_ends-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-ends\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvtiers.policies]\nmine = acme_ends:Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = "mine" if where == "entry point" else "acme_ends:Mine"
    expected = PolicyOptionError if where == "constructor" else PolicyImportError
    try:
        with pytest.raises(expected, match=r"cannot be made|cannot import"):
            make_policy(spec)
    finally:
        sys.modules.pop("acme_ends", None)


def test_an_interrupt_is_not_treated_as_a_fault_of_the_policy(tmp_path, monkeypatch) -> None:
    (tmp_path / "acme_interrupted.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        make_policy("acme_interrupted:Mine")
