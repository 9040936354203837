"""Selects the tests that run again with another version of vLLM, or under Model Runner V2.

    python -m tests.combinations 0.33 v2          # the arguments for pytest
    python -m tests.combinations --table FOLDER   # what ran, and what could not run here, from the
                                                  # files of tests.results
    python -m tests.combinations --keep FOLDER    # keep these files, and show them in the docs

The quick tests are those that import vLLM. Under V2, only tests that involve a model runner are
included. Each combination runs a few of the tests on real engines. Together, these cover each kind
of KV cache, drafts, preemption, a kill and two ranks.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.imports import ROOT, files_that_import
from tests.results import digest_of

FOLDERS = ("offload", "tiers", "policies", "bench", "demo", "examples", "tests")
OF_RUNNERS = ("tests/oracle/", "tests/offload/connector/")
KIND = "tests/vllm/test_kinds.py::test_one_of_each"
SERVE = "tests/vllm/test_serve.py::test"
VERIFY = "tests/vllm/test_verify.py::test"
LATE = "tests/vllm/test_late_work.py::test_blocks_that_v2"
SERVER = "tests/vllm/test_server.py::test"

ENGINES: dict[tuple[str, str], dict[str, str]] = {
    ("0.32", "v2"): {
        f"{VERIFY}_whole_chunks_agree_and_planted_faults_do_not": "full attention",
        f"{VERIFY}_a_block_overwritten_during_a_store_or_load_is_detected": (
            "blocks that are overwritten under a copy"
        ),
        f"{KIND}[gemma3_chunks]": "sliding windows",
        f"{KIND}[granite_hybrid]": "Mamba-2 states",
        f"{SERVE}_two_ranks": "two ranks",
        f"{LATE}_zeroes_after_their_load_are_seen": "blocks that V2 zeroes late",
        f"{LATE}_writes_after_their_store_are_seen": "blocks that V2 writes late",
        f"{LATE}_copies_into_before_the_fence_are_not_stored": (
            "blocks that V2 copies into before the fence"
        ),
        f"{SERVER}_one_prompt_is_restored_under_v2": "`vllm serve`",
    },
    ("0.33", "v1"): {
        f"{KIND}[llama_draft]": "a draft model whose pages have another size",
        f"{KIND}[llama_fp8_e4m3]": "fp8",
        f"{KIND}[gemma4]": "groups of two block sizes",
        f"{KIND}[llama4]": "chunked local attention",
        f"{KIND}[lfm2]": "short convolutions",
        f"{KIND}[qwen3_next_tp2]": "Gated DeltaNet states, on two ranks",
        f"{SERVE}_after_kill_9_in_the_middle_of_storing": "a kill",
        f"{SERVER}_http_restart_and_kill_9": "`vllm serve`, restarted and killed",
    },
    ("0.33", "v2"): {
        f"{VERIFY}_whole_chunks_agree_and_planted_faults_do_not": "full attention, a kill",
        f"{KIND}[deepseek_v3_mtp]": "latent attention, with a draft layer in the same group",
        f"{KIND}[qwen3_next_ngram]": "Gated DeltaNet states, with n-gram drafts",
        f"{SERVE}_more_requests_than_the_cache_can_hold": "preemption",
        f"{SERVE}_requests_aborted_while_loading": "aborts",
    },
}
"""The tests on real engines, and the purpose of each."""

BASE = "0.32.0-v1.json"
"""The results of ``./run test`` itself."""
KEPT = ROOT / "tests/data/combinations"
"""The latest kept results of the combinations; docs/testing.md shows them."""
DOCS = ROOT / "docs/testing.md"
HEAD = "| vLLM | runner | quick tests | real engines | commit |"


def quick_files(runner: str) -> list[str]:
    """Files with quick tests whose outcome may depend on vLLM or on its model runner."""
    found = [path.relative_to(ROOT).as_posix() for path in files_that_import("vllm", *FOLDERS)]
    found = [name for name in found if not name.startswith("tests/vllm/")]
    return [name for name in found if runner == "v1" or name.startswith(OF_RUNNERS)]


def engines_of(version: str, runner: str) -> dict[str, str]:
    """The tests on real engines. A patch version counts as its minor version."""
    minor = ".".join(version.split(".")[:2])
    return ENGINES.get((minor, runner), {})


def arguments(version: str, runner: str) -> list[str]:
    """The arguments for pytest."""
    return [*engines_of(version, runner), *quick_files(runner)]


def table(folder: Path) -> str:
    """Returns the outcomes in Markdown: one line for each combination."""
    lines = [HEAD, "|---|---|---|---|---|"]
    files = sorted(folder.glob("*.json"))
    if not any(path.name.endswith(BASE) for path in files):
        lines.append("| 0.32.0 | V1 | all | all | each |")
    for path in files:
        ran = json.loads(path.read_text(encoding="utf-8"))
        cells = (ran["vllm"], ran["runner"].upper(), _counted(ran["quick"]), _engines(ran))
        lines.append(f"| {' | '.join(cells)} | {ran.get('commit') or 'several'} |")
    return "\n".join(lines)


def keep(folder: Path) -> None:
    """Keep the results of whole runs of combinations, and show them in the documentation.

    Raises ``ValueError`` if a file was changed after its run, or lacks an engine test.
    """
    found = [path for path in sorted(folder.glob("*.json")) if path.name != BASE]
    for path in found:
        ran = json.loads(path.read_text(encoding="utf-8"))
        if ran.get("digest") != digest_of(ran):
            raise ValueError(f"{path} was changed after its run")
        lost = engines_of(ran["vllm"], ran["runner"]).keys() - ran["engines"].keys()
        if lost:
            raise ValueError(f"{path} is not of a whole run: it lacks {', '.join(sorted(lost))}")
    for path in found:
        shutil.copy(path, KEPT)
    text = DOCS.read_text(encoding="utf-8")
    before, after = text.split(HEAD)
    rest = after.partition("\n\n")[2]
    DOCS.write_text(f"{before}{table(KEPT)}\n\n{rest}", encoding="utf-8")


def not_run(folder: Path) -> str:
    """Names what this machine lacks, and the files whose tests did not run for that reason."""
    needs: dict[str, set[str]] = {}
    for path in folder.glob("*.json"):
        ran = json.loads(path.read_text(encoding="utf-8"))
        for what, files in ran.get("needs", {}).items():
            needs.setdefault(what, set()).update(files)
    return "".join(
        f"NOT RUN: tests of {', '.join(sorted(files))} need {what}\n"
        for what, files in sorted(needs.items())
    )


def _engines(ran: dict[str, Any]) -> str:
    """Names the purposes of the tests on real engines, and the outcome of those that failed."""
    chosen = engines_of(ran["vllm"], ran["runner"])
    outcomes = ran["engines"]
    if not chosen:
        found = list(outcomes.values())
        return _counted({outcome: found.count(outcome) for outcome in set(found)})
    said = []
    for name, what in chosen.items():
        outcome = outcomes.get(name, "not run")
        said.append(what if outcome == "passed" else f"{what} ({outcome})")
    return "; ".join(said)


def _counted(outcomes: dict[str, int]) -> str:
    counts = [f"{outcomes[outcome]:,} {outcome}" for outcome in sorted(outcomes)]
    return ", ".join(counts) or "not run"


def main(words: list[str]) -> int:
    """Print the arguments or the table, or keep results."""
    if len(words) == 2 and words[0] == "--table":
        print(table(Path(words[1])))
        print(not_run(Path(words[1])), end="")
    elif len(words) == 2 and words[0] == "--keep":
        keep(Path(words[1]))
    elif len(words) == 2 and words[1] in ("v1", "v2"):
        print("\n".join(arguments(*words)))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
