"""The help of every command is readable on a terminal of 80 columns."""

from __future__ import annotations

import itertools
import re
from functools import cache

import pytest
import typer
from typer.testing import CliRunner

from bench.__main__ import QUESTIONS, build
from offload.cli import COMMANDS, app
from tests.offload.cli.rank_folders import kvtiers

COLUMNS = 80
PADDING = 2
"""Columns that typer leaves free at the end of a line."""


@cache
def program_of(name: str) -> typer.Typer:
    return app if name == "kvtiers" else build()


def help_of(program: str, *words: str) -> str:
    environment = {"COLUMNS": str(COLUMNS), "TERM": "dumb"}
    found = CliRunner().invoke(program_of(program), list(words), env=environment)
    assert found.exit_code == 0, found.output
    return found.stdout


def prose_of(shown: str) -> list[list[str]]:
    """The lines of each paragraph between the usage and the first list."""
    blocks: list[list[str]] = [[]]
    for line in re.split(r"(?m)^(?:Arguments|Options):$", shown)[0].splitlines():
        if line.strip():
            blocks[-1].append(line.rstrip())
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block and "Usage:" not in block[0]]


def broken_early(lines: list[str]) -> list[str]:
    """The lines after which the next word would have fitted."""
    return [
        line
        for line, following in itertools.pairwise(lines)
        if len(line) + 1 + len(following.split()[0]) <= COLUMNS - PADDING
    ]


def test_a_line_that_ends_early_is_detected() -> None:
    assert broken_early([" one", " two"]) == [" one"]
    assert broken_early([" " + "a" * 73, " word"]) == []


@pytest.mark.parametrize(
    ("program", "command"),
    [*(("kvtiers", name) for name in COMMANDS if name != "bench"),
     *(("bench", name) for name in QUESTIONS)],
)  # fmt: skip
def test_paragraphs_and_switches(program: str, command: str) -> None:
    shown = help_of(program, command, "--help")
    assert prose_of(shown), shown
    for lines in prose_of(shown):
        assert broken_early(lines) == []
    assert "bool" not in shown.lower(), "a switch takes no value"
    assert max(map(len, shown.splitlines())) <= COLUMNS


@pytest.mark.parametrize("program", ["kvtiers", "bench"])
def test_a_list_of_commands_shortens_no_line(program: str) -> None:
    commands = help_of(program, "--help").partition("Commands:")[2]
    assert commands
    assert "..." not in commands


def test_all_ways_to_ask_for_help() -> None:
    shown = help_of("kvtiers", "top", "--help")
    assert "--help" in shown
    assert help_of("kvtiers", "top", "-h") == help_of("kvtiers", "help", "top") == shown
    assert help_of("kvtiers", "help") == help_of("kvtiers", "-h")
    assert help_of("bench", "copy", "-h") == help_of("bench", "copy", "--help")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("top localhost:8000 --interval nan", "nan"),
        ("top localhost:8000 --interval=-1", "-1"),
        ("why f --last abc", "abc"),
        ("plan m --years 0.01", "0.01"),
        ("simulate t --block-tokens 0", "0"),
        ("simulate t --jobs 100000", "100000"),
    ],
)
def test_the_wrong_value_is_shown(words: str, value: str) -> None:
    found = kvtiers(*words.split())
    assert found.code == 2
    text = " ".join(found.err.split())
    option = next(word for word in words.split() if word.startswith("--")).partition("=")[0]
    assert f"Invalid value for '{option}'" in text
    assert value in text.partition("Invalid value")[2]
