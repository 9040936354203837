"""Digests of the LoRA adapters that vLLM has loaded; their content is part of the keys.

vLLM's hashes know an adapter by name and path only. What lies at the path when a request comes
says nothing of what was loaded: adapters are replaced in place, kept, and loaded again. So each
worker digests an adapter's files while vLLM loads it (``AdapterWatch``) and reports that with a
step's answers; the scheduler (``AdapterBook``) reads no file. Until all ranks have reported the
same, requests for that adapter stay outside. Each plan says what it takes the adapters for, and a
worker that has loaded another content meanwhile refuses its copies.
"""

from __future__ import annotations

import hashlib
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.lora.worker_manager import WorkerLoRAManager

from offload.connector.model.weights_digest import adapter_files, digest_of, find_model

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

AdapterName = tuple[str, str]
"""Name and path, by which vLLM's hashes tell adapters apart."""
Loaded = Mapping[AdapterName, tuple[bytes, ...]]
"""A digest for each time that an adapter was loaded, on any rank; empty bytes: nobody can say."""

ASKS_MAX = 4
"""So often a request is asked to come again for what its adapter holds. Two steps may be under way
whose workers had not loaded it."""
ADAPTERS_MAX = 65_536


class AdapterWatch:
    """Digests what vLLM's LoRA manager loads in this process. Belongs to the model runner's
    thread."""

    def __init__(self, lora_config: LoRAConfig) -> None:
        self.lora_config = lora_config
        self._loaded: dict[AdapterName, bytes] = {}
        self._news: dict[AdapterName, tuple[bytes, ...]] = {}

    def begin(self) -> None:
        """See every load from now on. Where this vLLM loads in another way nothing is reported."""
        _WATCHES.add(self)
        if not _observe_manager():
            logger.warning(
                "kvtiers: requests with LoRA adapters are neither looked up nor stored: how this "
                "version of vLLM loads adapters is not known here"
            )

    def load(self, request: LoRARequest, load: Callable[[], Any]) -> Any:
        """Have vLLM load an adapter, and note what was in its files. Raises what ``load`` does."""
        before = _state_at(request.lora_path)
        found = load()
        try:
            digest = _digest(request, before)
        except Exception as error:  # vLLM has loaded it, which is what matters to it
            logger.warning("kvtiers: adapter %s cannot be digested: %r", request.lora_name, error)
            digest = b""
        name = (request.lora_name, request.lora_path)
        self._loaded[name] = digest
        self._news[name] = (*self._news.get(name, ()), digest)
        return found

    def take(self) -> Loaded:
        """Returns the adapters loaded since the last call."""
        news, self._news = self._news, {}
        return news

    def agrees(self, assumed: Mapping[AdapterName, bytes]) -> bool:
        """True if these adapters have the content that the scheduler assumes."""
        return all(self._loaded.get(name) == digest for name, digest in assumed.items())


class AdapterBook:
    """The adapters that ``ranks`` workers have reported as loaded. Owned by the scheduler's
    thread."""

    def __init__(self) -> None:
        self.ranks = 1
        self._last: dict[AdapterName, deque[bytes]] = {}  # of each rank, the last
        self._changed: set[AdapterName] = set()
        self._asked: dict[str, int] = {}
        self._users: dict[str, tuple[AdapterName, bytes]] = {}

    def identity_of(self, request: Request) -> bytes | None:
        """The part of a request's identity that vLLM's block hashes lack: its adapter's content.
        ``None`` if that is not known."""
        name = _name_of(request)
        if name is None:
            return b""
        last = self._last.get(name)
        if last is None or name in self._changed or len(last) < self.ranks or len({*last}) > 1:
            return None
        return last[0] or None

    def may_come(self, request: Request) -> bool:
        """Whether a worker may soon report the adapter of this request, which is asked again then:
        vLLM loads some adapters only when a request for them runs."""
        name = _name_of(request)
        if name is None or name in self._changed or len(self._last.get(name, ())) >= self.ranks:
            return False
        asked = self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        return asked <= ASKS_MAX

    def begin(self, request: Request, identity: bytes) -> None:
        """The keys of this request are made with ``identity`` now."""
        self._asked.pop(request.request_id, None)
        name = _name_of(request)
        if name is not None and identity:
            self._users[request.request_id] = name, identity

    def end(self, request_id: str) -> None:
        """The request is over."""
        self._asked.pop(request_id, None)
        self._users.pop(request_id, None)

    @property
    def assumed(self) -> Mapping[AdapterName, bytes]:
        """The digests that live requests assume for their adapters."""
        return dict(self._users.values())

    def take(self, loaded: Loaded) -> list[str]:
        """Workers have loaded adapters. Returns the live requests whose adapter is not what their
        keys say any more."""
        for name, digests in loaded.items():
            is_new = name not in self._last
            last = self._last.setdefault(name, deque(maxlen=self.ranks))
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
        """vLLM's prefix cache and the tiers are empty: an adapter is what was loaded last."""
        self._changed.clear()


_CHANGED = (
    "kvtiers: the files of LoRA adapter %s (%s) have changed since it was first loaded. vLLM's own "
    "prefix cache mixes both, so its requests are neither looked up nor stored until all caches "
    "are reset (reset_prefix_cache with reset_external), or it is loaded under another name"
)
_UNKNOWN = (
    "kvtiers: what is in LoRA adapter %s (%s) is not known: its files changed while they were "
    "loaded, or were not found. Its requests are neither looked up nor stored"
)


def joined(one: Loaded, other: Loaded) -> Loaded:
    """Merges the adapters that two ranks have loaded."""
    return {name: one.get(name, ()) + other.get(name, ()) for name in {**one, **other}}


def _name_of(request: Request) -> AdapterName | None:
    lora = request.lora_request
    return None if lora is None else (lora.lora_name, lora.lora_path)


def _digest(request: LoRARequest, before: object) -> bytes:
    """32 bytes for the files that were just loaded; none if they are not those of ``before``, or
    nobody knows where they are. The Hub's cache names them by their content."""
    place = find_model(os.path.expanduser(request.lora_path), None, None)
    files = adapter_files(place) if place is not None else []
    if not files:
        return b""
    content = digest_of(files)
    after = _state_at(request.lora_path)
    if before != after:
        return b""
    layout = b"3d" if request.is_3d_lora_weight else b""
    return hashlib.sha256(content + layout).digest()


def _state_at(path: str) -> object:
    """By what a change of these files shows; ``None`` if there are none at this path."""
    try:
        place = Path(path).expanduser()
        return _states(adapter_files(place)) if place.exists() else None
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


def _observe_manager() -> bool:
    """Have every LoRA manager of this process tell the watches what it loads. vLLM tells connectors
    nothing of adapters; this is the one place through which all their files come."""
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
    return True
