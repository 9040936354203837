"""``./run mutants``: plants each fault in a copy of the tree and runs the tests that should detect
it.

    ./run mutants                     all of them
    ./run mutants planner index.foo   areas, groups or single faults
    ./run mutants --list              what there is

Exit code 0: every fault was detected. 1: at least one was not. 2: the faults cannot be tried,
because one cannot be planted or because their tests fail without a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests.mutants.catalogue import CatalogueError, Mutant, choose, load
from tests.mutants.workshop import Result, Run, Verdict, Workshop

BASE_LIMIT_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="run mutants", description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", help="areas, groups or ids of faults (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--list", action="store_true", help="only print the faults")
    options = parser.parse_args(arguments)
    try:
        chosen = choose(load(), options.ids)
        for mutant in chosen:
            mutant.plant()
    except CatalogueError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{mutant.id:52} {mutant.breaks}" for mutant in chosen))
        return 0
    with ExitStack() as undo:
        folder = Path(undo.enter_context(TemporaryDirectory(prefix="kvtiers-mutants-")))
        shops = []
        for number in range(max(1, min(options.jobs, len(chosen)))):
            shops.append(Workshop(folder / str(number)))
            undo.callback(shops[-1].close)
        base = without_faults(shops, chosen)
        wrong = unfit(base, chosen)
        if wrong:
            print("\n".join(wrong), file=sys.stderr)
            return 2
        results = with_faults(shops, chosen, base)
    results.sort(key=lambda result: chosen.index(result.mutant))
    report(results)
    if options.json:
        options.json.write_text(json.dumps([as_json(one) for one in results], indent=1) + "\n")
    return 0 if all(result.verdict.seen for result in results) else 1


def without_faults(shops: Sequence[Workshop], mutants: Iterable[Mutant]) -> Run:
    """Run every test that should detect a fault, without any fault; the files are distributed over
    the workshops."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files: dict[str, list[str]] = {test.partition("::")[0]: [] for test in tests}
    for test in tests:
        files[test.partition("::")[0]].append(test)
    shares: list[list[str]] = [[] for _ in shops]
    for number, file in enumerate(sorted(files)):
        shares[number % len(shops)] += files[file]
    print(f"{len(tests)} tests and files of tests without a fault ...", flush=True)
    began = time.monotonic()
    whole = Run(0, "")
    with ThreadPoolExecutor(len(shops)) as threads:
        runs = [
            threads.submit(shop.run, share, BASE_LIMIT_S, stop_at_first=False)
            for shop, share in zip(shops, shares, strict=True)
            if share
        ]
        for run in (future.result() for future in runs):
            whole.outcomes |= run.outcomes
            whole.seconds |= run.seconds
            if run.code != 0:
                whole.code, whole.output = run.code, whole.output + run.output
    counts = Counter(whole.outcomes.values())
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(f"  {summary} in {time.monotonic() - began:.0f} s", flush=True)
    return whole


def unfit(base: Run, mutants: Iterable[Mutant]) -> list[str]:
    """The reason why the tests cannot judge faults: some fail without a fault, or do not exist."""
    wrong = []
    if base.code != 0:
        wrong.append(base.output[-4000:])
        wrong.append(f"mutants: the tests fail without a fault (pytest: {base.code})")
    if not base.outcomes:  # pytest has named the test that does not exist and has run none
        return wrong
    for mutant in mutants:
        missing = [test for test in mutant.tests if not base.of([test])]
        if missing:
            wrong.append(f"mutants: {mutant.id}: no such test: {', '.join(missing)}")
    return wrong


def with_faults(shops: Sequence[Workshop], mutants: Sequence[Mutant], base: Run) -> list[Result]:
    """Try all faults, as many at a time as there are workshops."""
    free: SimpleQueue[Workshop] = SimpleQueue()
    for shop in shops:
        free.put(shop)

    def try_out(mutant: Mutant) -> Result:
        shop = free.get()
        try:
            return shop.try_out(mutant, base.seconds)
        finally:
            free.put(shop)

    results: list[Result] = []
    width = len(str(len(mutants)))
    with ThreadPoolExecutor(len(shops)) as threads:
        for future in as_completed([threads.submit(try_out, mutant) for mutant in mutants]):
            result = future.result()
            results.append(result)
            print(
                f"[{len(results):{width}}/{len(mutants)}] {result.verdict.value:8} "
                f"{result.seconds:5.1f} s  {result.mutant.id:44} {result.by}",
                flush=True,
            )
    return results


def report(results: Sequence[Result]) -> None:
    """A table by area, then the faults that were not detected, each with what it would break."""
    print(f"\n{'area':24} {'faults':>6} {'seen':>6}")
    for area in dict.fromkeys(result.mutant.area for result in results):
        mine = [result for result in results if result.mutant.area == area]
        print(f"{area:24} {len(mine):6} {sum(one.verdict.seen for one in mine):6}")
    unseen = [result for result in results if not result.verdict.seen]
    print(f"{'all':24} {len(results):6} {len(results) - len(unseen):6}")
    for result in unseen:
        mutant = result.mutant
        print(f"\n{result.verdict.value}: {mutant.id} in {mutant.file}: {mutant.breaks}")
        print(f"  - {mutant.old}\n  + {mutant.new}")
        print(f"  {result.by or 'by ' + ', '.join(mutant.tests)}")
    hung = sum(result.verdict is Verdict.HUNG for result in results)
    print(
        f"\n{len(results) - len(unseen)} of {len(results)} planted faults were seen"
        f"{f', {hung} of them because the tests hung' if hung else ''}."
    )


def as_json(result: Result) -> dict[str, object]:
    """A result with its fault, for ``--json``."""
    summary: dict[str, object] = {"verdict": result.verdict.value, "by": result.by}
    return asdict(result.mutant) | summary | {"seconds": round(result.seconds, 2)}


if __name__ == "__main__":
    sys.exit(main())
