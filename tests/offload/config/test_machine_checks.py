"""Checks configurations against this machine: real folders, mounts, processes and other users."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offload.config.machine_checks import check_machine, load_config, reserve_bytes
from offload.config.memory_limits import MemoryLimit, is_relative, memory_limit
from offload.config.schema import parse_config
from offload.config.tier_types import NeededPackage
from offload.errors import ConfigError
from offload.sizes import GIB, MIB
from tests.offload.config.test_schema import compare
from tests.patience import PATIENCE_S
from tiers.folders.folder import file_system_of
from tiers.io.codec import KeyRing

SHM = Path("/dev/shm")


def tier(path: Path | str, **changes: Any) -> dict[str, Any]:
    return {"type": "lmdb", "path": str(path), "capacity": "16MiB", "reserve": 0, **changes}


def extra(*tiers: dict[str, Any], capacity: Any = "64MiB") -> dict[str, Any]:
    return {"cpu": {"capacity": capacity}, "tiers": list(tiers)}


def problems_of(*tiers: dict[str, Any], capacity: Any = "64MiB") -> dict[str, str]:
    try:
        load_config(extra(*tiers, capacity=capacity))
    except ConfigError as error:
        return {problem.where: str(problem) for problem in error.problems}
    return {}


def stable(text: str, **names: object) -> str:
    """The text with machine-dependent parts replaced by names."""
    for name, value in names.items():
        text = text.replace(str(value), f"<{name}>")
    return text


@pytest.mark.parametrize("shared", [False, True])
def test_a_tier_that_is_too_small_for_its_index_is_refused(tmp_path: Path, shared: bool) -> None:
    """The server refuses before a model is loaded; the space for a chunk is checked later."""
    text = problems_of(tier(tmp_path / "kv", capacity="1MiB", shared=shared))
    assert list(text) == ["$.tiers[0].capacity"]
    assert "1MiB is too small for any chunk: the index alone takes 2MiB" in str(text)
    least = text["$.tiers[0].capacity"].partition("Give at least ")[2].removesuffix(".")
    assert problems_of(tier(tmp_path / "kv", capacity=least, shared=shared)) == {}


def test_a_good_configuration_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    loaded = load_config(extra(tier(tmp_path / "a" / "b")))
    assert loaded.config.tiers[0].path == str(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "here").mkdir(mode=0o700)
    load_config(extra(tier(tmp_path / "here")))
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("name", ["record_trace", "record_requests"])
def test_unwritable_files_are_reported_at_start(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path, "is not a regular file"),
        (tmp_path / "no" / "x.jsonl", "there is no folder"),
        (tmp_path / "file" / "x.jsonl", "there is no folder"),
        ("/proc/x.jsonl", "cannot write to /proc"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_config({"cpu": {"capacity": "64MiB"}, name: str(path)})
        assert f"$.{name}: " in str(refused.value)
        assert words in str(refused.value)
    for path in (tmp_path / "file", tmp_path / "new.jsonl"):
        load_config({"cpu": {"capacity": "64MiB"}, name: str(path)})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_both_recordings_cannot_be_one_file(tmp_path: Path) -> None:
    file = str(tmp_path / "x.jsonl")
    both = {"record_trace": file, "record_requests": file}
    with pytest.raises(ConfigError, match="is also the file of record_trace"):
        load_config({"cpu": {"capacity": "64MiB"}, **both})


def test_notes_describe_the_chosen_defaults() -> None:
    notes = load_config({}).notes
    assert len(notes) == 2
    assert notes[0].startswith("cpu.capacity not given: using ")
    assert load_config(None).notes == notes
    assert load_config({"cpu": {"capacity": "64MiB"}}).notes == notes[1:]


def test_reading_and_machine_problems_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = problems_of(tier(tmp_path / "file", io_threads=0), tier("relative"), capacity="900TiB")
    assert list(found) == [
        "$.tiers[0].io_threads",
        "$.tiers[1].path",
        "$.cpu.capacity",
        "$.tiers[0].path",
    ]


def test_a_faulty_value_is_not_reported_twice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        load_config(extra(tier(tmp_path / "file"), tier(tmp_path / "file"), capacity="900TB9"))
    assert [problem.where for problem in caught.value.problems] == [
        "$.cpu.capacity",
        "$.tiers[1].path",
        "$.tiers[0].path",
    ]


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.touch()
    text = problems_of(tier(path))["$.tiers[0].path"]
    compare("config-machine-path-is-file", stable(text, path=path))
    below = problems_of(tier(path / "inner"))["$.tiers[0].path"]
    compare("config-machine-parent-is-file", stable(below, parent=path))


def test_a_path_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    text = problems_of(tier(tmp_path / "kv"))["$.tiers[0].path"]
    compare("config-machine-path-is-link", stable(text, folder=tmp_path))


def test_a_path_where_nothing_can_be_created() -> None:
    text = problems_of(tier("/proc/kvtiers/kv"))["$.tiers[0].path"]
    assert text.startswith("$.tiers[0].path: cannot create /proc/kvtiers/kv: ")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_path_of_another_user(tmp_path: Path) -> None:
    """User 65534 gets a folder of root that only root may write, and one that all users may
    write."""
    closed, shared = SHM / f"kvtiers-{os.getpid()}-a", SHM / f"kvtiers-{os.getpid()}-b"
    code = f"""
