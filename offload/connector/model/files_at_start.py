"""Finds out whether a model's files have changed while vLLM loaded the model.

vLLM reads the configuration in the first process of a server, and the weights in its workers; only
then can the connector digest the files. If they are replaced in between, blocks of the old weights
would be stored under the identity of the new ones. So every ``ModelConfig`` keeps a record of the
files from before vLLM read the first of them (`remember_files`). vLLM passes it on to the workers,
which compare the record with the files that they have digested (`changed_file`).

A record has sizes, times and targets of links, and the path behind all links. Times are compared
only with times of the same file system, never with the clock of this machine. Inode numbers are
left out, because some file systems (FUSE) change them.

In the Hub's cache, a snapshot's folder is named by its commit, and vLLM resolves a branch only
once. Files may be added to such a folder, because vLLM downloads them while it loads.

There may be no record: without our plugin, and for files that are named outside of the
``ModelConfig``. Then files count as changed if they are too new (`SETTLED_S`).

The workers of a server must agree: if only some of them trusted the files, the server could not
start. So workers on another machine than the first process, where paths may mean other files,
compare nothing with a record; without one, no worker under Ray trusts its files, because a copy on
one of the machines may be too new. With ``--nnodes`` each machine makes its own record.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.connector.model.cannot_change_kv import is_harmless_file
from offload.connector.model.weights_digest import (
    WEIGHT_SUFFIXES,
    blob_of,
    commit_of,
    find_model,
    is_snapshot,
    is_weights,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

SETTLED_S = 900.0
"""Files without a record must be older than this when the process begins. It covers the time since
the first process began, and the difference between the clocks of this machine and of a network file
system."""
ENTRIES_MAX = 5000
"""Files in a folder, and in the folders in it, that are looked at for a record."""
RECORD = "_kvtiers_files"
"""Attribute of a ``ModelConfig``. Its values are plain, because processes without kvtiers may read
them."""
_CREATE = "__post_init__"
_NAMES = ("model", "model_weights", "hf_config_path", "tokenizer", "generation_config")
"""Attributes of a ``ModelConfig`` that may name folders or files."""

State = tuple[int, int, int, str]
"""Size, modification time and change time in ns, and the target if the file is a link. Only the
target of a link to a blob of weights is recorded: its name is the identity."""
Counts = Callable[[str], bool]
"""Returns whether a file with this name is part of the identity."""


@dataclass(frozen=True, slots=True)
class Source:
    """A folder or file that the identity reads: the name that the user gave, where it was found,
    and which files in it count. ``revision``: the revision in the Hub, as vLLM has resolved it.
    ``subfolders``: files in the folders below it count as well."""

    name: str
    path: Path | None
    counts: Counts
    revision: str | None = None
    subfolders: bool = False

    def has(self, name: str) -> bool:
        """True if the file with this path below the folder counts."""
        return (self.subfolders or os.sep not in name) and self.counts(os.path.basename(name))


def weights_in(path: Path | None) -> Counts:
    """Files of weights in a folder; if the path is that of a file, only this file."""
    if path is not None and path.is_file():
        return only(path.name)
    return is_weights


def configuration_in(may_read: Callable[..., bool]) -> Counts:
    """Files of a model's folder that are not weights and may change KV."""
    return lambda name: not is_harmless_file(name, may_read)


def only(file: str) -> Counts:
    """The file with this name or path."""
    return lambda name: name == os.path.basename(file)


