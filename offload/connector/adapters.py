"""What a LoRA adapter's content is, for its keys."""

from __future__ import annotations

import os
import secrets
import threading
from typing import TYPE_CHECKING

from offload.connector.weights import adapter_files, digest_of, find_model

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


def adapter_digest(lora_request: LoRARequest) -> bytes:
    """32 bytes that stand for the content of a LoRA adapter, to be mixed into its keys.

    vLLM's own hashes know an adapter by name and path only. The digest is taken when the adapter is
    first seen. If its files change while the server runs nobody can tell from here which version
    is loaded, so from then on every call gives another value: such requests find nothing and are
    found by nobody until a restart. The same holds for an adapter that cannot be read.
    Thread-safe; after the first call it costs a few ``stat``.
    """
    return _ADAPTERS.digest(lora_request.lora_path)


class _AdapterDigests:
    """Digests of adapters by path, with the state of the files they were taken from."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, tuple[tuple[str, int, int, int], ...]]] = {}
        self._lock = threading.Lock()

    def digest(self, path: str) -> bytes:
        try:
            with self._lock:
                if path not in self._known:
                    self._known[path] = self._take(path)
                digest, taken_from = self._known[path]
            if tuple(_state(name) for name, *_ in taken_from) == taken_from:
                return digest
        except OSError:
            pass  # unreadable: nothing can be said, as below
        return secrets.token_bytes(32)

    @staticmethod
    def _take(path: str) -> tuple[bytes, tuple[tuple[str, int, int, int], ...]]:
        place = find_model(path, None, None)
        files = adapter_files(place) if place else []
        if not files:
            raise FileNotFoundError(path)
        before = tuple(_state(str(file)) for file in files)
        return digest_of(files), before


_ADAPTERS = _AdapterDigests()


def _state(name: str) -> tuple[str, int, int, int]:
    found = os.stat(name)
    return name, found.st_size, found.st_mtime_ns, found.st_ino
