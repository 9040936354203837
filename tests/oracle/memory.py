"""KV memory whose correct content is known: every token's bytes follow from the tokens before it.

The content of token ``p`` in a layer is a digest of all tokens up to ``p`` (and of the weights, the
salt and the layer), repeated over the token's share of the page. A recurrent state is the digest of
its last token, over the whole page. The layers of a draft head look ahead: the content of token
``p`` alternates between that digest and the digest of a later token. Pages are found by vLLM's
placement, not by this project's.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import allocate_kv_cache

NULL_BYTE = 0xEE
"""Fills the null block, which must never be written."""

LOST_BYTE = 0xDB
"""Fills memory that was mapped again."""
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
LIBC = ctypes.CDLL(None, use_errno=True)

Tables = Sequence[Sequence[int]]


class Prefix:
    """Digests of a growing sequence of tokens, one for each length."""

    def __init__(self, seed: str) -> None:
        self._seed = hashlib.blake2b(seed.encode(), digest_size=8).digest()
        self.tokens: list[int] = []
        self._chain: list[bytes] = []

    def digests(self, tokens: Sequence[int]) -> np.ndarray:
        """Return one 64-bit number per token; ``tokens`` may differ from those of the last call."""
        same = 0
        for mine, given in zip(self.tokens, tokens, strict=False):
            if mine != given:
                break
            same += 1
        del self.tokens[same:], self._chain[same:]
        last = self._chain[-1] if self._chain else self._seed
        for token in tokens[same:]:
            one = (token + 1).to_bytes(4, "big")  # vLLM pads drafts with -1
            last = hashlib.blake2b(last + one, digest_size=8).digest()
            self._chain.append(last)
            self.tokens.append(token)
        return np.frombuffer(b"".join(self._chain[: len(tokens)]), dtype="<u8")


@dataclass(frozen=True)
class _Layer:
    name: str
    group: int
    spec: KVCacheSpec
    start: int
    block_stride: int
    page: int
    mix: int
    ahead: int = 0
    """The number of tokens that a draft layer looks ahead."""

    @property
    def is_state(self) -> bool:
        return isinstance(self.spec, MambaSpec)

    @property
    def tokens(self) -> int:
        return self.spec.block_size

    def first_read(self, computed: int) -> int:
        """The first of ``computed`` tokens that the next token's computation reads."""
        if self.is_state:
            return max(0, computed - 1)
        if isinstance(self.spec, SlidingWindowSpec):
            return max(0, computed - self.spec.sliding_window + 1)
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            return computed // self.spec.attention_chunk_size * self.spec.attention_chunk_size
        return 0


