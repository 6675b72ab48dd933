"""Host memory for blocks that are parked, in pieces of a few blocks each.

Where there is a GPU the pieces are pinned. That takes half a second per GiB, and whoever uses the device waits for it:
so it is done piece by piece, ahead of need. torch keeps what was pinned, rounded up to powers of two, for those who ask
for as much again: all pieces have one size, which fills such a power of two well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LEAST_BYTES, _MOST_BLOCKS = 1 << 20, 16  # of a piece
_ALLOWED_WASTE = 1.07  # of what is pinned, to what is used


@dataclass(frozen=True)
class HostBlocks:
    """Copies of blocks in host memory: of every layer K and V, each as pieces [blocks, block_size, heads, head_dim],
    the last one filled in part."""

    layers: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    num_blocks: int
    num_bytes: int  # of host memory, whole pieces


class HostPieces:
    """`block_shape`: of K or of V of a block in one layer."""

    def __init__(self, block_shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> None:
        self._block_shape, self._dtype, self._pinned = tuple(block_shape), dtype, pinned
        self._block_bytes = math.prod(block_shape) * dtype.itemsize
        self.num_blocks = _blocks_of_a_piece(self._block_bytes) if pinned else _MOST_BLOCKS

    def bytes_for(self, num_blocks: int) -> int:
        """Host memory for so many blocks of K, or of V, in one layer."""
        if not self._pinned:
            return num_blocks * self._block_bytes
        return -(-num_blocks // self.num_blocks) * _rounded_up(self.num_blocks * self._block_bytes)

    def copy(self, blocks: torch.Tensor) -> torch.Tensor:
        """A piece that holds these blocks, at most `num_blocks`; asynchronous where pinned."""
        if not self._pinned:
            return blocks
        piece = self._piece()
        piece[: len(blocks)].copy_(blocks, non_blocking=True)
        return piece

    def pin_ahead(self, num_blocks: int) -> None:
        """Have so many blocks' pieces pinned and free. May run on any thread, and takes long where they are not yet."""
        if self._pinned:
            held = [self._piece() for _ in range(-(-num_blocks // self.num_blocks))]
            del held  # torch keeps them for the next who ask

    def _piece(self) -> torch.Tensor:
        return torch.empty((self.num_blocks, *self._block_shape), dtype=self._dtype, pin_memory=True)


def _blocks_of_a_piece(block_bytes: int) -> int:
    """The fewest that waste little, or else those that waste least."""
    waste = {n: _rounded_up(n * block_bytes) / (n * block_bytes) for n in range(1, _MOST_BLOCKS + 1)}
    for count, factor in waste.items():
        if count * block_bytes >= _LEAST_BYTES and factor <= _ALLOWED_WASTE:
            return count
    return min(waste, key=lambda count: (waste[count], -count))


def _rounded_up(num_bytes: int) -> int:
    """To a power of two, as torch's allocator of pinned memory does."""
    return 1 << (num_bytes - 1).bit_length()
