"""Digests of KV blocks, computed on the device of the blocks: one number per block and layer.

The arithmetic uses integers in torch, so a digest is the same on every processor and on a GPU. On a
GPU it runs on the stream on which it is called. Each 64-bit word of a page is mixed with a number
that depends on its position, in bijective steps, and the results are summed. (Constants and
structure of the mix are from splitmix64, Steele et al., OOPSLA 2014.) So a digest always detects a
single changed word, and misses any other change with a probability of 2^-64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from offload.layout.registration import Registration
from tiers.copy.base import GroupRegions

GATHERED_BLOCKS_MAX = 256
"""Number of blocks gathered at a time. Their pages are copied once, layer by layer."""
PIECE_WORDS = 1 << 22
"""64-bit words that ``digest_of_bytes`` mixes at a time."""
_LOW = 0xFFFFFFFF
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages of one region, as words.

    ``words[b]`` is block ``b``, as 64-bit words, or as bytes if the pages are not aligned to 64
    bits. ``first`` is the position of the region's first word among the words of its layer, which
    selects the words' salts.
    """

    layer: int
    words: torch.Tensor
    first: int


class DeviceDigest:
    """Computes digests of the registered KV caches.

    It only reads the caches. It reads them on the stream on which `of` is called, so the order on
    that stream decides which content it reads.
    """

    def __init__(self, registration: Registration) -> None:
        tensors = registration.tensors
        storages = {t.untyped_storage().data_ptr(): t for t in tensors}
        self._bytes = [
            torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
            for t in storages.values()
        ]
        self.device: torch.device = tensors[0].device
        self._layers: dict[int, tuple[str, ...]] = {}
        self._pages: dict[int, list[_Pages]] = {}
        most = 0
        for group in registration.groups:
            most = max(most, self._add(group, registration.num_blocks))
        self._salts = _salts(most).to(self.device)

    def _add(self, group: GroupRegions, num_blocks: int) -> int:
        """Add a group; returns the number of words of its largest layer."""
        layers = tuple(dict.fromkeys(region.layer for region in group.regions))
        used = dict.fromkeys(layers, 0)
        pages = []
        for region in group.regions:
            words = self._words(region.address, region.block_stride, region.page_bytes, num_blocks)
            pages.append(_Pages(layers.index(region.layer), words, used[region.layer]))
            used[region.layer] += words.shape[1]
        self._layers[group.group], self._pages[group.group] = layers, pages
        return max(used.values())

    def _words(self, address: int, stride: int, page: int, num_blocks: int) -> torch.Tensor:
        """``[num_blocks, words of a page]``, a view of the cache."""
        memory = next(m for m in self._bytes if 0 <= address - m.data_ptr() < m.numel())
        first = address - memory.data_ptr()
        if first % 8 or stride % 8 or page % 8:
            return memory.as_strided((num_blocks, page), (stride, 1), first)
        words = memory[: memory.numel() // 8 * 8].view(torch.int64)
        return words.as_strided((num_blocks, page // 8), (stride // 8, 1), first // 8)

    def layers(self, group: int) -> tuple[str, ...]:
        """Names of a group's layers, in the order of the digests' columns."""
        return self._layers[group]

    def of(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the digests of these blocks: int64 ``[blocks, layers of the group]``, on the
        device. Does not wait for the device."""
        ids = torch.from_numpy(np.asarray(blocks, dtype=np.int64)).to(self.device)
        found = torch.zeros(
            (len(ids), len(self._layers[group])), dtype=torch.int64, device=self.device
        )
        for at in range(0, len(ids), GATHERED_BLOCKS_MAX):
            some = ids[at : at + GATHERED_BLOCKS_MAX]
            for pages in self._pages[group]:
                words = pages.words.index_select(0, some).to(torch.int64)
                salts = self._salts[pages.first : pages.first + words.shape[1]]
                found[at : at + GATHERED_BLOCKS_MAX, pages.layer] += _mixed(
                    words.bitwise_xor_(salts)
                ).sum(1)
        return found


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Mix each word separately, bijectively and in place."""
    words.mul_(_signed(_MIX_1))
    words.bitwise_xor_((words >> 32).bitwise_and_(_LOW))
    words.mul_(_signed(_MIX_2))
    return words.bitwise_xor_((words >> 29).bitwise_and_(_signed((1 << 35) - 1)))


def _salts(count: int) -> torch.Tensor:
    """One number per position: the first ``count`` outputs of splitmix64."""
    with np.errstate(over="ignore"):
        state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
        found: npt.NDArray[np.int64] = (state ^ (state >> np.uint64(31))).view(np.int64)
    return torch.from_numpy(found)


def _signed(number: int) -> int:
    """The same 64 bits as a signed number, because torch has no unsigned ones."""
    return number - (1 << 64) if number >> 63 else number


def digest_of_bytes(content: torch.Tensor) -> int:
    """A digest of a flat ``uint8`` tensor, by the same mix, a piece at a time. Waits for the
    device."""
    whole = content.numel() // 8 * 8
    words = content[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for at in range(0, words.numel(), PIECE_WORDS):
        piece = words[at : at + PIECE_WORDS].clone()
        positions = torch.arange(at + 1, at + 1 + piece.numel(), device=content.device)
        total += _mixed(piece.bitwise_xor_(_mixed(positions.mul_(_signed(_GAMMA))))).sum()
    rest = content[whole:].cpu().numpy().tobytes()
    return int(total.item()) ^ int.from_bytes(rest, "big")
