"""Checks a configuration against this machine: memory, folders, disks, other servers.

``load_config`` reads and checks a configuration and reports all problems together, before a model
is loaded. It changes nothing on the machine and creates no folder.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from offload.config.memory_limits import MemoryLimit, is_relative, memory_limit
from offload.config.options import ADMIT_ALL
from offload.config.path_checks import path_problem
from offload.config.schema import (
    NO_DISK_TIER,
    CpuConfig,
    OffloadConfig,
    TierConfig,
    at_least,
    describe_default,
    draft_config,
)
from offload.config.tier_capacity import smallest_share
from offload.config.tier_types import TIER_TYPES
from offload.errors import ConfigError, Problem
from offload.namespaces.claims import Owner, live_owners
from offload.namespaces.wait_for_owners import Patience
from offload.sizes import GIB, MIB, format_size, rounded_size
from policies.registry import (
    PolicyOptionError,
    PolicySpecError,
    make_admission,
    make_policy,
)
from tiers.base import ALIGNMENT
from tiers.folders.folder import NETWORK_FILE_SYSTEMS, file_system_of
from tiers.io.codec import KeyFileError, read_key_file

T = TypeVar("T")

RESERVE_SHARE = 0.05
RESERVE_MIN = 2 * GIB
MEMORY_LEFT_SHARE = 0.125
"""The part of the memory limit that the CPU tier must leave to everything else."""
NAME_BYTES_MAX = 255
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""The kernel's setting of transparent huge pages, in brackets: ``always [madvise] never``."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings: ``problems`` prevent the start of the server, ``warnings`` do not."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, log lines about defaults that were chosen, and warnings."""

    config: OffloadConfig
    notes: tuple[str, ...]
    warnings: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class InUse(Problem):
    """Another server holds the folder at the moment, but may be about to exit."""


IsOurs = Callable[[Owner], bool]
"""Returns True if a process that holds a folder belongs to the server that makes the check."""


def nobody(_: Owner) -> bool:
    """Always False: for checks that run before this server has claimed anything."""
    return False


def same_server(owner: Owner) -> bool:
    """True if the owner is a rank of this server. Other ranks can claim their folders before the
    first rank checks the machine."""
    return owner.is_here and is_relative(owner.pid)


def patiently(check: Callable[[], T], patience: Patience) -> T:
    """Call ``check`` again as long as the only problem is that other servers hold folders.

    Raises its ``ConfigError``.
    """
    return patience.repeat(check, ConfigError, _only_held)


def _only_held(error: ConfigError) -> str:
    """Describe the first of the folders that other servers hold. Empty if there are other problems
    as well."""
    held = [problem for problem in error.problems if isinstance(problem, InUse)]
    return held[0].what if len(held) == len(error.problems) else ""


def load_config(extra: Mapping[str, Any] | None, is_ours: IsOurs = nobody) -> LoadedConfig:
    """Read ``extra`` and check it against this machine.

    Raises ``ConfigError`` with the problems of the configuration itself and those found on the
    machine, in the order of the configuration.
    """
    config, problems = draft_config(extra)
    faulty = {problem.where for problem in problems}
    found = check_machine(config, is_ours)
    problems += [problem for problem in found.problems if problem.where not in faulty]
    if problems:
        raise ConfigError(problems)
    return LoadedConfig(config, tuple(_notes(extra or {}, config)), found.warnings)


def check_machine(
    config: OffloadConfig, is_ours: IsOurs = nobody, huge_pages: Path = HUGE_PAGES
) -> Findings:
    """Check a configuration against this machine. Raises nothing."""
    problems: list[Problem] = []
    warnings: list[Problem] = []
    _check_memory(config, memory_limit(), problems, warnings)
    problems.extend(_policies(config))
    taken: dict[int, int] = {}
    for index, tier in enumerate(config.tiers):
        where = f"$.tiers[{index}]"
        if tier.path and not _check_folder(tier, f"{where}.path", is_ours, problems, warnings):
            _check_space(tier, where, taken, problems)
        _check_extras(tier, where, problems)
    warnings.extend(_huge_pages_off(config, huge_pages))
    problems.extend(_recordings(config))
    if config.wait_for_reads != "never" and not (config.look_ahead and config.tiers):
        why, fix = "look_ahead is 0", "raise look_ahead"
        if not config.tiers:
            why, fix = "there is no lower tier", "add one to $.tiers"
        what = f'"{config.wait_for_reads}" has no effect, because {why}'
        warnings.append(Problem("$.wait_for_reads", what, f"Leave it out, or {fix}."))
    return Findings(tuple(problems), tuple(warnings))


