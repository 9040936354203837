"""The errors of this package. Misses, damaged records and full tiers are outcomes, not errors.

OffloadError
  ConfigError (ValueError)       bad configuration; ``problems`` lists every one of them
  LayoutError
    AlignmentError               block, hash and chunk sizes that do not fit
    PageSizeError                page bytes that disagree with the memory they lie in
    UnsupportedSpecError         a KV cache kind that is not offloaded
  CapacityError                  a tier too small to hold one chunk
  TierUnavailableError           a tier that cannot be opened
  ManagerClosedError             a call of an ``OffloadManager`` that is closed or closing
  NamespaceError                 stored geometry or format differs
  InvariantError                 a bug in this package; the message carries the state

A failed copy raises ``tiers.copy.base.TransferError``, which is not an ``OffloadError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WRONG_USAGE = 2
"""Exit code for wrong usage, as argparse has it; 1 is for findings and failures."""


class OffloadError(Exception):
    """The base class of all errors that this package raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a configuration: where (``$.tiers[0].capacity``), what, and how to fix it."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.what}. {self.fix}" if self.fix else f"{self.where}: {self.what}"
        )


class ConfigError(OffloadError, ValueError):
    """A bad configuration; ``problems`` lists every fault of it, and ``option`` names
    the option that contains them."""

    def __init__(
        self, problems: Sequence[Problem], option: str = "kv_connector_extra_config"
    ) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        super().__init__(f"kvtiers: {count} {noun} in {option}:\n{lines}")


class LayoutError(OffloadError, ValueError):
    """The model's KV caches cannot be offloaded as they are."""


class AlignmentError(LayoutError):
    """Block, hash, scheduler or chunk sizes do not fit each other."""


class PageSizeError(LayoutError):
    """A layer's pages do not lie where the configuration says."""


class UnsupportedSpecError(LayoutError):
    """A KV cache kind that cannot be offloaded."""


class CapacityError(OffloadError, ValueError):
    """A tier cannot hold even one chunk."""


class TierUnavailableError(OffloadError):
    """A tier could not be opened."""


class ManagerClosedError(OffloadError):
    """An ``OffloadManager`` was closed before an operation began, or before it ended."""


class NamespaceError(OffloadError):
    """Stored blocks belong to another model, geometry or format."""


class InvariantError(OffloadError, AssertionError):
    """A bug in this package; the message carries the state."""
