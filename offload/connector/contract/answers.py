"""Collects the facts about one version of vLLM for everything that this project uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from offload.connector.contract import calls, facts
from offload.connector.contract.declared import Callers, Declared
from offload.connector.contract.facts import Fact
from offload.connector.contract.library import Definition, Library
from offload.connector.contract.source import PackageSource
from offload.connector.contract.uses import OVERRIDDEN, READ, Use, Uses

Facts = dict[str, Fact | None]
ORDER, CALLS = "order of ", "calls of "


class Answers:
    """Looks up facts in one library. ``classes`` maps each class to the name under which it is
    found."""

    def __init__(self, library: Library, classes: Mapping[str, str]) -> None:
        self._library = library
        self._classes = classes
        self._definitions: dict[str, Definition | None] = {}

    def to(self, key: str) -> Fact | None:
        """The fact for a key of `offload.connector.contract.uses.Uses`."""
        if ":" in key and not key.endswith(":base"):
            module, _, name = key.partition(":")
            found = self._library.resolve(module, name)
            return facts.of_definition(self._library, found) if found is not None else None
        if key.endswith(":base"):
            owner = self._class(key.removesuffix(":base"))
            return facts.of_base(self._library, owner) if owner is not None else None
        if key.endswith("()"):
            owner = self._class(key.removesuffix("()"))
            return facts.of_constructor(self._library, owner) if owner is not None else None
        class_name, dot, member = key.partition(".")
        if dot and class_name in self._classes:
            owner = self._class(class_name)
            return facts.of_member(self._library, owner, member) if owner is not None else None
        return {"is": "module"} if self._library.module(key) is not None else None

    def _class(self, name: str) -> Definition | None:
        if name not in self._definitions:
            module, _, there = self._classes.get(name, "").partition(":")
            found = self._library.resolve(module, there)
            self._definitions[name] = found if found is not None and found.is_class else None
        return self._definitions[name]

    def orders(self, table: Declared) -> Facts:
        """The order of hooks in every function of the table."""
        found: Facts = {}
        for order in table.orders:
            node = calls.function_at(self._library, order.at)
            found[ORDER + order.at] = calls.order_of(node, order.watch) if node else None
        return found

    def calls(self, table: Declared, modules: Iterable[str], hooks: Iterable[str]) -> Facts:
        """The calls to our methods in these modules; ``hooks`` are the methods' keys."""
        found: Facts = {}
        known = list(modules)
        for callers in table.callers:
            names = hooks_of(callers, hooks)
            pattern = calls.call_pattern(names.keys())
            for module in known:
                if not names or not _is_within(module, callers):
                    continue
                for hook, function, arguments in calls.calls_in(
                    self._library, module, callers.receiver, pattern
                ):
                    fact = found.setdefault(CALLS + names[hook], {"is": "calls", "from": {}})
                    assert fact is not None
                    shapes = fact["from"].setdefault(function, [])
                    if arguments not in shapes:
                        shapes.append(arguments)
                        shapes.sort()
        return found


def hooks_of(callers: Callers, hooks: Iterable[str]) -> dict[str, str]:
    """The keys of the methods of the class that vLLM calls."""
    names = {}
    for key in hooks:
        class_name, _, method = key.partition(".")
        if class_name in (callers.class_name, callers.also) and not method.startswith("_"):
            names[method] = key
    return names


def _is_within(module: str, callers: Callers) -> bool:
    path = module.replace(".", "/")
    starts = tuple(each.removesuffix(".py").rstrip("/") for each in callers.within)
    others = tuple(each.removesuffix(".py").rstrip("/") for each in callers.without)
    return path.startswith(starts) and not (others and path.startswith(others))


def calling_modules(source: PackageSource, table: Declared) -> list[str]:
    """Every module that may call one of our methods, by path."""
    found: dict[str, None] = {}
    for callers in table.callers:
        pattern = re.compile(callers.receiver)
        for module, text in calls.callers_in(source, callers.within, callers.without):
            if pattern.search(text):
                found[module] = None
    return list(found)


def add_declared(uses: Uses, table: Declared, ours: PackageSource) -> None:
    """Add the declared uses to the derived ones."""
    for members in table.members:
        uses.reach(members.class_name, members.at)
        for name in members.names:
            line = line_of(ours, members.ours, name)
            uses.add(f"{members.class_name}.{name}", Use(READ, line))
    for at, where in table.names:
        path, _, name = where.partition(":")
        uses.add(at, Use(READ, line_of(ours, path, name)))
    for order in table.orders:
        path, _, name = order.ours.partition(":")
        uses.add(ORDER + order.at, Use(READ, line_of(ours, path, name)))
    for key, known in list(uses.by_key.items()):
        overrides = [use for use in known if use.how == OVERRIDDEN]
        for use in overrides:
            uses.add(CALLS + key, use)


def line_of(ours: PackageSource, path: str, name: str) -> str:
    """The line in one of our files where a name is defined or first occurs."""
    lines = (ours.read(path) or "").splitlines()
    for pattern in (rf"\bdef {re.escape(name)}\b", rf"\b{re.escape(name)}\b"):
        for number, line in enumerate(lines, 1):
            if re.search(pattern, line):
                return f"{path}:{number}"
    return path
