"""One branch's blocks, in the order of its logical slots, with copy on write.

A write is staged first: the staged write knows the blocks the forward will use, while the table still shows the
history as it was committed. Committing swaps the table; aborting gives every block back. Knows no tensors: the
copies a staged write needs are listed as (source, destination) and made by the owner of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from worldkv.kv.block_pool import BlockPool


def blocks_for(num_slots: int, block_size: int) -> int:
    """How many blocks hold `num_slots` slots."""
    return -(-num_slots // block_size)


@dataclass
class StagedWrite:
    """Blocks of a write that is not history yet."""

    blocks: list[int]  # the branch's table as this write sees it
    fresh: list[int] = field(default_factory=list)  # taken from the pool for this write
    replaced: list[int] = field(default_factory=list)  # committed blocks that `fresh` ones stand in for
    copies: list[tuple[int, int]] = field(default_factory=list)  # K/V to copy before the first write


class BlockTable:
    """The committed blocks of one branch."""

    def __init__(self, pool: BlockPool, block_size: int, blocks: Iterable[int] = ()) -> None:
        self.pool = pool
        self.block_size = block_size
        self.blocks = list(blocks)

    def fork(self) -> BlockTable:
        """The same blocks, shared: zero bytes move."""
        self.pool.share(self.blocks)
        return BlockTable(self.pool, self.block_size, self.blocks)

    def release(self) -> None:
        """Give every block back; the table is empty afterwards."""
        self.pool.release(self.blocks)
        self.blocks = []

    def stage(self, writes: Sequence[range], num_committed: int, num_visible: int) -> StagedWrite | None:
        """Prepare to write the logical slots `writes`, or None (and nothing taken) when the pool has no room.

        `num_committed` slots are history now and must survive an abort; `num_visible` slots are read during the
        write. A block is written in place only if nobody else holds it and no committed slot in it is overwritten.
        """
        touched = sorted({index for r in writes if r for index in self._blocks_of(r)})
        replace = [i for i in touched if i < len(self.blocks) and self._must_replace(i, writes, num_committed)]
        append = [i for i in touched if i >= len(self.blocks)]
        assert append == [len(self.blocks) + i for i in range(len(append))], "a write leaves a hole in the table"
        fresh = self.pool.allocate(len(replace) + len(append))
        if fresh is None:
            return None
        staged = StagedWrite(blocks=list(self.blocks), fresh=fresh)
        for index, block in zip(replace, fresh, strict=False):
            staged.replaced.append(self.blocks[index])
            staged.blocks[index] = block
            if self._keeps_something(index, writes, num_visible):
                staged.copies.append((self.blocks[index], block))
        staged.blocks.extend(fresh[len(replace) :])
        return staged

    def commit(self, staged: StagedWrite, num_visible: int) -> None:
        """Make a staged write the table, and give back what lies past the `num_visible` slots of history."""
        num_blocks = blocks_for(num_visible, self.block_size)
        self.blocks = staged.blocks[:num_blocks]
        self.pool.release(staged.replaced)
        self.pool.release(staged.blocks[num_blocks:])

    def abort(self, staged: StagedWrite) -> None:
        """Forget a staged write; the table is as if it had never been."""
        self.pool.release(staged.fresh)

    def _blocks_of(self, slots: range) -> range:
        return range(slots.start // self.block_size, blocks_for(slots.stop, self.block_size))

    def _must_replace(self, index: int, writes: Sequence[range], num_committed: int) -> bool:
        if self.pool.num_references(self.blocks[index]) > 1:
            return True
        start, stop = index * self.block_size, min((index + 1) * self.block_size, num_committed)
        return any(max(start, r.start) < min(stop, r.stop) for r in writes)

    def _keeps_something(self, index: int, writes: Sequence[range], num_visible: int) -> bool:
        """Whether the block holds a visible slot that the write does not overwrite."""
        start, stop = index * self.block_size, min((index + 1) * self.block_size, num_visible)
        written = sum(max(0, min(stop, r.stop) - max(start, r.start)) for r in writes)
        return written < stop - start
