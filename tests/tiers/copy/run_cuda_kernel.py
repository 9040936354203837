"""Runs the Triton kernel without a GPU, in a separate process (see test_copy_kernel.py).

``compile``: for Hopper, printing the PTX. ``interpret``: in Triton's interpreter, on host memory,
printing "same" if every byte came out right and nothing else was touched.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from tiers.copy.cuda_kernel import PROGRAMS, WORDS, copy_list_kernel


def compile_for_hopper() -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=copy_list_kernel,
        signature={"lists": "*i64", "count": "i32", "WORDS": "constexpr"},
        constexprs={"WORDS": WORDS},
        attrs={(0,): [["tt.divisibility", 16]]},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return str(compiled.asm["ptx"])


def interpret() -> bool:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    sizes = np.array([16, 32, 8192, 8192 + 16, 3 * 8192 - 16] + [48] * (2 * PROGRAMS), np.int64)
    starts = (np.cumsum(sizes + 64) - sizes).astype(np.int64)
    expected = np.zeros_like(source)
    for start, size in zip(starts, sizes, strict=True):
        expected[start : start + size] = source[start : start + size]
    lists = torch.from_numpy(
        np.stack([starts + target.ctypes.data, starts + source.ctypes.data, sizes])
    )
    copy_list_kernel[(PROGRAMS,)](lists, len(sizes), WORDS=WORDS)
    return bool((target == expected).all())


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        print(compile_for_hopper())
    else:
        print("same" if interpret() else "different")
