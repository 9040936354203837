"""Texts of foreign objects for messages: their own ``__repr__`` or ``__str__`` may raise."""

from __future__ import annotations


def safe_repr(value: object) -> str:
    """Return ``repr(value)``, or the name of its type if ``repr`` raises or exits."""
    try:
        return repr(value)
    except (Exception, SystemExit):  # it is foreign code, and the message is still needed
        return f"{type(value).__name__} (its __repr__ raises)"


def safe_str(value: object) -> str:
    """Return ``str(value)``, or ``safe_repr(value)`` if ``str`` raises or exits."""
    try:
        return str(value)
    except (Exception, SystemExit):  # it is foreign code, and the message is still needed
        return safe_repr(value)