class KvMemory:
    """The KV cache of one rank. ``caches`` are vLLM's tensors by layer, as a worker has them.

    With ``draft_head`` the layers named ``draft.0``, ``draft.1`` ... look 1, 2 ... tokens ahead.
    ``drafts``: a state is kept for each drafted token, in separate columns of the table.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        layout: object,
        kernel_blocks: int,
        rank: int,
        draft_head: bool = False,
        drafts: int = 0,
    ) -> None:
        sizes = [
            group.kv_cache_spec.block_size // kernel_blocks for group in config.kv_cache_groups
        ]
        kernel = sizes if kernel_blocks > 1 else None
        self.caches = allocate_kv_cache(config, torch.device("cpu"), layout, kernel)
        storage = next(iter(self.caches.values())).untyped_storage()
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self._layers = list(_layers_of(config, rank, draft_head))
        self._heads = [layer for layer in self._layers if layer.ahead]
        self._states = [layer for layer in self._layers if layer.is_state] if drafts else []
        apart = [*self._heads, *self._states]
        self._plain = [layer for layer in self._layers if layer not in apart]
        for layer in self._layers:
            start = layer.start
            self._bytes[start : start + layer.page] = NULL_BYTE

    def unmap(self) -> None:
        """Revoke all access to the pages of the cache: any later access ends the process. Bytes
        that share a page with other memory stay accessible."""
        self._protect(PROT_NONE)

    def map(self) -> None:
        """Make the cache accessible again, without its content."""
        self._protect(PROT_READ | PROT_WRITE)
        self._bytes[:] = LOST_BYTE
        for layer in self._layers:
            self._bytes[layer.start : layer.start + layer.page] = NULL_BYTE

    def _protect(self, rights: int) -> None:
        address, page = self._bytes.ctypes.data, mmap.PAGESIZE
        first = -(-address // page) * page
        whole = (address + self._bytes.nbytes - first) // page * page
        assert whole > 0.5 * self._bytes.nbytes, "the cache is too small to be unmapped"
        if LIBC.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(whole), rights):
            raise OSError(ctypes.get_errno(), "mprotect")

    def zero(self, blocks: Sequence[int]) -> None:
        """Zero newly allocated blocks as vLLM does: the page of every layer."""
        for layer in self._layers:
            for block in blocks:
                start = layer.start + block * layer.block_stride
                self._bytes[start : start + layer.page] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy a block on write."""
        for layer in self._layers:
            one, other = (layer.start + b * layer.block_stride for b in (source, target))
            self._bytes[other : other + layer.page] = self._bytes[one : one + layer.page]

    def check(
        self, tables: Tables, digests: np.ndarray, computed: int, first: int = 0
    ) -> list[str]:
        """Return the errors that a forward pass resumed at token ``computed`` would read in the
        tokens from ``first`` on."""
        wrong = []
        for layer in self._plain:
            positions = np.arange(max(first, layer.first_read(computed)), computed)
            if not len(positions):
                continue
            found = self._bytes[self._places(layer, tables[layer.group], positions)]
            right = _content(layer, digests[positions], found.shape[1])
            bad = positions[(found != right).any(axis=1)]
            if len(bad):
                wrong.append(f"{layer.name} (group {layer.group}) tokens {bad.tolist()}")
        return wrong

    def write(self, tables: Tables, digests: np.ndarray, computed: int) -> None:
        """Write the KV of the tokens from ``computed`` on, and the state after the last one."""
        end = len(digests)
        for layer in self._plain:
            positions = np.arange(end - 1 if layer.is_state else computed, end)
            places = self._places(layer, tables[layer.group], positions)
            self._bytes[places] = _content(layer, digests[positions], places.shape[1])

    # -- draft heads -------------------------------------------------------------------------

    def check_heads(
        self, tables: Tables, digests: np.ndarray, computed: int, known: Callable[[int], bool]
    ) -> list[str]:
        """Return the errors that a draft head resumed at token ``computed`` would read.

        The last slots of a block look ahead to tokens that are not in the block's key. They may
        hold the continuation of the request that wrote the block if it is ``known``, but no wrong
        guess.
        """
        wrong = []
        for layer in self._heads:
            positions = np.arange(layer.first_read(computed), computed)
            if not len(positions):
                continue
            found = self._bytes[self._places(layer, tables[layer.group], positions)]
            own, after = self._halves(layer, found)
            inside = positions + layer.ahead < (positions // layer.tokens + 1) * layer.tokens
            exact = np.array([known(int(number)) for number in after])
            at = np.minimum(positions + layer.ahead, len(digests) - 1)
            bad = (own != digests[positions]) | np.where(inside, after != digests[at], ~exact)
            if bad.any():
                wrong.append(f"{layer.name} (group {layer.group}) tokens {positions[bad].tolist()}")
        return wrong

    def write_heads(self, tables: Tables, digests: np.ndarray, first: int, end: int) -> None:
        """Write tokens ``[first, end)`` of the draft head; ``digests`` include the guessed tokens.
        Slots written for an earlier guess are written again, but never those before ``first``."""
        for layer in self._heads:
            positions = np.arange(first, end)
            places = self._places(layer, tables[layer.group], positions)
            at = np.minimum(positions + layer.ahead, len(digests) - 1)
            pairs = np.stack([digests[positions], digests[at]], axis=1) * np.uint64(layer.mix)
            rows = pairs.view(np.uint8).reshape(len(positions), 16)
            self._bytes[places] = np.tile(rows, -(-places.shape[1] // 16))[:, : places.shape[1]]

    @staticmethod
    def _halves(layer: _Layer, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the two digests in each token's bytes, or none if the bytes do not repeat them."""
        inverse = np.uint64(pow(layer.mix, -1, 1 << 64))
        pairs = np.ascontiguousarray(found[:, :16]).view("<u8") * inverse
        broken = (
            found != np.tile(found[:, :16], -(-found.shape[1] // 16))[:, : found.shape[1]]
        ).any(axis=1)
        return np.where(broken, 0, pairs[:, 0]), np.where(broken, 0, pairs[:, 1])

    # -- states with drafts ------------------------------------------------------------------

    def copy_states(self, tables: Tables, source: int, target: int) -> None:
        """Copy every state from one column of its block table to another."""
        for layer in self._states:
            one, other = (self._page(layer, tables, column) for column in (source, target))
            self._bytes[other] = self._bytes[one]

    def check_states(self, tables: Tables, column: int, digest: np.ndarray) -> list[str]:
        """Return the states in this column that differ from those after the token with this
        digest."""
        return [
            f"{layer.name} (group {layer.group}) state in column {column}"
            for layer in self._states
            if (
                self._bytes[self._page(layer, tables, column)]
                != _content(layer, digest, layer.page)
            ).any()
        ]

    def write_states(self, tables: Tables, column: int, digests: np.ndarray) -> None:
        """Write the states after these tokens into this column and the following ones."""
        for layer in self._states:
            for step in range(len(digests)):
                page = self._page(layer, tables, column + step)
                self._bytes[page] = _content(layer, digests[step : step + 1], layer.page)[0]

    def _page(self, layer: _Layer, tables: Tables, column: int) -> slice:
        start = layer.start + tables[layer.group][column] * layer.block_stride
        return slice(start, start + layer.page)

    def null_block_touched(self) -> bool:
        """True if any copy has written the null block."""
        return any(
            (self._bytes[layer.start : layer.start + layer.page] != NULL_BYTE).any()
            for layer in self._layers
        )

    def _places(self, layer: _Layer, table: Sequence[int], positions: np.ndarray) -> np.ndarray:
        """Return byte positions, ``[positions, bytes of a token]``."""
        tokens = layer.spec.block_size
        blocks = np.asarray(table, dtype=np.int64)[positions // tokens]
        if layer.is_state:
            share, offset = layer.page, np.zeros_like(positions)
        else:
            share = layer.page // tokens
            offset = positions % tokens * share
        first = layer.start + blocks * layer.block_stride + offset
        return first[:, None] + np.arange(share)


def _content(layer: _Layer, digests: np.ndarray, share: int) -> np.ndarray:
    mixed = (digests * np.uint64(layer.mix)).view(np.uint8).reshape(len(digests), 8)
    return np.tile(mixed, -(-share // 8))[:, :share]


def _layers_of(config: KVCacheConfig, rank: int, draft_head: bool) -> list[_Layer]:
    found = []
    for group, spec in enumerate(config.kv_cache_groups):
        for name in spec.layer_names:
            own = spec.kv_cache_spec
            if isinstance(own, UniformTypeKVCacheSpecs):
                own = own.kv_cache_specs[name]
            place = next(t for t in config.kv_cache_tensors if name in t.layers)
            start = place.offset + place.layers.index(name) * place.layer_stride
            page = (
                own.real_page_size_bytes
                if isinstance(own, MambaSpec)
                else own.unpadded_page_size_bytes
            )
            mix = int.from_bytes(hashlib.sha256(f"{name}/{rank}".encode()).digest()[:8]) | 1
            prefix, number = name.split(".")
            ahead = int(number) + 1 if draft_head and prefix == "draft" else 0
            found.append(_Layer(name, group, own, start, place.block_stride, page, mix, ahead))
    return found
