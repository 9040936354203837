"""Guards a program's output. It prints every text, whatever the encoding of the terminal, and ends
a program whose output cannot be written, for example because the disk is full.

It prints one line on stderr and exits with code 1, wherever the failure happens and whether the
output is buffered or not. After a closed pipe (``| head``) it prints nothing and exits with 1 too.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class OutputLostError(Exception):
    """Standard output cannot be written. This is not an ``OSError``, because those are errors of a
    tier."""


class _Output:
    """A file for text whose ``write`` and ``flush`` raise ``OutputLostError``."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with _as_output_lost():
            return self._file.write(text)

    def flush(self) -> None:
        with _as_output_lost():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _as_output_lost() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLostError(error.strerror or str(error)) from error


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Guard standard output while the program runs."""
    file = sys.stdout
    if file is None:  # the program was started with stdout closed: print nothing
        yield
        return
    if isinstance(file, io.TextIOWrapper):  # names of files may have bytes that are not UTF-8
        file.reconfigure(errors="backslashreplace")
    sys.stdout = cast(TextIO, _Output(file))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (OutputLostError, BrokenPipeError) as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())  # otherwise Python would flush again at exit, and fail
        os.close(nowhere)
        if isinstance(error, OutputLostError):
            with contextlib.suppress(OSError):  # stderr is full as well
                print(f"kvtiers: cannot write the output: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        sys.stdout = file