def reserve_bytes(tier: TierConfig, disk_bytes: int) -> int:
    """Free space to leave on a disk of ``disk_bytes``: as configured, or 5 % and at least 2 GiB."""
    if tier.reserve is not None:
        return tier.reserve
    return max(RESERVE_MIN, int(disk_bytes * RESERVE_SHARE))


def _notes(extra: Mapping[str, Any], config: OffloadConfig) -> Iterator[str]:
    if "capacity" not in (extra.get("cpu") or {}):
        yield describe_default(config.cpu.capacity, memory_limit())
    if not config.tiers:
        yield NO_DISK_TIER


def _check_memory(
    config: OffloadConfig, limit: MemoryLimit, problems: list[Problem], warnings: list[Problem]
) -> None:
    capacity, where = config.cpu.capacity, "$.cpu.capacity"
    bytes_max = int(limit.limit_bytes * (1 - MEMORY_LEFT_SHARE))
    if capacity > bytes_max:
        what = (
            f"{format_size(capacity)} does not fit into the memory limit of "
            f"{rounded_size(limit.limit_bytes)} ({limit.source}) beside the server itself"
        )
        problems.append(Problem(where, what, f"Use at most {format_size(bytes_max)}."))
    elif capacity < (bytes_min := ALIGNMENT * (2 if config.tiers else 1)):
        what = f"{format_size(capacity)} is too small for any chunk"
        problems.append(Problem(where, what, f"Give at least {format_size(bytes_min)}."))
    elif capacity > limit.available_bytes:
        what = (
            f"{format_size(capacity)} is more than the {rounded_size(limit.available_bytes)} of "
            "memory that are available now"
        )
        warnings.append(Problem(where, what, "Lower it, or stop other programs that use memory."))


def _huge_pages_off(config: OffloadConfig, setting: Path) -> Iterator[Problem]:
    """Warn if the CPU tier cannot get huge pages: direct I/O then pins each page of 4 KiB."""
    direct = [
        f"$.tiers[{index}]"
        for index, tier in enumerate(config.tiers)
        if tier.type == "lmdb" and tier.options.get("direct_io") != "off"
    ]
    try:
        is_off = b"[never]" in setting.read_bytes()
    except OSError:  # a kernel without this setting
        return
    if is_off and direct:
        what = (
            "transparent huge pages are off, so this tier takes 1.5 to 1.9 times the processor "
            "time per GB"
        )
        yield Problem(direct[0], what, f"Run as root: echo madvise > {setting}")


def _policies(config: OffloadConfig) -> Iterator[Problem]:
    owners: list[tuple[str, CpuConfig | TierConfig]] = [("$.cpu", config.cpu)]
    owners += [(f"$.tiers[{index}]", tier) for index, tier in enumerate(config.tiers)]
    for where, owner in owners:
        yield from _policy_problems(f"{where}.policy", owner.policy.spec, make_policy)
        if owner.admission != ADMIT_ALL:
            yield from _policy_problems(f"{where}.admission", owner.admission.spec, make_admission)


def _policy_problems(where: str, spec: Any, make: Callable[[Any], object]) -> Iterator[Problem]:
    try:
        make(spec)
    except PolicyOptionError as error:
        for option, what in error.invalid:
            yield Problem(f"{where}.{option}", what, error.fix)
        if not error.invalid:
            yield _policy_problem(where, error)
    except PolicySpecError as error:
        yield _policy_problem(where, error)


def _policy_problem(where: str, error: PolicySpecError) -> Problem:
    what, _, fix = str(error).partition(". ")
    return Problem(where, what.rstrip("."), fix)


def _check_folder(
    tier: TierConfig,
    where: str,
    is_ours: IsOurs,
    problems: list[Problem],
    warnings: list[Problem],
) -> bool:
    """Check a tier's folder; return True if it cannot be used, so that its space does not
    matter."""
    trouble = _folder_problem(tier, where) or _holder_problem(tier, where, is_ours)
    if trouble:
        problems.append(trouble)
        return True
    kind = file_system_of(_existing(tier.path))
    if kind in ("tmpfs", "ramfs"):
        what = f"{tier.path} is {kind}: it uses memory and is lost at a reboot"
        warnings.append(Problem(where, what, "Use a folder on a disk."))
    if kind == "overlay":
        what = f"{tier.path} is in the container's writable layer and is deleted with the container"
        warnings.append(Problem(where, what, "Mount a volume there."))
    return False