def remember_files() -> None:
    """Make every ``ModelConfig`` of this process record its files when it is created.

    vLLM has no hook before it reads the configuration. In a version of vLLM without this method
    there are no records.
    """
    from vllm.config import ModelConfig

    create = vars(ModelConfig).get(_CREATE)
    if create is None or hasattr(create, "remembers_files"):
        return

    @functools.wraps(create)
    def remembering(self: ModelConfig, *arguments: Any, **named: Any) -> None:
        states: dict[str, Any] = {}
        for name in _NAMES:
            _record(states, getattr(self, name, None), getattr(self, "revision", None))
        create(self, *arguments, **named)
        media = getattr(self, "multimodal_config", None)  # a worker reads this file:
        _record(states, getattr(media, "mm_encoder_fp8_scale_path", None), None)
        record = {"machine": _machine(), "start": uuid.uuid4().hex, "states": states}
        vars(self)[RECORD] = record

    vars(remembering)["remembers_files"] = True
    setattr(ModelConfig, _CREATE, remembering)


def start_of(model: ModelConfig) -> str:
    """A random name of this start of the server; empty if there is no record."""
    return str(_kept(model).get("start", ""))


def uses_ray(vllm_config: VllmConfig) -> bool:
    """True if Ray starts the workers: maybe on other machines, but all with this configuration."""
    backend = vars(vllm_config.parallel_config).get("distributed_executor_backend")
    return backend == "ray" or bool(getattr(backend, "uses_ray", False))


def changed_file(model: ModelConfig, source: Source, *, under_ray: bool = False) -> str:
    """A sentence part that says which file has changed, or may have, since before vLLM read the
    first of this model's files; empty if none has. Call it after the files were digested.

    ``under_ray``: see `uses_ray`. Raises ``OSError``.
    """
    path = source.path
    if path is None:
        return ""
    kept = _kept(model)
    if kept.get("machine", _machine()) != _machine():
        return ""
    before = kept.get("states", {}).get(os.path.abspath(path))
    if before is not None:
        return _difference(path, before, source)
    if is_snapshot(path) and _is_pinned(path, source):
        return ""
    if under_ray and not kept:
        return _UNDER_RAY.format(path, _NO_RECORD)
    if is_snapshot(path):
        return _moved(path, source)
    return _too_new(path, source)


def _is_pinned(snapshot: Path, source: Source) -> bool:
    """True if the commit of this snapshot is the one that vLLM loads, even if the branch moves."""
    commits = commit_of(source.name, source.revision), source.revision
    return os.path.exists(source.name) or snapshot.name in commits


def _moved(snapshot: Path, source: Source) -> str:
    """Says that the branch of a snapshot may have moved, if vLLM could not resolve it and its
    commit is too new."""
    branch = snapshot.parent.parent / "refs" / (source.revision or "main")
    if branch.is_file() and branch.stat().st_ctime < _began() - SETTLED_S:
        return ""
    return f"the branch of {source.name} in the Hub's cache may have moved"


def _kept(model: ModelConfig) -> Mapping[str, Any]:
    kept: Mapping[str, Any] = vars(model).get(RECORD, {})
    return kept


def _record(states: dict[str, Any], name: str | None, revision: str | None) -> None:
    """Add the state of the folder or file that this name stands for, if there is one. Never
    raises."""
    try:
        path = find_model(name, revision, None) if name else None
        if path is not None and os.path.abspath(path) not in states:
            states[os.path.abspath(path)] = _state_of(path)
    except Exception as error:  # without a record, only old files are trusted
        logger.info("kvtiers: the files of %s were not recorded: %r", name, error)


def _state_of(path: Path, *, subfolders: bool = True) -> dict[str, Any]:
    """The state of a folder, or of a file and those beside it. ``whole`` is false if there were too
    many entries, and ``whole_top`` if there were too many without those in subfolders."""
    folder = _folder_of(path)
    names = list(islice(_names_in(path, subfolders=subfolders), ENTRIES_MAX + 1))
    states = {name: _state(folder / name) for name in names if _may_count(name)}
    is_whole = len(names) <= ENTRIES_MAX
    return {
        "real": os.path.realpath(path),
        "files": {name: state for name, state in states.items() if state is not None},
        "whole": is_whole,
        "whole_top": is_whole or os.sep in names[-1],
    }


