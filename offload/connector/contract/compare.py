"""Names the differences between a kept contract and a version of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass

from offload.connector.contract.answers import CALLS, ORDER, Facts
from offload.connector.contract.facts import Fact
from offload.connector.contract.snapshots import Contract, Need
from offload.connector.contract.uses import CallShape

FIELDS = frozenset({"field", "property", "value"})
"""Kinds of facts that our code reads in the same way."""
VERSIONS = frozenset({"vllm:__version__", "vllm.version:__version_tuple__"})
Parameters = list[str]
OursOf = Callable[[str], Parameters | None]
"""Gives the parameters of one of our methods, named ``module:Class.method``."""


@dataclass(frozen=True, order=True)
class Break:
    """A use that differs from the kept contract. ``is_fatal``: a server must not run with it."""

    what: str
    text: str
    is_fatal: bool
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


def breaks(
    snapshot: Contract,
    found: Facts,
    ours_of: OursOf,
    lines: dict[str, tuple[str, ...]] | None = None,
) -> list[Break]:
    """All differences that can affect us. Uses that the kept contract lacks are not compared."""
    named = []
    read = {key for key, need in snapshot.needs.items() if need.in_server}
    for key, before in snapshot.facts.items():
        if before is None or key not in snapshot.needs or key in VERSIONS:
            continue
        need = snapshot.needs[key]
        for text, is_fatal in _differences(key, before, found.get(key), need, ours_of, read):
            where = (lines or {}).get(key, ())
            named.append(Break(key, text, is_fatal and need.in_server, where))
    return sorted(named)


def _differences(
    key: str, before: Fact, now: Fact | None, need: Need, ours_of: OursOf, read: Set[str]
) -> Iterator[tuple[str, bool]]:
    """(text, whether the difference stops a server that needs the name)."""
    if now is None:
        yield "vLLM no longer calls it" if key.startswith(CALLS) else "is gone", True
        return
    if before == now:
        return
    if key.startswith(CALLS):
        yield from _calls(before, now, [p for name in need.ours if (p := ours_of(name))])
    elif key.startswith(ORDER):
        yield from _order(before["steps"], now["steps"])
    elif before["is"] != now["is"]:
        if not {before["is"], now["is"]} <= FIELDS:
            yield f"is a {now['is']}, it was a {before['is']}", True
    elif before["is"] == "base":
        yield from _base(before, now, [name.rpartition(".")[2] for name in need.ours])
    else:
        yield from _enum(key, before.get("enum", {}), now.get("enum", {}), read)
        if "parameters" in before:
            yield from _parameters(before, now, need, ours_of)
        for part, word in (("returns", "returns"), ("type", "is of type"), ("value", "is")):
            if before.get(part) != now.get(part):
                yield f"{word} {now.get(part)}, it was {before.get(part)}", False


def _order(before: list[list[str]], now: list[list[str]]) -> Iterator[tuple[str, bool]]:
    """Compare the order of calls.

    The server must not start if a call's position in the order differs. A new call or another
    condition is only reported.
    """
    names, old = [name for name, _ in now], [name for name, _ in before]
    if names != old:
        rest = iter(names)
        has_all = all(name in rest for name in old)
        yield f"the order is {_listed(names)}; it was {_listed(old)}", not has_all
        return
    for (name, condition), (_, old_condition) in zip(now, before, strict=True):
        if condition != old_condition:
            text = f"{name} is called {condition or 'always'}; it was {old_condition or 'always'}"
            yield text, False


def _listed(steps: Iterable[str]) -> str:
    return ", ".join(steps) or "nothing"


def _base(before: Fact, now: Fact, ours: list[str]) -> Iterator[tuple[str, bool]]:
    for name in now["abstract"]:
        if name not in before["abstract"] and name not in ours:
            yield f"must have a method {name} now", True
    for name in now["methods"]:
        if name not in before["methods"] and name not in now["abstract"]:
            yield f"has a new method {name}, which we inherit", False


def _enum(
    key: str, before: dict[str, str], now: dict[str, str], read: Set[str]
) -> Iterator[tuple[str, bool]]:
    """Compare an enum. ``read`` lists the members that we use; other members may change."""
    for name, value in before.items():
        is_used = f"{key.rpartition(':')[2]}.{name}" in read
        if name not in now:
            yield f"member {name} is gone", is_used
        elif now[name] != value:
            yield f"member {name} is {now[name]}, it was {value}", is_used
    known = [value for name, value in now.items() if name in before]
    for name, value in now.items():
        if name not in before and [*now.values()].count(value) > 1 and value not in known:
            same = ", ".join(each for each, other in now.items() if other == value and each != name)
            yield f"member {name} is another name for {same}", False


# -- parameters --------------------------------------------------------------------------------


def _parameters(before: Fact, now: Fact, need: Need, ours_of: OursOf) -> Iterator[tuple[str, bool]]:
    old, new = _split(before["parameters"]), _split(now["parameters"])
    gone = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    is_method = now["is"] != "constructor" and new.keys() & {"self", "cls"}
    cut = now["parameters"][1:] if is_method else now["parameters"]
    is_bound = all(accepts(cut, call) for call in need.calls)
    overrides = [p for name in need.ours if (p := ours_of(name)) is not None]
    for name in gone:
        instead = f" ({', '.join(added)} is new)" if added else ""
        yield f"parameter {name} is gone{instead}", not is_bound or bool(overrides)
    for name in added:
        if overrides and not all(_accepts_name(each, name) for each in overrides):
            yield f"parameter {name} is new, and our method does not accept it", True
        elif not overrides and new[name] is None and not name.startswith("*"):
            yield f"parameter {name} is new and must be given", not is_bound
    for name, default in old.items():
        if name in new and new[name] != default:
            yield f"the default of {name} is {new[name]}, it was {default}", not is_bound
    common = [name for name in old if name in new]
    if common != [name for name in new if name in old]:
        yield f"the parameters are in the order {', '.join(new)}, it was {', '.join(old)}", True


def _split(parameters: Parameters) -> dict[str, str | None]:
    """Names with their defaults."""
    found: dict[str, str | None] = {}
    for each in parameters:
        name, is_given, default = each.partition("=")
        found[name] = default if is_given else None
    return found


def _accepts_name(parameters: Parameters, name: str) -> bool:
    return name in _split(parameters) or any(each.startswith("**") for each in parameters)


def accepts(parameters: Parameters, call: CallShape) -> bool:
    """Says whether a function with these parameters accepts the call."""
    positional, named, required = [], set(), set()
    is_keyword_only = has_rest = has_any_keyword = False
    for each in parameters:
        name, is_given, _ = each.partition("=")
        if name.startswith("**"):
            has_any_keyword = True
        elif name.startswith("*"):
            is_keyword_only, has_rest = True, has_rest or len(name) > 1
        elif name != "/":
            named.add(name)
            if not is_keyword_only:
                positional.append(name)
            if not is_given:
                required.add(name)
    if call.is_open:
        return has_any_keyword or set(call.keywords) <= named
    given = {*positional[: call.positional], *call.keywords}
    fits = call.positional <= len(positional) or has_rest
    return fits and (has_any_keyword or set(call.keywords) <= named) and required <= given


def _calls(before: Fact, now: Fact, ours: list[Parameters]) -> Iterator[tuple[str, bool]]:
    """Compare the calls of our methods."""
    for function, shapes in now["from"].items():
        for shape in shapes:
            if shape in before["from"].get(function, ()):
                continue
            is_fine = all(accepts(each[1:], as_call(shape)) for each in ours)
            refused = "" if is_fine else ", which our method does not accept"
            yield f"{function} calls it with ({shape}){refused}", not is_fine
    for function in before["from"]:
        if function not in now["from"]:
            yield f"{function} no longer calls it", False


def as_call(shape: str) -> CallShape:
    """A call from its text, see `offload.connector.contract.calls.arguments`."""
    if shape == "read":
        return CallShape(0, (), is_open=True)
    count, *keywords = shape.split()
    is_open = count.endswith("*") or "**" in keywords
    return CallShape(int(count.rstrip("*")), tuple(k for k in keywords if k != "**"), is_open)