def _folder_problem(tier: TierConfig, where: str) -> Problem | None:
    path = tier.path
    if (longest := max(len(os.fsencode(name)) for name in path.split("/"))) > NAME_BYTES_MAX:
        what = f"has a name of {longest:,} bytes; file systems allow {NAME_BYTES_MAX}"
        return Problem(where, what, "Use shorter names.")
    if os.path.islink(path):
        what = f"{path} is a symbolic link to {os.path.realpath(path)}"
        return Problem(where, what, "Use the real path.")
    if os.path.lexists(path) and not os.path.isdir(path):
        return Problem(where, f"{path} is a file", "Give a folder.")
    if found := path_problem(path):
        return Problem(where, *found)
    return (
        _creation_problem(path, where)
        or _access_problem(path, where)
        or _file_system_problem(tier, _existing(path), where)
    )


def _creation_problem(path: str, where: str) -> Problem | None:
    """Describe why a folder cannot be created, or written to if it exists."""
    existing = _existing(path)
    if not existing.is_dir():
        return Problem(where, f"cannot create {path}: {existing} is a file", "Give another path.")
    below = Path(path).relative_to(existing).parts
    if below and os.path.islink(link := existing / below[0]):
        what = f"cannot create {path}: {link} is a symbolic link that leads nowhere"
        return Problem(where, what, "Remove the link, or give another path.")
    if reason := _not_writable(existing):
        verb = "write to" if os.path.isdir(path) else "create"
        fix = "Give the user write access, or choose another folder."
        return Problem(where, f"cannot {verb} {path}: {reason} (uid {os.geteuid()})", fix)
    return None


def _access_problem(path: str, where: str) -> Problem | None:
    for parent in Path(path).parents:
        owner = os.lstat(parent).st_uid if os.path.islink(parent) else 0
        if owner not in (0, os.geteuid()):
            what = f"{parent} is a symbolic link of uid {owner}, who could redirect it"
            return Problem(where, what, "Use the real path.")
    if not os.path.isdir(path):
        return None
    found = os.lstat(path)
    if found.st_uid != os.geteuid():
        what = f"{path} belongs to uid {found.st_uid}, but this server runs as uid {os.geteuid()}"
        return Problem(where, what, "Use another folder.")
    if found.st_mode & 0o022:
        what = f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
        return Problem(where, what, f"Run: chmod 700 {path}")
    return None


def _file_system_problem(tier: TierConfig, existing: Path, where: str) -> Problem | None:
    kind = file_system_of(existing)
    tier_type = TIER_TYPES.get(tier.type)
    if tier_type and tier_type.needs_local_disk and kind.split(".")[0] in NETWORK_FILE_SYSTEMS:
        what = f'{tier.path} is on {kind}, where a tier of type "{tier.type}" is not allowed'
        return Problem(where, what, 'Use a local disk, or "type": "file".')
    return None


def _holder_problem(tier: TierConfig, where: str, is_ours: IsOurs) -> Problem | None:
    for owner in live_owners(tier.path):
        if not is_ours(owner) and not (owner.is_sharing and tier.shared):
            what = f"{tier.path} is in use by pid {owner.pid}"
            what += "" if owner.is_here else " of another container or machine"
            what += f" ({owner.engine})" if owner.engine else ""
            return InUse(where, what, "Stop that server or choose another folder.")
    return None


def _check_space(
    tier: TierConfig, where: str, taken: dict[int, int], problems: list[Problem]
) -> None:
    """Check free space. ``taken`` sums, by file system, the needs of the tiers before this one."""
    if bytes_min := _smallest_capacity(tier):
        what = f"{format_size(tier.capacity)} is too small for any chunk"
        what += ": the index alone takes 2MiB" if tier.type == "lmdb" else ""
        problems.append(Problem(f"{where}.capacity", what, f"Give at least {at_least(bytes_min)}."))
        return
    existing = _existing(tier.path)
    disk = os.statvfs(existing)
    device = os.stat(existing).st_dev
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    reserve = reserve_bytes(tier, total)
    used = _used_bytes(Path(tier.path))
    taken_before = taken.get(device, 0)
    bytes_max = max(0, free + used - reserve - taken_before)
    taken[device] = taken_before + max(0, tier.capacity - used)
    if tier.capacity > bytes_max:
        before = " plus the space for the tiers before it" if taken_before else ""
        what = (
            f"{format_size(tier.capacity)} does not fit: {rounded_size(free)} are free, this tier "
            f"already uses {rounded_size(used)}, and a reserve of {rounded_size(reserve)}{before} "
            "must stay free"
        )
        fix = (
            f"Use at most {format_size(bytes_max)}."
            if bytes_max
            else "Free some space or lower reserve."
        )
        problems.append(Problem(f"{where}.capacity", what, fix))


