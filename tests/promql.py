"""A small parser for PromQL: enough to find the metrics and labels of a query, and to reject what
Prometheus would reject when parsing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<text>"(?:[^"\\]|\\.)*")|(?P<range>\[(?:\d+[smhdw]|\$__rate_interval)\])
    |(?P<number>\d+(?:\.\d+)?)|(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
    |(?P<sign>=~|!~|!=|==|>=|<=|[-+*/<>=(){},])""",
    re.VERBOSE,
)
FUNCTIONS = {"rate", "increase", "histogram_quantile", "time"}
AGGREGATIONS = {"sum", "max", "min", "avg"}
NEED_A_RANGE = {"rate", "increase"}
MODIFIERS = {"by", "ignoring", "on", "group_left"}
SET_OPERATORS = {"and", "or", "unless"}
_PAIRS = {")": "(", "}": "{"}


class PromqlError(Exception):
    """The query cannot be valid."""


@dataclass
class Query:
    """The metrics of a query, each with the labels that it selects by; ``values`` are the labels
    that must be equal, and ``grouped`` the labels by which series are grouped."""

    metrics: dict[str, set[str]] = field(default_factory=dict)
    values: list[tuple[str, str, str]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)


def tokens_of(query: str) -> list[tuple[str, str]]:
    """Kind and text of each token. Raises ``PromqlError``."""
    found, at = [], 0
    while at < len(query):
        match = _TOKEN.match(query, at)
        if match is None:
            raise PromqlError(f"cannot be read from {query[at : at + 20]!r} on")
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match.group()))
        at = match.end()
    return found


def parse(query: str) -> Query:
    """Read a query. Raises ``PromqlError``."""
    tokens = [*tokens_of(query), ("end", "")]
    _check_brackets(tokens)
    found = Query()
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if kind != "name":
            at += 1
        elif text in SET_OPERATORS:
            if following in ("", ")") or tokens[at - 1][1] in ("", "("):
                raise PromqlError(f"{text} stands between two queries")
            at += 1
        elif text in MODIFIERS:
            names, at = _names(tokens, at + 1)
            found.grouped |= set(names)
        elif text in FUNCTIONS | AGGREGATIONS and following in ("(", "by"):
            at += 1
        elif following == "(":
            raise PromqlError(f"unknown function {text}")
        else:
            at = _selector(tokens, at, found)
    if not found.metrics:
        raise PromqlError("names no metric")
    return found


def _check_brackets(tokens: list[tuple[str, str]]) -> None:
    open_: list[str] = []
    for before, (kind, text) in zip([("", "("), *tokens], tokens, strict=False):
        if text in ("(", "{"):
            open_.append(text)
        elif text in _PAIRS and (not open_ or open_.pop() != _PAIRS[text]):
            raise PromqlError(f"{text} closes nothing")
        operator = text in ("*", "/", "+", "<", ">", "==", ">=", "<=")
        if operator and before[1] in ("(", "*", "/", "+", "<", ">", "=="):
            raise PromqlError(f"{text} follows {before[1]}")
        if kind == "end" and before[1] in ("*", "/", "+", "<", ">", "=="):
            raise PromqlError(f"ends with {before[1]}")
    if open_:
        raise PromqlError(f"{open_[-1]} is not closed")


def _names(tokens: list[tuple[str, str]], at: int) -> tuple[list[str], int]:
    """The names in the brackets that begin at this token."""
    if tokens[at][1] != "(":
        raise PromqlError(f"a list of labels should stand before {tokens[at][1]!r}")
    names = []
    at += 1
    while tokens[at][1] != ")":
        if tokens[at][0] == "name":
            names.append(tokens[at][1])
        elif tokens[at][1] != ",":
            raise PromqlError(f"{tokens[at][1]} among labels")
        at += 1
    return names, at + 1


def _selector(tokens: list[tuple[str, str]], at: int, found: Query) -> int:
    """A metric with its labels and its range."""
    name = tokens[at][1]
    labels = found.metrics.setdefault(name, set())
    function = next((t for _, t in reversed(tokens[:at]) if t in FUNCTIONS | AGGREGATIONS), "")
    at += 1
    if tokens[at][1] == "{":
        at += 1
        while tokens[at][1] != "}":
            parts = tokens[at : at + 3]
            kinds = [kind for kind, _ in parts]
            if kinds != ["name", "sign", "text"] or parts[1][1] not in ("=", "!=", "=~", "!~"):
                raise PromqlError(f"{name}: no matcher in {[text for _, text in parts]}")
            labels.add(parts[0][1])
            if parts[1][1] == "=":
                found.values.append((name, parts[0][1], parts[2][1].strip('"')))
            at += 3
            if tokens[at][1] == ",":
                at += 1
        at += 1
    has_range = tokens[at][0] == "range"
    if has_range != (function in NEED_A_RANGE):
        raise PromqlError(
            f"{name}: {function or 'nothing'} with{'' if has_range else 'out'} a range"
        )
    return at + has_range


def problems(query: str, known: Mapping[str, set[str]], others: set[str]) -> list[str]:
    """The problems of a query, given the metrics and labels of a page; ``others`` are labels that
    Prometheus adds."""
    try:
        found = parse(query)
    except PromqlError as error:
        return [f"{query}: {error}"]
    wrong = []
    for name, labels in found.metrics.items():
        if name not in known:
            wrong.append(f"{query}: there is no metric {name}")
            continue
        missing = (labels | found.grouped) - known[name] - others
        anywhere = set().union(*(known.get(other, set()) for other in found.metrics))
        missing -= anywhere - labels  # one side of a division may lack a label of the other
        wrong += [f"{query}: {name} has no label {label}" for label in sorted(missing)]
    return wrong
