"""Host memory for blocks that are parked, in pieces of a few blocks each.

Where there is a GPU the pieces are pinned. That takes half a second per GiB, and whoever uses the device waits for it:
so it is done ahead of need, piece by piece with pauses in between, and what was pinned is kept. torch rounds pinned
memory up to powers of two; a piece fills one well.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LEAST_BYTES, _MOST_BLOCKS = 1 << 20, 16  # of a piece
_ALLOWED_WASTE = 1.07  # of what is pinned, to what is used
_PAUSE = 4.0  # between two pieces that are pinned ahead, to the time that one took; a copy that waits pauses less
_SHORT_PAUSE = 1.0

Layers = list[tuple[list[torch.Tensor], list[torch.Tensor]]]  # pieces of K and of V


@dataclass(frozen=True)
class HostBlocks:
    """Copies of blocks in host memory: of every layer K and V, each as pieces [blocks, block_size, heads, head_dim],
    the last one filled in part. The pieces go back to whom they came from with the last reference to this."""

    layers: Layers
    num_blocks: int
    num_bytes: int  # of host memory, whole pieces

    def tokens(self, layer: int, num_tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The first tokens' K and V of a layer, as pieces [tokens, heads, head_dim] of this memory."""
        k, v = (_first_tokens(pieces, self.num_blocks, num_tokens) for pieces in self.layers[layer])
        return k, v


class HostPieces:
    """Pieces that are free, and the making of new ones; used by several threads. `block_shape`: of K or of V of a block
    in one layer."""

    def __init__(self, block_shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> None:
        self._block_shape, self._dtype, self._pinned = tuple(block_shape), dtype, pinned
        self._block_bytes = math.prod(block_shape) * dtype.itemsize
        self.num_blocks = _blocks_of_a_piece(self._block_bytes) if pinned else _MOST_BLOCKS
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []

    def bytes_for(self, num_blocks: int) -> int:
        """Host memory for so many blocks of K, or of V, in one layer."""
        if not self._pinned:
            return num_blocks * self._block_bytes
        return -(-num_blocks // self.num_blocks) * _rounded_up(self.num_blocks * self._block_bytes)

    def copy(self, blocks: torch.Tensor) -> torch.Tensor:
        """A piece that holds these blocks, at most `num_blocks`; asynchronous where pinned."""
        if not self._pinned:
            return blocks
        with self._lock:
            piece = self._free.pop() if self._free else None
        if piece is None:
            piece = self._made_with_pause(_SHORT_PAUSE)
        piece[: len(blocks)].copy_(blocks, non_blocking=True)
        return piece

    def kept(self, layers: Layers, num_blocks: int) -> HostBlocks:
        """What was copied. Its pieces are free again once nobody holds it."""
        host = HostBlocks(layers, num_blocks, 2 * len(layers) * self.bytes_for(num_blocks))
        if self._pinned:
            weakref.finalize(host, self._give_back, layers)
        return host

    def pin_ahead(self, num_blocks: int) -> None:
        """Have so many blocks' pieces pinned and free. Runs on any thread, and takes long where they are not yet."""
        while self._pinned and len(self._free) * self.num_blocks < num_blocks:
            piece = self._made_with_pause(_PAUSE)
            with self._lock:
                self._free.append(piece)

    def _give_back(self, layers: Layers) -> None:
        with self._lock:
            self._free += [piece for layer in layers for pieces in layer for piece in pieces]

    def _made_with_pause(self, pause: float) -> torch.Tensor:
        began = time.perf_counter()
        piece = self._new_piece()
        time.sleep(pause * (time.perf_counter() - began))
        return piece

    def _new_piece(self) -> torch.Tensor:
        return torch.empty((self.num_blocks, *self._block_shape), dtype=self._dtype, pin_memory=True)


def _first_tokens(pieces: Sequence[torch.Tensor], num_blocks: int, num_tokens: int) -> list[torch.Tensor]:
    """`pieces` hold `num_blocks` blocks."""
    found = []
    for piece in pieces:
        tokens = piece[:num_blocks].flatten(0, 1)[:num_tokens]
        found.append(tokens)
        num_blocks, num_tokens = num_blocks - min(num_blocks, len(piece)), num_tokens - len(tokens)
    assert num_tokens == 0, "fewer tokens were copied to the host"
    return found


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
