"""Compares every signature, constant and struct of ``tiers.cuda_driver`` with the real ``cuda.h``.

The header's prototypes are read from the preprocessor's output, and a C program prints how each
parameter is passed. So nothing here repeats a signature by hand.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.libcuda import compile_c, compiler, triton_folder
from tests.patience import PATIENCE_S
from tiers import cuda_driver
from tiers.cuda_driver import (
    _SIGNATURES,
    BATCH_COPY_VERSION,
    DriverError,
    MemcpyAttributes,
    MemLocation,
    _BatchCopy,
    load_driver,
)

BATCH_TYPE = f"PFN_cuMemcpyBatchAsync_v{BATCH_COPY_VERSION}"

CONSTANTS = {
    "_SUCCESS": "CUDA_SUCCESS",
    "_REGISTER_PORTABLE": "CU_MEMHOSTREGISTER_PORTABLE",
    "_REGISTER_DEVICEMAP": "CU_MEMHOSTREGISTER_DEVICEMAP",
    "_CAPTURE_RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "_STREAM_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
    "_EVENT_BLOCKING_SYNC": "CU_EVENT_BLOCKING_SYNC",
    "_EVENT_DISABLE_TIMING": "CU_EVENT_DISABLE_TIMING",
    "_ACCESS_IN_STREAM_ORDER": "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM",
    "_PREFER_OVERLAP_WITH_COMPUTE": "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE",
    "_CAN_USE_HOST_POINTER": "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "_SYMBOL_FOUND": "CU_GET_PROC_ADDRESS_SUCCESS",
}
STRUCTS: dict[type[ctypes.Structure], tuple[str, dict[str, str]]] = {
    MemLocation: ("CUmemLocation", {"type": "type", "id": "id"}),
    MemcpyAttributes: (
        "CUmemcpyAttributes",
        {
            "src_access_order": "srcAccessOrder",
            "src_location": "srcLocHint",
            "dst_location": "dstLocHint",
            "flags": "flags",
        },
    ),
}

PROGRAM = """
#include <cuda.h>
#include <cudaTypedefs.h>
#include <stddef.h>
#include <stdio.h>
/* How the calling convention passes a value: as a pointer, or as an integer of this size. */
#define IS_POINTER(T) (__builtin_classify_type(*(T *)0) == 5)
#define KIND(T) (IS_POINTER(T) ? "pointer" : "integer")
#define PASSED(T) printf("%s\\"%s%zu\\"", comma, KIND(T), sizeof(T)), comma = ", "
int main(void)
{
    const char *comma = "";
    printf("{");
BODY
    printf("}");
    return 0;
}
"""


def prototypes() -> dict[str, list[str]]:
    """The C types of each function's parameters, by the name under which it is exported."""
    include = triton_folder("include")
    command = [compiler(), "-E", "-P", f"-I{include}", "-include", "cuda.h"]
    command += ["-include", "cudaTypedefs.h", "-xc", "/dev/null"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\bCUresult\s+(cu\w+)\s*\(([^()]*)\)\s*;", text)
    typedefs = re.findall(r"typedef\s+CUresult\s*\(\s*\*(PFN_\w+)\s*\)\s*\(([^()]*)\)\s*;", text)
    return {name: types_of(parameters) for name, parameters in [*found, *typedefs]}


def types_of(parameters: str) -> list[str]:
    """Parse ``CUdevice *dev, int n`` into ``["CUdevice *", "int"]``."""
    parts = [part.strip() for part in parameters.split(",")]
    return [re.sub(r"\w+$", "", part).strip() for part in parts if part != "void"]


def passed(argument: Any) -> str:
    """How ``ctypes`` passes an argument of this declared type."""
    is_pointer = argument in (ctypes.c_void_p, ctypes.c_char_p)
    return f"{'pointer' if is_pointer else 'integer'}{ctypes.sizeof(argument)}"


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The header's information: how each function's parameters are passed, constants, structs."""
    declared = prototypes()
    wanted = [name for name in (*_SIGNATURES, BATCH_TYPE) if name in declared]
    body = []
    for name in wanted:
        body.append(f'printf("%s\\"{name}\\": [", comma); comma = "";')
        body += [f"PASSED({kind});" for kind in declared[name]]
        body.append('printf("]"); comma = ", ";')
    for name in CONSTANTS.values():
        body.append(f'printf("%s\\"{name}\\": %lld", comma, (long long){name});')
    for structure, (name, fields) in STRUCTS.items():
        body.append(f'printf("%s\\"{name}\\": [%zu", comma, sizeof({name}));')
        members = [fields[field[0]] for field in structure._fields_]
        body += [f'printf(", %zu", offsetof({name}, {member}));' for member in members]
        body.append('printf("]");')
    folder = tmp_path_factory.mktemp("header")
    source = folder / "header.c"
    source.write_text(PROGRAM.replace("BODY", "\n".join(f"    {line}" for line in body)))
    compile_c(source, folder / "header")
    done = subprocess.run(
        [folder / "header"], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("name", _SIGNATURES)
def test_a_signature_equals_the_headers(name: str, header: dict[str, Any]) -> None:
    assert name in header, "the header exports no such name"
    assert [passed(argument) for argument in _SIGNATURES[name]] == header[name]


def test_the_batched_copy_has_the_requested_version(header: dict[str, Any]) -> None:
    arguments = _BatchCopy._argtypes_
    assert [passed(argument) for argument in arguments] == header[BATCH_TYPE]
    assert _BatchCopy._restype_ is ctypes.c_int


@pytest.mark.parametrize("ours", CONSTANTS)
def test_a_constant_equals_the_headers(ours: str, header: dict[str, Any]) -> None:
    assert getattr(cuda_driver, ours) == header[CONSTANTS[ours]]


@pytest.mark.parametrize("structure", STRUCTS)
def test_a_struct_has_the_headers_layout(
    structure: type[ctypes.Structure], header: dict[str, Any]
) -> None:
    offsets = [getattr(structure, field[0]).offset for field in structure._fields_]
    assert [ctypes.sizeof(structure), *offsets] == header[STRUCTS[structure][0]]


def test_every_constant_is_compared() -> None:
    values = {
        name
        for name, value in vars(cuda_driver).items()
        if re.fullmatch(r"_[A-Z][A-Z_]+", name) and isinstance(value, int)
    }
    assert values == set(CONSTANTS)


def test_the_comparison_detects_a_wrong_signature(header: dict[str, Any]) -> None:
    """A missing argument, a pointer instead of a number, and four bytes instead of eight."""
    right = header["cuMemcpyAsync"]
    assert right == ["integer8", "integer8", "integer8", "pointer8"]
    for wrong in (
        [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t],
        [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p],
        [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p],
    ):
        assert [passed(argument) for argument in wrong] != right


def test_without_a_driver_the_error_says_so() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a CUDA driver")
    with pytest.raises(DriverError, match="no CUDA driver"):
        load_driver()


def test_a_driver_without_a_function_is_too_old(tmp_path: Path) -> None:
    source, library = tmp_path / "old.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }\n")
    compile_c(source, library, ["-shared", "-fPIC"])
    with pytest.raises(DriverError, match=r"too old: .*undefined symbol: cu"):
        load_driver(str(library))