import os, sys
sys.path.insert(0, {os.getcwd()!r})
from tests.offload.config.test_machine_checks import problems_of, tier
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    print(problems_of(tier(path))["$.tiers[0].path"])
"""
    closed.mkdir(mode=0o700)
    shared.mkdir()
    try:
        shared.chmod(0o777)
        out = subprocess.run(
            [sys.executable, "-c", code, str(closed / "kv"), str(closed), str(shared)],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        closed.rmdir()
        shared.rmdir()
    compare("config-machine-not-ours", stable(out.stdout, closed=closed, shared=shared).rstrip())


def test_a_folder_that_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    text = problems_of(tier(tmp_path))["$.tiers[0].path"]
    compare("config-machine-writable-by-others", stable(text, path=tmp_path))


def test_a_capacity_larger_than_the_disk(tmp_path: Path) -> None:
    found = problems_of(tier(tmp_path, capacity="900TiB"))
    assert "900TiB does not fit: " in found["$.tiers[0].capacity"]


def test_following_the_hint_about_the_disk_works(tmp_path: Path) -> None:
    text = problems_of(tier(tmp_path, capacity="900TiB"))["$.tiers[0].capacity"]
    most = text.partition("Use at most ")[2].removesuffix(".")
    # Other processes write to this disk too, so the hint must hold with slightly less.
    config = parse_config(extra(tier(tmp_path, capacity=most, reserve=0)))
    assert config.tiers[0].capacity > 0
    lower = tier(tmp_path, capacity=config.tiers[0].capacity * 9 // 10)
    assert problems_of(lower) == {}


def test_two_tiers_on_one_disk_are_added_up(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    most = disk.f_bavail * disk.f_frsize
    one, two = tier(tmp_path / "a", capacity=most * 6 // 10), tier(tmp_path / "b")
    assert problems_of(one, two) == {}
    two["capacity"] = most * 6 // 10
    assert list(problems_of(one, two)) == ["$.tiers[1].capacity"]


def test_three_tiers_on_one_disk_are_added_up(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    share = disk.f_bavail * disk.f_frsize * 4 // 10
    tiers = [tier(tmp_path / name, capacity=share) for name in "abc"]
    assert problems_of(*tiers[:2]) == {}
    assert list(problems_of(*tiers)) == ["$.tiers[2].capacity"]


def test_space_that_a_tier_already_uses_is_not_counted_against_it(tmp_path: Path) -> None:
    """A server that filled its disk up to the reserve can start again."""
    home = tmp_path / ("0" * 32)
    home.mkdir()
    with (home / "data").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 512 * MIB)
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    # Half of the free space is slack for what other processes write to this disk meanwhile.
    full = tier(tmp_path, capacity="512MiB", reserve=max(0, free - 256 * MIB))
    assert problems_of(full) == {}
    full["capacity"] = "4GiB"
    assert list(problems_of(full)) == ["$.tiers[0].capacity"]


def test_only_tiers_before_it_are_named_as_taking_a_tiers_space(tmp_path: Path) -> None:
    """The message is right even if the tier uses more than its capacity, which was larger in the
    past."""
    home = tmp_path / "a" / ("0" * 32)
    home.mkdir(parents=True)
    (home / "data").write_bytes(bytes(17 * MIB))
    reserve = "900TiB"
    found = problems_of(tier(tmp_path / "a", reserve=reserve))
    assert "must stay free" in found["$.tiers[0].capacity"]
    assert "the tiers before it" not in found["$.tiers[0].capacity"]
    found = problems_of(tier(tmp_path / "b"), tier(tmp_path / "a", reserve=reserve))
    assert "plus the space for the tiers before it" in found["$.tiers[1].capacity"]


@pytest.mark.parametrize(
    ("disk", "reserve"), [(10 * GIB, 2 * GIB), (1 << 40, int((1 << 40) * 0.05)), (0, 2 * GIB)]
)
def test_the_default_reserve_is_a_share_with_a_floor(disk: int, reserve: int) -> None:
    (config,) = parse_config({"tiers": [tier("/kv", reserve="1GiB")]}).tiers
    assert reserve_bytes(config, disk) == GIB
    raw = tier("/kv")
    del raw["reserve"]
    (config,) = parse_config({"tiers": [raw]}).tiers
    assert reserve_bytes(config, disk) == reserve


@pytest.mark.skipif(
    not SHM.is_dir() or file_system_of(SHM) != "tmpfs", reason="needs /dev/shm on tmpfs"
)
def test_tmpfs_is_a_warning() -> None:
    found = check_machine(parse_config(extra(tier(SHM / "kvtiers-test"))), huge_pages=SHM)
    assert found.problems == ()
    assert [str(warning) for warning in found.warnings] == [
        "$.tiers[0].path: /dev/shm/kvtiers-test is tmpfs: it uses memory and is lost at a reboot. "
        "Use a folder on a disk."
    ]


@pytest.mark.parametrize(
    ("setting", "options", "warns"),
    [
        ("always madvise [never]\n", {}, True),
        ("always [madvise] never\n", {}, False),
        ("[always] madvise never\n", {}, False),
        (None, {}, False),
        ("always madvise [never]\n", {"direct_io": "off"}, False),
        ("always madvise [never]\n", {"type": "file"}, False),
    ],
)
def test_a_machine_without_huge_pages_is_a_warning(
    tmp_path: Path, setting: str | None, options: dict[str, str], warns: bool
) -> None:
    enabled = tmp_path / "enabled"
    if setting is not None:
        enabled.write_text(setting)
    config = parse_config(extra(tier(tmp_path / "kv", **options)))
    found = check_machine(config, huge_pages=enabled)
    assert found.problems == ()
    expected = [
        "$.tiers[0]: transparent huge pages are off, so this tier takes 1.5 to 1.9 times the "
        f"processor time per GB. Run as root: echo madvise > {enabled}"
    ]
    about = [str(warning) for warning in found.warnings if "huge pages" in warning.what]
    assert about == (expected if warns else [])


HOLD = """
import sys
from offload.namespaces.folders import claim_rank_folder
from offload.namespaces.manifest import Namespace
namespace = Namespace.of({"m": 1})
place = claim_rank_folder(sys.argv[1], namespace, replica=0, rank=0, engine="Qwen/Qwen3")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_path_that_another_server_uses(tmp_path: Path) -> None:
    """The path is refused whichever process started the server; here it is a child of this
    process."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, **pipes, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        text = problems_of(tier(tmp_path))["$.tiers[0].path"]
        compare("config-machine-in-use", stable(text, path=tmp_path, pid=other.pid))
        other.communicate("")
    assert problems_of(tier(tmp_path)) == {}


def test_workers_of_this_server_do_not_count_as_others() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert is_relative(child.pid)
        assert is_relative(os.getpid())
        assert is_relative(os.getppid())
        assert not is_relative(2**22 + 1)
    finally:
        child.communicate(b"\n")


def test_policies_are_found_or_refused(tmp_path: Path) -> None:
    raw = extra(tier(tmp_path, policy="lur"))
    raw["cpu"]["policy"] = "no_such_module:Policy"
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    texts = {problem.where: str(problem) for problem in caught.value.problems}
    assert 'unknown policy "lur"' in texts["$.tiers[0].policy"]
    assert 'Did you mean "lru"' in texts["$.tiers[0].policy"]
    assert "No module named 'no_such_module'" in texts["$.cpu.policy"]


def test_problems_with_policy_options_name_their_place(tmp_path: Path) -> None:
    raw = extra(
        tier(tmp_path / "kv", policy={"name": "slru", "protected_share": "x"},
             admission={"name": "second-use", "window": 0}),
    )  # fmt: skip
    raw["cpu"]["policy"] = {"name": "ttl", "ttl_s": -5, "hold_s": True}
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    texts = {problem.where: str(problem) for problem in caught.value.problems}
    assert texts == {
        "$.cpu.policy.ttl_s": "$.cpu.policy.ttl_s: must be a number above 0 (got -5). "
        "Its options are: ttl_s, hold_s.",
        "$.cpu.policy.hold_s": "$.cpu.policy.hold_s: must be a number of at least 0 (got True). "
        "Its options are: ttl_s, hold_s.",
        "$.tiers[0].policy.protected_share": "$.tiers[0].policy.protected_share: must be a number "
        "of at least 0 and at most 1 (got 'x'). Its options are: protected_share.",
        "$.tiers[0].admission.window": "$.tiers[0].admission.window: must be a whole number of at "
        "least 1 and at most 268,435,456 (got 0). Its options are: window.",
    }


def test_a_policy_module_that_ends_the_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_exits.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    raw = extra()
    raw["cpu"]["policy"] = "acme_exits:Mine"
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    [problem] = caught.value.problems
    assert problem.where == "$.cpu.policy"
    assert "it raised SystemExit(3)" in problem.what


def test_key_files_must_be_there_and_private(tmp_path: Path) -> None:
    key = tmp_path / "key"
    encrypted = tier(tmp_path / "kv", encryption={"key_file": str(key)})
    where = "$.tiers[0].encryption.key_file"
    missing = problems_of(encrypted)[where]
    key.mkdir()
    folder = problems_of(encrypted)[where]
    key.rmdir()
    key.write_bytes(b"secret key material")
    key.chmod(0o644)
    readable = problems_of(encrypted)[where]
    key.chmod(0o600)
    no_key = problems_of(encrypted)[where]
    key.write_text("ab" * 32)
    assert problems_of(encrypted) == {}
    texts = "\n".join((missing, folder, readable, no_key))
    compare("config-machine-key-file", stable(texts, key=key))


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl: apt-get install openssl"
)
def test_the_recommended_command_makes_a_valid_key_file(tmp_path: Path) -> None:
    """The command in the message must create a file that the tier accepts."""
    key = tmp_path / "key"
    encrypted = tier(tmp_path / "kv", encryption={"key_file": str(key)})
    [text] = problems_of(encrypted).values()
    command = text.partition("Make one: ")[2]
    subprocess.run(["bash", "-c", command], check=True)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert problems_of(encrypted) == {}
    keys = KeyRing.load(key, bytes(16))
    assert len(keys.ciphers) == 1


def machine(root: Path, memory: int, lines: str, **files: str) -> MemoryLimit:
    """Run ``memory_limit`` for a machine described by the files that Linux would show."""
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    free = memory // 2048
    (proc / "meminfo").write_text(f"MemTotal: {memory // 1024} kB\nMemAvailable: {free} kB\n")
    (proc / "self" / "cgroup").write_text(lines)
    for name, text in files.items():
        path = cgroup / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_limit(proc, cgroup)


def test_without_control_groups_the_memory_is_the_limit(tmp_path: Path) -> None:
    assert machine(tmp_path, 64 * GIB, "") == MemoryLimit(64 * GIB, 32 * GIB, "RAM")


def test_the_tightest_control_group_above_this_process_counts(tmp_path: Path) -> None:
    found = machine(
        tmp_path,
        64 * GIB,
        "0::/pod/box\n",
        pod__memory_DOT_max=f"{8 * GIB}\n",
        pod__memory_DOT_current=f"{5 * GIB}\n",
        pod__memory_DOT_stat=f"anon 1\ninactive_file {GIB}\n",
        pod__box__memory_DOT_max="max\n",
    )
    assert found == MemoryLimit(8 * GIB, 4 * GIB, "cgroup")


def test_a_control_group_limit_above_the_memory_is_ignored(tmp_path: Path) -> None:
    found = machine(tmp_path, 4 * GIB, "0::/\n", memory_DOT_max=f"{8 * GIB}\n")
    assert found == MemoryLimit(4 * GIB, 2 * GIB, "RAM")


def test_control_groups_version_1_count_too(tmp_path: Path) -> None:
    found = machine(
        tmp_path,
        64 * GIB,
        "9:cpu,cpuacct:/a\n4:memory:/docker/x\n",
        memory__docker__x__memory_DOT_limit_in_bytes=f"{2 * GIB}\n",
        memory__docker__x__memory_DOT_usage_in_bytes=f"{GIB}\n",
        memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
    )
    assert found == MemoryLimit(2 * GIB, GIB, "cgroup")


def test_a_capacity_larger_than_the_memory() -> None:
    limit = memory_limit()
    text = problems_of(capacity=limit.limit_bytes)["$.cpu.capacity"]
    assert "does not fit into the memory limit of" in text
    most = text.partition("Use at most ")[2].removesuffix(".")
    assert problems_of(capacity=most) == {}


def test_the_ranks_of_one_server_are_relatives() -> None:
    """Siblings: the second rank may claim its folder before the first has checked the path."""
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        code = (
            "from offload.config.memory_limits import is_relative; "
            f"print(is_relative({sleeper.pid}))"
        )
        asked = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        assert asked.stdout.strip() == "True"
    finally:
        sleeper.communicate(b"\n", timeout=PATIENCE_S)


def test_an_unusable_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def library_is_missing(_self: NeededPackage) -> str:
        return "libibverbs.so.1: cannot open"

    monkeypatch.setattr(NeededPackage, "why_unusable", library_is_missing)
    table = {"type": "mooncake", "master": "10.0.0.1:50051"}
    with pytest.raises(ConfigError, match=r"libibverbs.*pip install mooncake-transfer"):
        load_config({"cpu": {"capacity": "16MiB"}, "tiers": [table]})
