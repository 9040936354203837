"""Selects the tests that run again with another version of vLLM, or under Model Runner V2.

    python -m tests.combinations 0.33 v2    # the arguments for pytest
    python -m tests.combinations --table    # the table of docs/testing.md

The quick tests are those that import vLLM. Under V2, only those count in which a model runner takes
part. Each combination runs a few of the tests on real engines. Together, these cover each kind of
KV cache, drafts, preemption, a kill and two ranks.
"""

from __future__ import annotations

import sys

from tests.imports import ROOT, files_that_import

FOLDERS = ("offload", "tiers", "policies", "bench", "demo", "examples", "tests")
OF_RUNNERS = ("tests/oracle/", "tests/offload/connector/")
KIND = "tests/vllm/test_kinds.py::test_one_of_each"

ENGINES: dict[tuple[str, str], dict[str, str]] = {
    ("0.32", "v2"): {},
    ("0.33", "v1"): {},
    ("0.33", "v2"): {
        f"{KIND}[deepseek_v3_mtp]": "latent attention, with a draft layer in the same group",
        f"{KIND}[qwen3_next]": "Gated DeltaNet states, which V2 zeroes before it reports that",
    },
}
"""The tests on real engines, and the purpose of each."""


def quick_files(runner: str) -> list[str]:
    """Files with quick tests whose outcome may depend on vLLM or on its model runner."""
    found = [path.relative_to(ROOT).as_posix() for path in files_that_import("vllm", *FOLDERS)]
    found = [name for name in found if not name.startswith("tests/vllm/")]
    return [name for name in found if runner == "v1" or name.startswith(OF_RUNNERS)]


def arguments(version: str, runner: str) -> list[str]:
    """The arguments for pytest. A patch version counts as its minor version."""
    minor = ".".join(version.split(".")[:2])
    return [*ENGINES.get((minor, runner), {}), *quick_files(runner)]


def table() -> str:
    """The combinations as a Markdown table."""
    lines = ["| vLLM | runner | real engines |", "|---|---|---|"]
    lines.append("| 0.32 | V1 | all of them |")
    for (version, runner), engines in ENGINES.items():
        lines.append(f"| {version} | {runner.upper()} | {'; '.join(engines.values())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table() if sys.argv[1:] == ["--table"] else "\n".join(arguments(*sys.argv[1:])))
