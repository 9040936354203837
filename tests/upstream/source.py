"""vLLM's source distribution: from the package index, kept in ``.cache/vllm``.

``pip download`` would build the package to read its metadata, which takes compilers and minutes.
This asks the index directly; pip's settings choose the index.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CACHE = Path(__file__).resolve().parents[2] / ".cache/vllm"
JSON = "application/vnd.pypi.simple.v1+json"
TIMEOUT_S = 60


class NoSourceError(Exception):
    """No package index has answered with this version's source distribution."""


def source_of(version: str) -> Path:
    """The path of ``vllm-VERSION.tar.gz``, downloaded unless it is there."""
    path = CACHE / f"vllm-{version}.tar.gz"
    if not path.exists():
        try:
            _download(version, path)
        except (OSError, ValueError) as error:
            raise NoSourceError(f"no package index gives {path.name}: {error}") from error
    return path


def _download(version: str, path: Path) -> None:
    index = _pip_setting("index-url") or "https://pypi.org/simple"
    with _open(f"{index.rstrip('/')}/vllm/", JSON) as answer:
        if JSON not in answer.headers.get("Content-Type", ""):
            raise ValueError(f"{index} does not answer in JSON (PEP 691)")
        files = {file["filename"]: file for file in json.load(answer)["files"]}
    if path.name not in files:
        raise ValueError(f"{index} does not list it")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with _open(files[path.name]["url"], "*/*") as answer, part.open("wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != files[path.name]["hashes"]["sha256"]:
            raise ValueError("the download is damaged: its SHA-256 is not the index's")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _open(url: str, accepted: str) -> Any:
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"{url} is not an HTTP address")
    request = urllib.request.Request(url, headers={"Accept": accepted})
    context = ssl.create_default_context(cafile=_pip_setting("cert"))
    return urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context)


def _pip_setting(name: str) -> str | None:
    """A setting of pip's, from its files or its environment variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = None
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if key in (f"global.{name}", f"download.{name}", f":env:.{name}"):
            found = value.strip("'\"")
    return found
