"""``kvtiers why``: shows what the last requests of a server found, and why the rest was missing."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.common import AsJson, Problems, make_app, print_json, screen
from offload.cli.numbers import age_text, duration_text

if TYPE_CHECKING:
    from policies.simulation.tables import FittingTable

app = make_app()

File = Annotated[Path, typer.Argument(help="The file of record_requests in the configuration.")]
FIX = 'Start the server with "record_requests": "/path/of/a/file.jsonl" and give that path.'
LINE_MAX = 1 << 16
NUMBERS = ("time", "prompt_tokens", "gpu_tokens", "wanted_tokens")
OPTIONAL_NUMBERS = (
    *("ago_s", "waited_s"),
    *("ahead_tokens", "ahead_late_tokens", "ahead_saved_s", "ahead_wasted_tokens"),
)
NUMBER_MAX = 1e15
TEXTS = ("tier", "policy", "note", "namespace")
_HEX = re.compile(r"(?:[0-9a-f]{2})+", re.ASCII)


@app.command()
def why(
    file: File,
    last: Annotated[int, typer.Option(help="Number of the newest requests to show.")] = 20,
    request: Annotated[str, typer.Option(help="Only requests whose id contains this text.")] = "",
    reason: Annotated[str, typer.Option(help="Only requests with this reason.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show in which tiers the last requests of a server found their prefixes, and why the rest was
    missing.

    Works while the server runs. The counters vllm:kvtiers_misses_total cover all requests.
    """
    from offload.requests.miss_reasons import MEANINGS
    from policies.simulation.tables import printable

    problems = Problems()
    meanings = {known.value: text for known, text in MEANINGS.items()}
    if reason and reason not in meanings:
        problems.add("--reason", f'"{reason}" is unknown', f"Known: {', '.join(meanings)}.")
    if last < 1:
        problems.add("--last", f"must be at least 1 (got {last})")
    records = _read(file, problems)
    problems.refuse("why")
    chosen = [
        record
        for record in records
        if request in record["request"] and reason in ("", record["reason"])
    ][-last:]
    if as_json:
        print_json({"file": str(file), "requests": chosen})
        return
    if not chosen:
        print("no request matches these options" if records else "no request yet")
        return
    screen().print(_table(chosen))
    for name, count in Counter(record["reason"] for record in chosen).most_common():
        meaning = meanings.get(name, "this version of kvtiers does not know this reason")
        screen().print(f"{count:>6,}  {printable(name)}: {meaning}", markup=False)


def _read(file: Path, problems: Problems) -> list[dict[str, Any]]:
    """Read the records of a file, except a last line that is still being written."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n") and len(line) < LINE_MAX]
        found = [json.loads(line) for line in whole]
        if not all(map(_is_record, found)) or (lines and not found and not _may_become(lines[0])):
            raise TypeError
    except FileNotFoundError:
        problems.add(str(file), "does not exist", FIX)
    except OSError as error:
        problems.add(str(file), f"cannot be read: {error.strerror}", FIX)
    except (ValueError, TypeError, RecursionError):
        problems.add(str(file), "is not a file of record_requests", FIX)
    else:
        return found
    return []


def _may_become(line: str) -> bool:
    """Return True if an unfinished line begins as a record does."""
    try:
        return _is_record(json.loads(line))
    except (ValueError, RecursionError):
        return line.startswith('{"')


def _is_record(record: Any) -> bool:
    """Return True if a record has all fields that a server writes, with values of the right types.

    A newer version may know other reasons.
    """
    if not isinstance(record, dict) or not isinstance(record.get("loaded_tokens"), dict):
        return False
    numbers = [record.get(name) for name in NUMBERS] + list(record["loaded_tokens"].values())
    texts = [record.get("request"), record.get("reason")]
    if "missing" in record:
        missing = record["missing"]
        if not isinstance(missing, dict):
            return False
        numbers += [missing.get("group"), missing.get("at_token")]
        texts.append(missing.get("key"))
        if not _HEX.fullmatch(str(missing.get("key"))):
            return False
    numbers += [record[name] for name in OPTIONAL_NUMBERS if name in record]
    texts += [record[name] for name in TEXTS if name in record]
    return all(map(_is_number, numbers)) and all(isinstance(text, str) for text in texts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < NUMBER_MAX


def _table(records: list[dict[str, Any]]) -> FittingTable:
    from policies.simulation.tables import FittingTable

    numbers = ("prompt", "GPU", "missed")
    headings = ("ago", "request", "prompt", "GPU", "loaded", "missed", "why", "where")
    table = FittingTable(headings, right=numbers)
    now = time.time()
    for record in records:
        loaded = record["loaded_tokens"]
        table.add_row(
            age_text(int(record["time"] * 1e9), now),
            record["request"][-32:],
            f"{record['prompt_tokens']:,}",
            f"{record['gpu_tokens']:,}",
            _loaded(record),
            f"{record['wanted_tokens'] - sum(loaded.values()):,}",
            record["reason"],
            _where(record),
        )
    return table


def _loaded(record: dict[str, Any]) -> str:
    """The loaded tokens by tier, and what was read into the CPU tier before."""
    parts = [f"{tokens:,} {tier}" for tier, tokens in record["loaded_tokens"].items()]
    if "ahead_tokens" in record:
        late = record.get("ahead_late_tokens")
        late_text = f" ({late:,} still being read)" if late else ""
        parts.append(f"{record['ahead_tokens']:,} of them read ahead{late_text}")
    if "ahead_saved_s" in record:
        parts.append(f"saved {record['ahead_saved_s']:,.1f} s of reads")
    if "ahead_wasted_tokens" in record:
        parts.append(f"{record['ahead_wasted_tokens']:,} tokens were read ahead for nothing")
    if "waited_s" in record:
        parts.append(f"waited {record['waited_s']:,.1f} s for reads")
    return ", ".join(parts)


def _where(record: dict[str, Any]) -> str:
    """Describe the first missing chunk."""
    parts = []
    if "missing" in record:
        missing = record["missing"]
        parts.append(f"token {missing['at_token']:,} of group {missing['group']}")
    if "tier" in record:
        parts.append(f"in {record['tier']}")
    if "policy" in record:
        parts.append(f"by {record['policy']}")
    if "ago_s" in record:
        parts.append(f"{duration_text(record['ago_s'])} before")
    if "note" in record:
        parts.append(record["note"])
    return ", ".join(parts)
