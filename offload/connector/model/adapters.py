"""Digests of the LoRA adapters that vLLM has loaded; their content is part of the keys.

vLLM's hashes know an adapter only by name and path. When a request arrives, the files at the path
can differ from those that were loaded: adapters are replaced in place, kept in memory, and loaded
again. So each worker digests an adapter's files while vLLM loads it (``AdapterWatch``) and reports
the digest with a step's results. The scheduler (``AdapterBook``) reads no file. Until all ranks
have reported the same digest, requests for that adapter are excluded. Each plan says which content
it assumes for the adapters, and a worker that has loaded other content in the meantime refuses its
copies.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.lora.worker_manager import WorkerLoRAManager

from offload.connector.model.weights_digest import (
    adapter_files,
    digest_of,
    find_model,
    is_snapshot,
)

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

AdapterName = tuple[str, str]
"""Name and path, by which vLLM's hashes identify adapters."""
Loaded = Mapping[AdapterName, tuple[bytes, ...]]
"""A digest for each time that an adapter was loaded, on any rank; empty if the content is
unknown."""

ASKS_MAX = 4
"""Number of times that vLLM must look up a request again while its adapter's content is unknown.
Two steps that began before the adapter was loaded can still be in progress."""
ADAPTERS_MAX = 65_536


class AdapterWatch:
    """Digests the adapters that vLLM's LoRA manager loads in this process. It belongs to the model
    runner's thread."""

    def __init__(self, lora_config: LoRAConfig) -> None:
        self.lora_config = lora_config
        self._loaded: dict[AdapterName, bytes] = {}
        self._news: dict[AdapterName, tuple[bytes, ...]] = {}

    def begin(self) -> None:
        """Observe every load from now on. If this version of vLLM loads adapters in another way, no
        adapter is reported."""
        _WATCHES.add(self)
        if not _observe_manager():
            logger.warning(
                "kvtiers: requests with LoRA adapters are neither looked up nor stored: this "
                "version of kvtiers does not know how this vLLM loads adapters"
            )

    def load(self, request: LoRARequest, load: Callable[[], Any]) -> Any:
        """Let vLLM load an adapter, and digest its files. Raises whatever ``load`` raises."""
        before = _state_at(request.lora_path)
        _SNAPSHOTS.pop(request.lora_path, None)
        found = load()
        try:
            digest = _digest(request, before)
        except Exception as error:
            # vLLM has loaded the adapter, and can use it without a digest
            logger.warning("kvtiers: adapter %s cannot be digested: %r", request.lora_name, error)
            digest = b""
        name = (request.lora_name, request.lora_path)
        self._loaded[name] = digest
        self._news[name] = (*self._news.get(name, ()), digest)
        return found

    def take(self) -> Loaded:
        """Return the adapters loaded since the previous call."""
        news, self._news = self._news, {}
        return news

    def agrees(self, assumed: Mapping[AdapterName, bytes]) -> bool:
        """True if the loaded adapters have the content that the scheduler assumes."""
        return all(self._loaded.get(name) == digest for name, digest in assumed.items())


