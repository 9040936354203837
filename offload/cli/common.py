"""Helpers for all commands: errors, questions, progress, and output."""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import math
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from offload.cli.numbers import size_text, speed_text
from offload.errors import WRONG_USAGE, NamespaceError, Problem, TierUnavailableError
from offload.sizes import parse_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from offload.admin.verify import RateLimit
    from offload.namespaces.inventory import NamespaceFolder


def folder_path(text: str) -> Path:
    """A path from the command line. The empty text of an unset variable must not mean the current
    folder."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


Folder = Annotated[
    Path,
    typer.Argument(parser=folder_path, help="Path of a tier, or a namespace or rank in it."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
KeyFile = Annotated[str, typer.Option(help="Key file, if the records are encrypted.")]

LIVE_RATE = "100MiB"
"""Default rate if a server uses the folder, because the server needs the disk."""
ReadRate = Annotated[
    str,
    typer.Option(
        help=(
            "Maximum bytes per second to read, e.g. 200MiB; 0 means no limit. (default: "
            f"{LIVE_RATE} if a server uses the folder, else no limit)"
        )
    ),
]

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d|w)", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
SLOW_AFTER_S = 1.0
"""If a server has not answered for this long, a line on stderr names it."""
FILES_WIDTH = 150
"""Width in columns if the output is not a terminal, so that files and pipes get whole lines."""


def make_app() -> typer.Typer:
    """A Typer for one command."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Problems(list[Problem]):
    """Collects all mistakes in a command's arguments, to report them at once."""

    def add(self, where: str, what: str, fix: str = "") -> None:
        self.append(Problem(where, what, fix))

    def size(self, where: str, text: str, default: int = 0, *, is_positive: bool = False) -> int:
        """A size such as ``8GiB``; ``default`` if nothing was given."""
        if not text:
            return default
        try:
            found = parse_size(int(text) if text.isdecimal() else text)
        except ValueError as error:
            what, _, fix = str(error).partition(". ")
            self.add(where, f'{what} (got "{text}")', f"{fix}." if fix else "")
            return default
        if is_positive and not found:
            self.add(where, f'must be positive (got "{text}")', "Give a positive size.")
        return found

    def duration(self, where: str, text: str, default: float = 0.0) -> float:
        """Seconds from a text such as ``7d``; ``default`` if nothing was given."""
        match = _DURATION.fullmatch(text)
        if text and match is None:
            self.add(where, f'is not a time (got "{text}")', "Write 30s, 15m, 12h, 7d or 2w.")
        return float(match[1]) * _SECONDS[match[2]] if match else default

    def file(self, path: Path, fix: str, shown: str = "") -> None:
        """Add a problem if the path is not a readable file."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                self.add(shown or str(path), "is not a file", fix)
                return
            path.open("rb").close()
        except OSError as error:
            what, fix = _unreadable(error, fix)
            self.add(shown or str(path), what, fix)

    def key_file(self, path: str) -> None:
        """Add a problem if the given key file cannot be read. Its content is checked later."""
        if path:
            self.file(Path(path), "Give --key-file the file of the server's configuration.")

    def namespaces(self, folder: Path) -> list[NamespaceFolder]:
        """Find the namespaces below a folder; add a problem if there are none."""
        from offload.cli.path_hints import not_a_folder
        from offload.namespaces.inventory import find_namespaces

        fix = "Give the path of a tier, as in tiers[].path of the configuration."
        try:
            os.listdir(folder)  # the search skips folders that this user may not read
            found = find_namespaces(folder)
        except OSError as error:
            self.add(str(folder), *(not_a_folder(folder) or _unreadable(error, fix)))
            return []
        if not found:
            self.add(str(folder), "contains no records of kvtiers", fix)
        return found

    def metrics_url(self, where: str, text: str) -> str:
        """The address of a server's metrics; empty if none was given."""
        from offload.admin.metrics_client import metrics_url

        try:
            return metrics_url(text) if text else ""
        except ValueError as error:
            self.add(where, str(error), "Write localhost:8000 or http://host:8000.")
            return ""

    def refuse(self, command: str, code: int = WRONG_USAGE) -> None:
        """End the program and report all problems, if there are any."""
        if self:
            refuse(command, self, code)


def _unreadable(error: OSError, fix: str) -> tuple[str, str]:
    """Report why a path cannot be read, and what to do; ``fix`` applies if the path is wrong."""
    if isinstance(error, PermissionError):
        return "is not readable by this user", "Run this as the user that the server runs as."
    if isinstance(error, NotADirectoryError):
        return "is not a folder", fix
    if isinstance(error, FileNotFoundError):
        return "does not exist", fix
    return f"cannot be read: {error.strerror}", fix


def refuse(command: str, problems: list[Problem], code: int = WRONG_USAGE) -> NoReturn:
    """Report problems of the command line and end with ``WRONG_USAGE`` or another code."""
    count = len(problems)
    head = f"kvtiers {command}: {problems[0]}"
    if count > 1:
        lines = "\n".join(f"  {problem}" for problem in problems)
        head = f"kvtiers {command}: {count} problems:\n{lines}"
    print(head, file=sys.stderr)
    raise typer.Exit(code)