def _smallest_capacity(tier: TierConfig) -> int:
    """Return the smallest valid capacity for one rank, or 0 if the tier has at least that much.

    This is a first estimate, before a chunk's size is known (``check_capacity``).
    """
    bytes_min = smallest_share(tier, ALIGNMENT, MIB)
    return bytes_min if tier.capacity < bytes_min else 0


def _check_extras(tier: TierConfig, where: str, problems: list[Problem]) -> None:
    problems += _only_in_lmdb(tier, where)
    tier_type = TIER_TYPES.get(tier.type)
    needed = tier_type.package if tier_type else None
    if needed and (reason := needed.why_unusable()):
        what = f"needs the package {needed.name}: {reason}"
        fix = f"See {needed.guide}. Run: pip install {needed.requirement}"
        problems.append(Problem(f"{where}.type", what, fix))
    if tier.compression == "zstd" and importlib.util.find_spec("zstandard") is None:
        fix = "Run: pip install zstandard"
        problems.append(Problem(f"{where}.compression", "needs the package zstandard", fix))
    if tier.encryption is None:
        return
    if importlib.util.find_spec("cryptography") is None:
        fix = "Run: pip install cryptography"
        problems.append(Problem(f"{where}.encryption", "needs the package cryptography", fix))
    problem = _key_file_problem(tier.encryption.key_file, f"{where}.encryption.key_file")
    if problem:
        problems.append(problem)


def _only_in_lmdb(tier: TierConfig, where: str) -> Iterator[Problem]:
    if tier.type == "lmdb":
        return
    chosen = {
        "encryption": tier.encryption is not None,
        "compression": tier.compression != "off",
        "recovery": tier.recovery != "quiet",
    }
    for name in (name for name, is_chosen in chosen.items() if is_chosen):
        what = f'a tier of type "{tier.type}" does not support this option'
        yield Problem(f"{where}.{name}", what, 'Leave it out, or use "type": "lmdb".')


def _key_file_problem(path: str, where: str) -> Problem | None:
    """Make the same check as the tier. No message shows any part of the key."""
    try:
        read_key_file(Path(path))
    except KeyFileError as error:
        return Problem(where, f"{path} {error}", error.fix)
    return None


def _recordings(config: OffloadConfig) -> Iterator[Problem]:
    """Check files that a server opens later: in a thread, where a failure only causes a log line,
    or in a worker, where it ends a start that has taken a minute."""
    for name, path in (
        ("record_trace", config.record_trace),
        ("record_requests", config.record_requests),
    ):
        if path is None:
            continue
        where, folder = f"$.{name}", Path(path).parent
        if os.path.exists(path) and not os.path.isfile(path):
            yield Problem(where, f"{path} is not a regular file", "Give another path.")
        elif not os.path.isdir(folder):
            yield Problem(where, f"there is no folder {folder}", "Create it, or give another path.")
        elif reason := _not_writable(folder):
            fix = "Give the user write access, or choose another folder."
            what = f"cannot write to {folder}: {reason} (uid {os.geteuid()})"
            yield Problem(where, what, fix)
    path = config.verify_path if config.verify != "off" else None
    if path is not None and (trouble := _creation_problem(path, "$.verify_path")):
        yield trouble
    if config.record_trace is not None and config.record_trace == config.record_requests:
        yield Problem("$.record_requests", "is also the file of record_trace", "Give another path.")


def _existing(path: str) -> Path:
    """The path itself or its nearest parent that exists."""
    found = Path(path)
    # os.path.exists, because Path.exists raises if a parent may not be read
    while not os.path.exists(found) and found != found.parent:
        found = found.parent
    return found


def _not_writable(folder: Path) -> str:
    """Describe why nothing can be created in ``folder``.

    It creates a file and removes it again, because access bits are not conclusive (root, read-only
    mounts, /proc).
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".kvtiers-probe-", dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _used_bytes(folder: Path) -> int:
    """Disk bytes of the files below a folder, without following links.

    Unlike ``namespaces.cleanup.usage``, follows the folder itself: a tier's path may be a link.
    """
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue  # removed meanwhile
    return total
