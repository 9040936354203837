"""Options that several benchmarks have. A wrong value ends the program with 2 before anything is
measured; the message names the option and the value."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from bench.scenario import parse_size

V = TypeVar("V")

AtLeastOne = Annotated[int, typer.Option(min=1)]


def existing_folder(text: str) -> str:
    """The name of a folder that exists, or no text for the default. Raises
    ``typer.BadParameter``."""
    if text and not Path(text).is_dir():
        raise typer.BadParameter(f"there is no folder {text}")
    return text


DiskFolder = Annotated[
    str, typer.Option(help="Folder on the disk to measure.", callback=existing_folder)
]


def known_policy(name: str) -> str:
    """The name of an eviction policy that can be made. Raises ``typer.BadParameter``."""
    from policies.registry import PolicySpecError, make_policy

    try:
        make_policy(name)
    except PolicySpecError as error:
        raise typer.BadParameter(str(error)) from None
    return name


def known_policies(names: list[str] | None) -> list[str] | None:
    """The same for a repeatable option."""
    return None if names is None else [known_policy(name) for name in names]


def values(option: str, text: str, parse: Callable[[str], V]) -> tuple[V, ...]:
    """The values of a list with commas. ``parse`` raises ``ValueError`` for a wrong one. Raises
    ``typer.BadParameter``."""
    found = []
    for part in text.split(","):
        try:
            found.append(parse(part.strip()))
        except (ValueError, OverflowError) as error:
            raise typer.BadParameter(f"{part!r}: {error}", param_hint=option) from None
    return tuple(found)


def words(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """The names of a list with commas, all of which must be known. Raises
    ``typer.BadParameter``."""
    names = tuple(name for name in text.split(",") if name)
    unknown = sorted(set(names) - set(known))
    if unknown or not names:
        problem = f"unknown: {', '.join(unknown) or repr(text)}; known: {', '.join(known)}"
        raise typer.BadParameter(problem, param_hint=option)
    return names


def sizes(option: str, text: str) -> tuple[int, ...]:
    """Positive numbers of bytes, such as ``64KiB,2MiB``. Raises ``typer.BadParameter``."""
    return values(option, text, _size)


def size(option: str, text: str) -> int:
    """One positive number of bytes. Raises ``typer.BadParameter``."""
    found = sizes(option, text)
    if len(found) > 1:
        raise typer.BadParameter(f"{text!r} is more than one size", param_hint=option)
    return found[0]


def _size(text: str) -> int:
    try:
        found = parse_size(text)
    except ValueError:
        raise ValueError('is not a size such as "64KiB", "2MiB" or "1GiB"') from None
    if found < 1:
        raise ValueError("must be at least 1")
    return found


def count(text: str) -> int:
    """A whole number of at least 1. Raises ``ValueError``."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError("must be a whole number of at least 1")
    return int(text)