def check_spelling(problems: Problems, command: str, known: list[str], flags: list[str]) -> None:
    """Report flags that would be passed on to vLLM but look like a command's own."""
    for name in (flag.split("=")[0] for flag in flags if flag.startswith("--")):
        near = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.8)
        if near:
            fix = f"Did you mean {near[0]}?"
            problems.add(name, f"is not an option of kvtiers {command}", fix)


def give_up(command: str, text: str, code: int = 1) -> NoReturn:
    """Report why the command cannot continue, and end with 1 or another code."""
    print(f"kvtiers {command}: {text}", file=sys.stderr)
    raise typer.Exit(code)


@contextlib.contextmanager
def named_if_slow(command: str, address: str) -> Iterator[None]:
    """Say on stderr which server this context waits for, if that takes longer than a moment."""
    from offload.admin.metrics_client import TIMEOUT_S, shown_url

    what = f"{shown_url(address)} has not answered for {SLOW_AFTER_S:g} s"
    line = f"kvtiers {command}: {what}; waiting up to {TIMEOUT_S:g} s"
    timer = threading.Timer(SLOW_AFTER_S, print, [line], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def guarded_work(command: str) -> Iterator[None]:
    """Guard work on a tier's folder: its errors end the program with one line.

    A process that stops while it reads LMDB keeps the owner from reusing pages, so Ctrl-Z has no
    effect meanwhile. SIGTERM ends the program as Ctrl-C does: everything is closed, and no work is
    left half done.
    """
    # The work shows its progress with rich. An interrupted import can raise another error, or end
    # Python with the signal, so everything is imported before the work begins.
    import rich.console
    import rich.progress  # noqa: F401  # see above

    from tiers.base import TierError
    from tiers.folders.folder import FolderUnusableError
    from tiers.offline.offline_folder import FolderChangedError

    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    ended_before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    except FolderChangedError as error:
        give_up(command, f"{error} while the folder was read. Run this again")
    except FolderUnusableError as error:
        text = "A server that opens the folder starts empty; kvtiers clear removes it"
        give_up(command, f"the tier's folder is damaged: {error}. {text}")
    except (TierError, NamespaceError, TierUnavailableError) as error:
        give_up(command, str(error))
    except OSError as error:
        give_up(command, _os_error_text(error))
    finally:
        signal.signal(signal.SIGTSTP, before)
        signal.signal(signal.SIGTERM, ended_before)


def _os_error_text(error: OSError) -> str:
    """The file, what went wrong, and, on a full disk, what to do."""
    text = error.strerror or str(error)
    text = text if error.filename is None else f"{error.filename}: {text}"
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"{text}. Free some space, or name another file" if is_full else text


def rate_limit(bytes_per_s: int, *, is_used: bool) -> RateLimit:
    """The limit for reading a folder; a negative rate stands for the default."""
    from offload.admin.verify import RateLimit

    if bytes_per_s < 0:
        bytes_per_s = parse_size(LIVE_RATE) if is_used else 0
    return RateLimit(bytes_per_s)


def _end(_number: int, _frame: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Ctrl-C is ignored in background jobs of a script, so raising its signal would do nothing.
        raise KeyboardInterrupt
    # asyncio handles Ctrl-C itself, and ends its tasks in order.
    signal.raise_signal(signal.SIGINT)


def confirm(question: str) -> bool:
    """Ask on stderr; only a yes counts as yes. Unlike ``typer.confirm`` it lets Ctrl-C through."""
    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def print_json(value: Any) -> None:
    """Print one JSON object on stdout. Numbers that JSON cannot express, such as an infinite rate,
    become ``null``."""
    print(json.dumps(_plain(value), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def screen() -> Console:
    """A console for tables on stdout."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(width=FILES_WIDTH, highlight=False)


def print_line(out: Console, text: str, style: str = "") -> None:
    """Print text, on a terminal broken between words; a word that fits on no line, such as a long
    path, stays whole."""
    from policies.simulation.tables import printable

    text = "\n".join(map(printable, text.split("\n")))
    fits = all(len(word) <= out.width for word in text.split())
    is_broken = out.is_terminal and fits
    out.print(text, style=style, markup=False, soft_wrap=not is_broken)


def progress_bar(*, is_bytes: bool) -> Progress:
    """A progress bar on stderr if that is a terminal, with bytes per second or with a count."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Bytes(MofNCompleteColumn):
        """``1.10MiB/24.0MiB 58.4MiB/s``."""

        def render(self, task: Task) -> Text:
            done = f"{size_text(task.completed)}/{size_text(task.total)}"
            return Text(f"{done} {speed_text(task.finished_speed or task.speed)}")

    done = Bytes() if is_bytes else MofNCompleteColumn()
    columns = [TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn()]
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
