"""The identity as a value: injective, stable, and safe against hostile manifests."""

from __future__ import annotations

import json
import math
import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import NamespaceError
from offload.namespaces.manifest import (
    ABSENT,
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    NAME,
    Namespace,
    UnreadableError,
    differing_fields,
    read_manifest,
    write_manifest,
)

GOLDEN_FIELDS: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "revision": None,
    "weights": {"kind": "files", "digest": "00ff"},
    "rope": {"rope_theta": 1000000.0, "scaling": None},
    "geometry": [{"kind": "full", "block_size": 16, "page_bytes": [32768, 32768]}],
    "name": "Modell \u00e4\U0001f600",
    "enabled": True,
}
GOLDEN_NAME = "cde0870806f406d0f35445b977ae611c"

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.text(string.ascii_lowercase, min_size=1, max_size=5), VALUES, max_size=5
)


def typed(value: Any) -> Any:
    """A value with its type spelled out: an oracle of equality that distinguishes 1, 1.0 and
    True."""
    if isinstance(value, dict):
        return ("dict", tuple(sorted((name, typed(item)) for name, item in value.items())))
    if isinstance(value, list):
        return ("list", tuple(typed(item) for item in value))
    sign = math.copysign(1, value) if isinstance(value, float) else 0
    return (type(value).__name__, sign, str(value))


@settings(max_examples=200, deadline=None)
@given(FIELDS, FIELDS)
def test_digests_differ_exactly_if_the_fields_differ(a: dict[str, Any], b: dict[str, Any]) -> None:
    one, two = Namespace.of(a), Namespace.of(b)
    same = typed(a) == typed(b)
    assert (one.digest == two.digest) == same
    assert (one == two) == same
    assert (differing_fields(one, two) == []) == same


@settings(max_examples=150, deadline=None)
@given(FIELDS, st.data())
def test_a_change_of_one_field_changes_the_digest_and_is_named(
    fields: dict[str, Any], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(fields))) if fields else "new"
    value = data.draw(VALUES)
    changed = {**fields, name: value}
    one, two = Namespace.of(fields), Namespace.of(changed)
    if name in fields and typed(fields[name]) == typed(value):
        assert one.digest == two.digest
        return
    assert one.digest != two.digest
    assert all(
        path == name or path.startswith((f"{name}.", f"{name}["))
        for path, _, _ in differing_fields(one, two)
    )


@settings(max_examples=60, deadline=None)
@given(FIELDS)
def test_the_name_is_a_safe_path_component_whatever_the_fields_are(fields: dict[str, Any]) -> None:
    assert NAME.fullmatch(Namespace.of(fields).name)
    assert len(Namespace.of(fields).digest) == 16


def test_the_name_is_the_same_in_every_process_and_version() -> None:
    """If this changes, every cache on every disk becomes useless: raise the format version
    instead."""
    assert Namespace.of(GOLDEN_FIELDS).name == GOLDEN_NAME


def test_another_process_with_another_hash_seed_agrees() -> None:
    code = (
        "import json,sys; from offload.namespaces.manifest import Namespace;"
        "print(Namespace.of(json.loads(sys.stdin.read())).name)"
    )
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(GOLDEN_FIELDS),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == Namespace.of(GOLDEN_FIELDS).name


def test_the_order_of_fields_does_not_matter_and_tuples_are_lists() -> None:
    assert Namespace.of({"a": 1, "b": (1, 2)}) == Namespace.of({"b": [1, 2], "a": 1})


@pytest.mark.parametrize(
    "value", [b"x", {1}, object(), {1: 2}, Path("/x"), [b"x"], float("nan"), float("inf")]
)
def test_values_without_one_canonical_text_are_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Namespace.of({"field": value})


@pytest.mark.parametrize(
    ("a", "b"), [(1, True), (0, False), (1, 1.0), (0.0, -0.0), (1, "1"), (None, "None"), ([], {})]
)
def test_values_that_python_considers_equal_are_distinguished(a: Any, b: Any) -> None:
    one, two = Namespace.of({"x": a}), Namespace.of({"x": b})
    assert one.digest != two.digest
    assert [name for name, _, _ in differing_fields(one, two)] == ["x"]


def test_differences_name_the_innermost_field() -> None:
    one = Namespace.of({"geometry": {"groups": [{"block_size": 16, "kind": "full"}]}, "tp": 1})
    two = Namespace.of({"geometry": {"groups": [{"block_size": 32, "kind": "full"}]}, "pp": 1})
    assert differing_fields(one, two) == [
        ("geometry.groups[0].block_size", 16, 32),
        ("pp", ABSENT, 1),
        ("tp", 1, ABSENT),
    ]


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    namespace = Namespace.of(GOLDEN_FIELDS)
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, namespace)
    write_manifest(tmp_path, namespace)
    assert read_manifest(tmp_path) == namespace
    assert [entry.name for entry in tmp_path.iterdir()] == [MANIFEST_NAME]
    assert (tmp_path / MANIFEST_NAME).stat().st_mode & 0o777 == 0o600


def test_a_manifest_too_large_to_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than 65536"):
        write_manifest(tmp_path, Namespace.of({"x": "y" * MANIFEST_BYTES_MAX}))
    assert list(tmp_path.iterdir()) == []


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _with(**changes: Any) -> bytes:
    namespace = Namespace.of({"a": 1})
    document = {"format": 1, "namespace": namespace.name, "fields": namespace.fields, **changes}
    return json.dumps(document).encode()


HOSTILE: dict[str, Any] = {
    "empty": b"",
    "random bytes": bytes(range(256)),
    "not json": b"{",
    "latin-1": '{"format": "\u00e9"}'.encode("latin-1"),
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "nested arrays": b"[" * 60_000,
    "nested objects": b'{"a":' * 12_000,
    "nested fields": b'{"format":1,"namespace":"","fields":' + b'{"a":' * 900 + b"1" + b"}" * 901,
    "huge integer": b'{"format":' + b"9" * 50_000 + b"}",
    "no format": b"{}",
    "format is text": _with(format="1"),
    "more members": _with(extra=1),
    "fewer members": b'{"format": 1}',
    "fields are a list": _with(fields=[1]),
    "fields were changed": _with(fields={"a": 2}),
    "name was changed": _with(namespace="0" * 32),
    "infinity": _with().replace(b'"a": 1', b'"a": 1e999'),
    "a name twice": _with().replace(b'"a": 1', b'"a": 1, "a": 1'),
    "too large": _with() + b" " * MANIFEST_BYTES_MAX,
    "sparse terabyte": _sparse,
    "pipe": _fifo,
    "folder": Path.mkdir,
    "link to a file": lambda path: path.symlink_to("/etc/hostname"),
    "dangling link": lambda path: path.symlink_to(path.parent / "nowhere"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}
LINKS = {kind for kind in HOSTILE if "link" in kind}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_only_causes_an_error(kind: str, tmp_path: Path) -> None:
    made = HOSTILE[kind]
    path = tmp_path / MANIFEST_NAME
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        made(path)
    # A link is not followed, so nothing is known about what it names.
    expected = UnreadableError if kind in LINKS else NamespaceError
    with pytest.raises(expected) as caught:
        read_manifest(tmp_path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_newer_format_has_a_message_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(b'{"format": 3, "whatever": []}')
    with pytest.raises(NamespaceError, match=r"format 3, newer than this build's 1\. Upgrade"):
        read_manifest(tmp_path)
