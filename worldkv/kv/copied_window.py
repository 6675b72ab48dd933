"""A branch's visible window once more, in temporal order and in blocks of its own.

For models whose keys are turned by their place in the window, which changes when the window rolls: history keeps them
unturned, and forwards read such a copy. It is filled once and read by all forwards that see the same window, drafts and
the commit after them; nothing of it becomes history. Ids and counts only: whoever turns the keys fills it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worldkv.kv.block_pool import BlockPool
from worldkv.kv.window import CopiedChunks


def physical_slots(logical: npt.NDArray[np.int64], blocks: Sequence[int], block_size: int) -> npt.NDArray[np.int64]:
    """Of logical slots of a table of blocks."""
    return np.asarray(blocks, dtype=np.int64)[logical // block_size] * block_size + logical % block_size


class CopiedWindow:
    """Blocks of one copy. `sources`: the physical slots that its first tokens are copied from, in order."""

    def __init__(
        self, pool: BlockPool, blocks: list[int], chunks: CopiedChunks, sources: npt.NDArray[np.int64], block_size: int
    ) -> None:
        self.chunks, self.sources = chunks, sources
        self.is_filled = False  # set by whoever fills it
        self.blocks = blocks
        self._pool, self._block_size = pool, block_size

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """Where `sources` are copied to."""
        return self.slots(np.arange(len(self.sources)))

    def own_slots(self, size: int) -> npt.NDArray[np.int64]:
        """Physical slots of the forward's own tokens, `size` to a chunk, in their order."""
        chunks = self.chunks
        start, stop = size * len(chunks.history), size * chunks.num_visible
        end = stop + size * chunks.num_unread
        return self.slots(np.concatenate([np.arange(stop, end), np.arange(start, stop)]))

    def slots(self, logical: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Physical ones."""
        return physical_slots(logical, self.blocks, self._block_size)

    def release(self) -> None:
        """Safe to call twice."""
        self._pool.release(self.blocks)
        self.blocks = []