class AdapterBook:
    """The adapters that ``ranks`` workers have reported as loaded. Owned by the scheduler's
    thread."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._last: dict[AdapterName, deque[bytes]] = {}  # the last digest of each rank
        self._changed: set[AdapterName] = set()
        self._asked: dict[str, int] = {}
        self._users: dict[str, tuple[AdapterName, bytes]] = {}

    def identity_of(self, request: Request) -> bytes | None:
        """The part of a request's identity that vLLM's block hashes lack: its adapter's content.

        ``None`` if the content is not known.
        """
        name = _name_of(request)
        if name is None:
            return b""
        last = self._last.get(name)
        if last is None or name in self._changed or len(last) < self._ranks or len({*last}) > 1:
            return None
        return last[0] or None

    def may_come(self, request: Request) -> bool:
        """True if a worker may soon report this request's adapter, so it is worth looking up the
        request again.

        vLLM loads some adapters only when a request for them runs.
        """
        name = _name_of(request)
        if name is None or name in self._changed or len(self._last.get(name, ())) >= self._ranks:
            return False
        asked = self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        return asked <= ASKS_MAX

    def begin(self, request: Request, identity: bytes) -> None:
        """Record that the keys of this request are made with ``identity``."""
        self._asked.pop(request.request_id, None)
        name = _name_of(request)
        if name is not None and identity:
            self._users[request.request_id] = name, identity

    def end(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._asked.pop(request_id, None)
        self._users.pop(request_id, None)

    @property
    def assumed(self) -> Mapping[AdapterName, bytes]:
        """The digests that live requests assume for their adapters."""
        return dict(self._users.values())

    def take(self, loaded: Loaded) -> list[str]:
        """Process the adapters that workers have loaded.

        Returns the live requests whose keys no longer match their adapter.
        """
        for name, digests in loaded.items():
            is_new = name not in self._last
            last = self._last.setdefault(name, deque(maxlen=self._ranks))
            first = last[0] if last else digests[0]
            last.extend(digests)
            if name not in self._changed and any(digest != first for digest in digests):
                self._changed.add(name)
                logger.warning(_CHANGED, *name)
            elif is_new and not first:
                logger.warning(_UNKNOWN, *name)
        while len(self._last) > ADAPTERS_MAX:
            self._last.pop(next(iter(self._last)))
        return [user for user, (name, _) in self._users.items() if name in self._changed]

    def forget(self) -> None:
        """Forget all but the latest content of each adapter, because vLLM's prefix cache and the
        tiers are empty."""
        self._changed.clear()


_CHANGED = (
    "kvtiers: the files of LoRA adapter %s (%s) have changed since it was first loaded. vLLM's own "
    "prefix cache mixes blocks of both contents, so requests for this adapter are neither looked "
    "up nor stored "
    "until all caches are reset (reset_prefix_cache with reset_external) or the adapter is "
    "loaded under another name"
)
_UNKNOWN = (
    "kvtiers: the content of LoRA adapter %s (%s) is unknown: its files changed while they were "
    "loaded, or were not found. Requests for this adapter are neither looked up nor stored"
)


def joined(one: Loaded, other: Loaded) -> Loaded:
    """Merge the adapters that two ranks have loaded."""
    return {name: one.get(name, ()) + other.get(name, ()) for name in {**one, **other}}


def _name_of(request: Request) -> AdapterName | None:
    lora = request.lora_request
    return None if lora is None else (lora.lora_name, lora.lora_path)


def _digest(request: LoRARequest, before: object) -> bytes:
    """A digest (32 bytes) of the files that vLLM has just loaded.

    Empty if the files have changed since ``before``, or if their location is unknown. The Hub's
    cache names files by their content, so their names suffice there; the branch may have moved
    since vLLM looked for it.
    """
    folder = _SNAPSHOTS.get(request.lora_path)
    if folder is None:
        folder = find_model(os.path.expanduser(request.lora_path), None, None)
    files = adapter_files(folder) if folder is not None else []
    if not files:
        return b""
    content = digest_of(files)
    after = _state_at(request.lora_path)
    if before != after:
        return b""
    layout = b"3d" if request.is_3d_lora_weight else b""
    return hashlib.sha256(content + layout).digest()


def _state_at(path: str) -> object:
    """A value that changes when these files change; ``None`` if there are no files at this path."""
    try:
        folder = Path(path).expanduser()
        return _states(adapter_files(folder)) if folder.exists() else None
    except OSError:
        return None


def _states(files: Iterable[Path]) -> list[tuple[str, int, int, int, int]]:
    found = []
    for file in files:
        state = file.stat()
        found.append((str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino))
    return found


_WATCHES: weakref.WeakSet[AdapterWatch] = weakref.WeakSet()
_OBSERVERS: list[object] = []
_SNAPSHOTS: dict[str, Path] = {}
"""The snapshot of the Hub's cache from which vLLM loaded an adapter last, by the path given."""
_FIND = "get_adapter_absolute_path"


def _observe_manager() -> bool:
    """Make every LoRA manager of this process report its loads to the watches.

    vLLM does not report adapters to connectors; all their files are loaded through this one method.
    """
    original = vars(WorkerLoRAManager).get("_load_adapter")
    if original is None:
        return False
    if original in _OBSERVERS:
        return True

    @wraps(original)
    def load_adapter(manager: Any, request: LoRARequest) -> Any:
        load = partial(original, manager, request)
        for watch in list(_WATCHES):
            if watch.lora_config is manager.lora_config:
                load = partial(watch.load, request, load)
        return load()

    _OBSERVERS.append(load_adapter)
    WorkerLoRAManager._load_adapter = load_adapter
    _observe_snapshots()
    return True


def _observe_snapshots() -> None:
    """Record where the LoRA manager finds adapters in the Hub's cache."""
    module = sys.modules[WorkerLoRAManager.__module__]
    find = vars(module).get(_FIND)
    if find is None or find in _OBSERVERS:
        return

    @wraps(find)
    def find_adapter(lora_path: str) -> str:
        found = str(find(lora_path))
        if found != lora_path and is_snapshot(Path(found)):
            _SNAPSHOTS[lora_path] = Path(found)
        return found

    _OBSERVERS.append(find_adapter)
    setattr(module, _FIND, find_adapter)
