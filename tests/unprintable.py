"""An error of which no text can be made."""

from __future__ import annotations


class Unprintable(Exception):
    """An error with a fault in its own texts."""

    def __repr__(self) -> str:
        raise AttributeError("on purpose")

    __str__ = __repr__
