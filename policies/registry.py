"""Finds policies by name: a built-in name, ``module:Class``, or an entry point of another package.

Other packages offer a policy under a short name with an entry point in the group
``kvtiers.policies`` (eviction) or ``kvtiers.admission`` (admission):

    [project.entry-points."kvtiers.policies"]
    mine = "my_package.my_policy:MyPolicy"

A spec is ``"lru"``, ``"my_package.my_policy:MyPolicy"``, or a mapping ``{"name": <one of these>}``
whose other items are the options of the class's constructor. Built-in names take precedence, so
that no installed package can replace ``lru``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, TypeVar, cast

from policies.base import AdmissionPolicy, EvictionPolicy
from policies.options import InvalidOption, invalid_options
from policies.safe_text import safe_repr, safe_str

Spec = str | Mapping[str, Any]
P = TypeVar("P")

POLICY_GROUP = "kvtiers.policies"
ADMISSION_GROUP = "kvtiers.admission"

DEFAULT_CPU_POLICY = "adaptive"
DEFAULT_TIER_POLICY = "lru"
"""The default of lower tiers. A better policy there would only move hits between the tiers, so the
disk uses plain LRU."""

_POLICIES = {
    "lru": "policies.eviction.lru:LruPolicy",
    "leaf-lru": "policies.eviction.leaf_lru:LeafLruPolicy",
    "fifo": "policies.eviction.fifo:FifoPolicy",
    "lfu": "policies.eviction.lfu:LfuPolicy",
    "arc": "policies.eviction.arc:ArcPolicy",
    "2q": "policies.eviction.two_queue:TwoQueuePolicy",
    "slru": "policies.eviction.slru:SlruPolicy",
    "sieve": "policies.eviction.sieve:SievePolicy",
    "s3fifo": "policies.eviction.s3fifo:S3FifoPolicy",
    "wtinylfu": "policies.eviction.wtinylfu:WTinyLfuPolicy",
    "lirs": "policies.eviction.lirs:LirsPolicy",
    "gdsf": "policies.eviction.gdsf:GdsfPolicy",
    "ttl": "policies.eviction.ttl:TtlPolicy",
    "adaptive": "policies.adaptive:AdaptivePolicy",
}
_ADMISSIONS = {
    "all": "policies.admission:AdmitAll",
    "second-use": "policies.admission:SecondUse",
    "frequency": "policies.admission:FrequencyAdmission",
    "write-budget": "policies.admission:WriteBudget",
}


class PolicySpecError(ValueError):
    """Raised for a policy spec that does not name a policy. The message says what to write
    instead."""


class UnknownPolicyError(PolicySpecError):
    """Raised if no built-in policy and no entry point has this name."""


class PolicyImportError(PolicySpecError):
    """Raised if the module or class cannot be imported, or the class is not a policy."""


class PolicyOptionError(PolicySpecError):
    """Raised if the constructor does not take these options or values. ``invalid`` lists those
    with bad values; ``fix`` lists the valid options."""

    def __init__(self, text: str, invalid: Sequence[InvalidOption] = (), fix: str = "") -> None:
        super().__init__(text)
        self.invalid = tuple(invalid)
        self.fix = fix


def make_policy(spec: Spec) -> EvictionPolicy:
    """Make an eviction policy from a name or a mapping. Raises ``PolicySpecError``."""
    return _make(spec, EvictionPolicy, "policy", _POLICIES, POLICY_GROUP)  # type: ignore[type-abstract]  # any concrete subclass comes back


def make_admission(spec: Spec) -> AdmissionPolicy:
    """Make an admission policy from a name or a mapping. Raises ``PolicySpecError``."""
    return _make(spec, AdmissionPolicy, "admission policy", _ADMISSIONS, ADMISSION_GROUP)  # type: ignore[type-abstract]  # any concrete subclass comes back


def policy_names() -> list[str]:
    """Return the names that ``make_policy`` knows, built-in ones first."""
    return _names(_POLICIES, POLICY_GROUP)


def admission_names() -> list[str]:
    """Return the names that ``make_admission`` knows, built-in ones first."""
    return _names(_ADMISSIONS, ADMISSION_GROUP)


def _make(spec: Spec, base: type[P], noun: str, builtin: Mapping[str, str], group: str) -> P:
    name, options = _split(spec, noun)
    found = _find(name, noun, builtin, group)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PolicyImportError(f'{noun} "{name}" is not a subclass of {base.__name__}.')
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise PolicyImportError(f'{noun} "{name}" does not implement {missing}.')
    _check_options(name, noun, found, options)
    _check_values(name, noun, found, options)
    try:
        return found(**options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # any exception of a third-party constructor means a bad option here
        raise PolicyOptionError(
            f'{noun} "{name}" cannot be made with {_show(options)}: {_reason(error)}. '
            f"{_takes(found)}"
        ) from error


def _split(spec: Spec, noun: str) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    name = spec.get("name") if isinstance(spec, Mapping) else None
    if not isinstance(name, str):
        raise PolicySpecError(
            f'{noun} must be a name, "module:Class", or {{"name": ...}} with options beside it '
            f"(got {spec!r})."
        )
    return name, {str(key): value for key, value in spec.items() if key != "name"}


def _find(name: str, noun: str, builtin: Mapping[str, str], group: str) -> Any:
    """Import and return the object that a name stands for."""
    path = builtin.get(name)
    if path is None and ":" in name:
        path = name
    if path is not None:
        return _load(path, noun)
    for point in metadata.entry_points(group=group, name=name):
        try:
            return point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a third-party module may raise anything when imported
            raise PolicyImportError(
                f'cannot import {noun} "{name}" ({point.value}): {_reason(error)}.'
            ) from error
    known = _names(builtin, group)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise UnknownPolicyError(
        f'unknown {noun} "{name}".{hint} Available: {", ".join(known)}, or "module:Class".'
    )


def _load(path: str, noun: str) -> Any:
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a third-party module may raise anything when imported
        is_missing = isinstance(error, ModuleNotFoundError)
        hint = " Install it, or add its folder to PYTHONPATH." if is_missing else ""
        raise PolicyImportError(
            f'cannot import {noun} "{path}": {_reason(error)}.{hint}'
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        near = difflib.get_close_matches(class_name, dir(module), n=1)
        hint = f' Did you mean "{module_name}:{near[0]}"?' if near else ""
        raise PolicyImportError(
            f'cannot import {noun} "{path}": module {module_name} has no {class_name}.{hint}'
        )
    return found


def _check_options(name: str, noun: str, found: type, options: Mapping[str, Any]) -> None:
    known = _option_names(found)
    if "**" in known:
        return
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise PolicyOptionError(
                f'{noun} "{name}" has no option "{option}".{hint} {_takes(found)}'
            )


def _check_values(name: str, noun: str, found: type, options: Mapping[str, Any]) -> None:
    invalid = invalid_options(found, options)
    if invalid:
        problems = "; ".join(f"{option} {what}" for option, what in invalid)
        raise PolicyOptionError(
            f'{noun} "{name}": {problems}. {_takes(found)}', invalid, _takes(found)
        )


def _reason(error: BaseException) -> str:
    """Describe an exception. Its type is left out if its text alone is a reason: that of
    ``SystemExit`` is a number, that of ``KeyError`` a key, and others may have none."""
    text = safe_str(error)
    if isinstance(error, Exception) and text and not isinstance(error, KeyError):
        return text
    return f"it raised {safe_repr(error)}"


def _option_names(found: type) -> list[str]:
    """The constructor's parameters; ``"**"`` stands for arbitrary ones."""
    try:
        parameters: Sequence[inspect.Parameter] = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        # the class may be written in C, or have an invalid __signature__
        return ["**"]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ["**"]
    wanted = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in wanted]


def _takes(found: type) -> str:
    known = _option_names(found)
    return f"Its options are: {', '.join(known)}." if known else "It takes no options."


def _names(builtin: Mapping[str, str], group: str) -> list[str]:
    points = cast("Sequence[metadata.EntryPoint]", metadata.entry_points(group=group))
    return [*builtin, *sorted({point.name for point in points} - set(builtin))]


def _show(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
