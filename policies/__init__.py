"""Eviction and admission policies: they order keys and own no memory.

``docs/reference/api.md`` lists all public names and import paths, including those in ``__all__``;
everything else is private and may change at any time. The simulator is imported on first use,
because it needs numpy.

Owns the order in which tiers evict keys, and the rules for which keys may enter a tier.

Must not know tiers, memory, or what a key contains.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from policies.base import AdmissionPolicy, EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.options import Range
from policies.registry import (
    PolicySpecError,
    admission_names,
    make_admission,
    make_policy,
    policy_names,
)

if TYPE_CHECKING:
    from policies.simulation.simulator import Result, bound, simulate
    from policies.simulation.trace import Request, Trace, TraceError, TraceWriter
    from policies.simulation.trace_formats import read_trace

__all__ = [
    "AdmissionPolicy",
    "EntryInfo",
    "EvictionPolicy",
    "Key",
    "PolicySpecError",
    "Range",
    "RemoveCause",
    "Request",
    "Result",
    "Trace",
    "TraceError",
    "TraceWriter",
    "admission_names",
    "bound",
    "make_admission",
    "make_policy",
    "policy_names",
    "read_trace",
    "simulate",
]

_LAZY = {
    "Request": "policies.simulation.trace",
    "Result": "policies.simulation.simulator",
    "Trace": "policies.simulation.trace",
    "TraceError": "policies.simulation.trace",
    "TraceWriter": "policies.simulation.trace",
    "bound": "policies.simulation.simulator",
    "read_trace": "policies.simulation.trace_formats",
    "simulate": "policies.simulation.simulator",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