def _folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _names_in(path: Path, *, subfolders: bool) -> Iterator[str]:
    """The paths of the files below a folder; first all of those that are not in subfolders. Of a
    file, those beside it."""
    top, is_file = _folder_of(path), path.is_file()
    for folder, _, names in os.walk(top):
        inner = os.path.relpath(folder, top)
        yield from (os.path.normpath(os.path.join(inner, name)) for name in names)
        if is_file or not subfolders:
            return


def _may_count(name: str) -> bool:
    """True for every file at the top, and further down for those that may be weights."""
    return os.sep not in name or name.endswith(WEIGHT_SUFFIXES)


def _state(file: Path) -> State | None:
    """``None`` if it is not a file, or is gone."""
    try:
        target = os.readlink(file) if file.is_symlink() else ""
        if target and file.suffix in WEIGHT_SUFFIXES and blob_of(file) is not None:
            return 0, 0, 0, target
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, target


def _difference(path: Path, before: Mapping[str, Any], source: Source) -> str:
    now = _state_of(path, subfolders=source.subfolders)
    if now["real"] != before["real"]:
        return f"{path} is a link that has changed: to {before['real']} before, {now['real']} now"
    part = "whole" if source.subfolders else "whole_top"
    whole = now[part] and before[part]
    for name in sorted({**before["files"], **now["files"]}):
        one, two = before["files"].get(name), now["files"].get(name)
        if one == two or not source.has(name):
            continue
        may_be_new = not whole or is_snapshot(path)  # vLLM downloads files while it loads
        if (one is None and may_be_new) or (two is None and not whole):
            continue
        return f"{_folder_of(path) / name} has changed{_how(one, two)}"
    return "" if whole else _too_new(path, source)


def _how(one: State | None, two: State | None) -> str:
    """Explains a difference that is only one of change times."""
    is_inode = one is not None and two is not None and (*one[:2], one[3]) == (*two[:2], two[3])
    return _ONLY_INODE if is_inode else ""


def _too_new(path: Path, source: Source) -> str:
    """Names a file, folder or link that is too new to be trusted without a record. It walks no
    further than the digest of these files does."""
    settled_at = _began() - SETTLED_S
    folder = _folder_of(path)
    names = _names_in(path, subfolders=source.subfolders)
    used = [folder / name for name in names if source.has(name)]
    used = [file for file in used if file.is_file()]
    links = [each for each in (path, *path.absolute().parents) if each.is_symlink()]
    # Moving a folder changes its time. A mount point cannot be moved, and is as new as its mount.
    moved = [folder] if folder == path and not os.path.ismount(folder) else []
    changes = [(each.lstat().st_ctime, each) for each in (*used, *links, *moved)]
    changes += [(each.stat().st_ctime, each) for each in used if blob_of(each) is None]
    last, which = max(changes, default=(0.0, path))
    if last < settled_at:
        return ""
    is_inode = which in used and which.lstat().st_mtime < settled_at
    how = _ONLY_INODE if is_inode else ""
    return _TOO_NEW.format(which, SETTLED_S / 60, how, _NO_RECORD)


_ONLY_INODE = (
    " (only its inode: its owner, permissions or number of links were set, or it was replaced or "
    "rewritten and given its old modification time)"
)
_NO_RECORD = (
    "the first process of vLLM has not recorded its state (it records files of the model if "
    "kvtiers is installed there and VLLM_PLUGINS, if set, names kvtiers)"
)
_TOO_NEW = "{} has changed less than {:.0f} minutes before this process began{}, and {}"
_UNDER_RAY = "{} may have changed on one of the machines of Ray, and {}"


def _began() -> float:
    """When this process began, by this machine's clock, in s; now, if that is unknown."""
    try:
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        since_boot = int(ticks) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, IndexError):
        return time.time()


@functools.cache
def _machine() -> str:
    """A name for what paths mean here: this boot of this machine, and its mounts."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return ""
