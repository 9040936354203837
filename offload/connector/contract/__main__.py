"""``python -m offload.connector.contract WHEEL``: lists what would break with a version of vLLM."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec

from offload.connector.contract.check import Checked, check
from offload.connector.contract.snapshots import contract_of, minor_of, write_snapshot
from offload.connector.contract.source import INSTALLED, SourceError, open_source

SAME, BREAKS, UNREADABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        source = open_source(options.wheel)
        if options.keep:
            minor_of(options.keep)
            path = write_snapshot(contract_of(source), options.keep)
            print(f"{path}: recorded the interface of vLLM {source.version()}")
            return SAME
        checked = check(source, minor_of(options.against) if options.against else None)
    except (SourceError, SyntaxError) as error:
        print(f"contract: {error}", file=sys.stderr)
        return UNREADABLE
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(checked), indent=2).decode())
    else:
        print("\n".join(_lines(checked)))
    return BREAKS if checked.breaks else SAME


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m offload.connector.contract",
        description="Compare what kvtiers uses of vLLM with what a version of vLLM provides. "
        "Reads source only; nothing is installed or imported.",
        epilog=(
            "Exit code: 0 if nothing differs, 1 if something breaks, 2 if the version could not "
            "be read."
        ),
    )
    parser.add_argument(
        "wheel", help=f"a wheel, a folder with the package vllm, or the word {INSTALLED}"
    )
    parser.add_argument(
        "--against",
        metavar="VERSION",
        help="compare with this kept version, not the nearest tested one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--keep", metavar="VERSION", help="keep its contract under a version number such as 0.33"
    )
    return parser


def _lines(checked: Checked) -> list[str]:
    lines = [
        f"vLLM {checked.version} ({checked.label}), compared with {checked.against}: "
        f"{checked.compared} things that kvtiers uses"
    ]
    for each in checked.breaks:
        lines.append(f"\n{'STOPS ' if each.is_fatal else 'breaks'} {each}")
        lines += [f"         {line}" for line in each.lines]
    stopping = sum(each.is_fatal for each in checked.breaks)
    if not checked.breaks:
        lines.append("Nothing breaks.")
    else:
        lines.append(
            f"\n{len(checked.breaks)} breaks; {stopping} of them stop a server of this version"
        )
    if checked.not_in_snapshot:
        lines.append(
            f"Not compared, because the snapshot lacks them (record it again with --keep): "
            f"{', '.join(checked.not_in_snapshot)}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
