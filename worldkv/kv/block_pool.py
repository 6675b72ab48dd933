"""Ids, reference counts and the free list of the pool's blocks.

Knows nothing of tensors, sessions or what a block holds: a block is an integer in [0, num_blocks).
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """A fixed number of blocks, each free or referenced by at least one owner.

    None means "no room now"; releasing or sharing a free block is our own bug and asserts.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: expected at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: low ids first
        self.num_shared = 0  # blocks with more than one reference

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks with one reference each, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._num_references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is free and cannot be shared"
            self._num_references[block] += 1
            self.num_shared += self._num_references[block] == 2

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; the last one frees it."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is released twice"
            self._num_references[block] -= 1
            self.num_shared -= self._num_references[block] == 1
            if self._num_references[block] == 0:
                self._free.append(block)

    def check(self) -> None:
        """Assert that the books balance: free + referenced == total, no block in both or twice in the free list."""
        free = set(self._free)
        referenced = {block for block, count in enumerate(self._num_references) if count > 0}
        assert len(free) == len(self._free), "a block stands twice in the free list"
        assert not free & referenced, f"blocks both free and referenced: {sorted(free & referenced)}"
        assert self.num_shared == sum(count > 1 for count in self._num_references), "shared blocks are miscounted"
        assert len(free) + len(referenced) == self.num_blocks, (
            f"{len(free)} free + {len(referenced)} referenced != {self.num_blocks} blocks"
        )
