"""Crafted exports with valid checksums: the importer reports what is wrong, imports the good
records, and never ends with a traceback."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.namespaces.manifest import Namespace
from tests.offload.cli.rank_folders import FIELDS, RECORD_NAMESPACE, kvtiers
from tests.offload.cli.test_export_import import contents
from tiers.offline import archive as portable
from tiers.testing import key_of, payload_of

SIZE = 8192
MANIFEST = {"format": 1, "namespace": Namespace.of(FIELDS).name, "fields": FIELDS}
STORE = {
    "replica": 0,
    "rank": 0,
    "epoch": 0,
    "kind": "lmdb",
    "record_bytes": SIZE,
    "records_of": RECORD_NAMESPACE.hex(),
}
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def frame(kind: str, body: bytes | dict[str, Any]) -> bytes:
    """One frame with valid checksums, whatever its content is."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"".join(portable._frame(kind, content))


def record(number: int = 0, size: int = SIZE) -> bytes:
    key = key_of(number)
    return frame("R", struct.pack("<HQ", len(key), 0) + key + payload_of(key, size).tobytes())


END = frame("E", {"records": 1})


def of(*frames: bytes) -> bytes:
    return portable.MAGIC + b"".join(frames)


def around(bad: bytes) -> bytes:
    """An export of one good record, with another frame before and after it."""
    return of(frame("M", MANIFEST), frame("S", STORE), bad, record(), bad, END)


def imported(folder: Path, content: bytes) -> tuple[int, str]:
    """Exit code and messages of an import in this process: an exception would propagate."""
    file = folder / "crafted.kvt"
    file.write_bytes(content)
    shutil.rmtree(folder / "kv", ignore_errors=True)
    result = kvtiers("import", file, folder / "kv", "--capacity", "16MiB")
    return result.code, result.out + result.err


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "a part of a head": b"\1",
    "nearly a head": b"\0" * 9,
    "a head alone": b"\0" * 10,
    "a key longer than the body": struct.pack("<HQ", 500, 0) + b"short",
    "no payload": struct.pack("<HQ", 5, 0) + b"short",
    "no key": struct.pack("<HQ", 0, 0) + b"payload",
    "a key that is too long": struct.pack("<HQ", 600, 0) + bytes(600) + b"payload",
}


@pytest.mark.parametrize("name", BODIES)
def test_only_the_invalid_record_is_lost(tmp_path: Path, name: str) -> None:
    code, said = imported(tmp_path, around(frame("R", BODIES[name])))
    assert code == 1
    assert "1 records" in said
    assert "2 damaged" in said
    assert {key for _, key in contents(tmp_path / "kv")} == {key_of(0)}


@pytest.mark.parametrize("kind", ["M", "S", "E", "X"])
@pytest.mark.parametrize("body", [DEEP, b"", b"[]", b"\xff", b"1" * 5000, b"nul"])
def test_only_a_frame_without_a_json_object_is_lost(tmp_path: Path, kind: str, body: bytes) -> None:
    code, said = imported(tmp_path, of(frame(kind, body), frame("M", MANIFEST), END))
    assert code == 1
    assert "so its namespace is unknown" in said
    content = of(
        frame("M", MANIFEST), frame("S", STORE), record(), frame(kind, body), record(1), END
    )
    code, said = imported(tmp_path, content)
    assert (code, "1 records" in said) == (1 if kind != "E" else 0, True), said


def deeply(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"a": deeply(900)}, "namespace"),
        ({"a": "x" * 70_000}, "more than 65536"),
        ({"a": float("nan")}, "namespace is not readable"),
        ([1], "namespace is not readable"),
        (None, "namespace is not readable"),
    ],
)
def test_an_unreadable_namespace_is_refused(tmp_path: Path, fields: Any, words: str) -> None:
    try:
        name = Namespace.of(fields).name
    except Exception:  # the importer must detect this as well
        name = "0" * 32
    about = {"format": 1, "namespace": name, "fields": fields}
    content = of(frame("M", about), frame("S", STORE), record(), END)
    code, said = imported(tmp_path, content)
    assert code == 1
    assert words in said
    assert not (tmp_path / "kv").exists() or not list((tmp_path / "kv").glob("*/*/rank-0"))


@pytest.mark.parametrize(
    "change",
    [
        {"replica": 1 << 47},
        {"replica": -1},
        {"replica": True},
        {"rank": 1 << 16},
        {"rank": "0"},
        {"epoch": 1.5},
        {"epoch": 1 << 60},
        {"record_bytes": None},
        {"records_of": "../../etc"},
        {"records_of": RECORD_NAMESPACE.hex() + "\n"},
        {"kind": "mooncake"},
        {"kind": ["lmdb"]},
        {"kind": {}},
    ],
)
def test_a_store_with_impossible_values_is_skipped(tmp_path: Path, change: dict[str, Any]) -> None:
    bad = frame("S", STORE | change)
    content = of(frame("M", MANIFEST), bad, record(7), frame("S", STORE), record(), END)
    code, said = imported(tmp_path, content)
    assert code == 1
    assert "2 damaged parts of the file were skipped" in said
    assert {key for _, key in contents(tmp_path / "kv")} == {key_of(0)}


def test_a_crafted_record_size_is_refused(tmp_path: Path) -> None:
    """With one byte per record, the index would be larger than the disk."""
    code, said = imported(
        tmp_path, of(frame("M", MANIFEST), frame("S", STORE | {"record_bytes": 1}), record(), END)
    )
    assert code == 1
    assert "nothing imported" in said


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
CHANGED = st.dictionaries(st.sampled_from([*STORE, *MANIFEST]), JSONS, max_size=2)
FRAMES = (
    st.builds(frame, st.sampled_from("MSREX"), st.binary(max_size=40))
    | st.builds(frame, st.sampled_from("MSE"), CHANGED.map(lambda change: STORE | change))
    | st.builds(frame, st.just("M"), CHANGED.map(lambda change: MANIFEST | change))
    | st.builds(record, st.integers(0, 3), st.integers(1, 2 * SIZE))
    | st.binary(max_size=60)
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.booleans(), st.lists(FRAMES, max_size=6))
def test_no_crafted_export_crashes_the_importer(
    folder: Path, has_beginning: bool, frames: list[bytes]
) -> None:
    beginning = [frame("M", MANIFEST), frame("S", STORE)] if has_beginning else []
    code, said = imported(folder, of(*beginning, *frames))
    assert code in (0, 1), said
