"""Cross-attention K/V: projected once, read at every forward, stored once for equal inputs.

An entry is a run of blocks in the same pool as the history, so the same paged kernels read it and the same books
count it. It is keyed by a digest of what it was projected from and shared by reference count; it becomes visible
only when all layers are written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from worldkv.errors import OutOfBlocks
from worldkv.kv.block_pool import BlockPool
from worldkv.kv.block_table import blocks_for
from worldkv.kv.row import AttentionRow

if TYPE_CHECKING:
    from worldkv.kv.storage import KVStorage


@dataclass(eq=False)
class ConditioningEntry:
    """One kind of conditioning, projected: `num_tokens` tokens of K/V of every layer in `blocks`."""

    key: str
    num_tokens: int
    blocks: npt.NDArray[np.int32]
    num_references: int = 1

    def row(self, num_queries: int) -> AttentionRow:
        """A read-only row for cross-attention."""
        return AttentionRow(self.blocks, self.num_tokens, num_queries)


class ConditioningStore:
    """All published entries of one cache, by key."""

    def __init__(self, pool: BlockPool, storage: KVStorage) -> None:
        self._pool = pool
        self._storage = storage
        self._entries: dict[str, ConditioningEntry] = {}
        self.num_hits = self.num_misses = 0  # entries found stored, and entries projected

    def __len__(self) -> int:
        return len(self._entries)

    def blocks(self) -> list[int]:
        """All blocks that hold entries."""
        return [int(block) for entry in self._entries.values() for block in entry.blocks]

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def acquire(self, key: str) -> ConditioningEntry | None:
        """The entry with one more reference, or None where it is not stored."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.num_references += 1
            self.num_hits += 1
        return entry

    def publish(self, key: str, num_tokens: int, layers: Iterable[tuple[Any, Any]]) -> ConditioningEntry:
        """Store K/V [num_tokens, heads, head_dim] of every layer, with one reference. All or nothing.

        If `layers` raises half-way, or is not what the storage holds (ValueError), nothing is published and the blocks
        go back. Where the key is stored already, `layers` is not consumed.
        """
        stored = self._entries.get(key)
        if stored is not None:
            if stored.num_tokens != num_tokens:
                raise ValueError(f"key: {key!r} is stored with {stored.num_tokens} tokens, now come {num_tokens}")
            self.num_hits += 1
            return self.share(stored)
        blocks = self._pool.allocate(blocks_for(num_tokens, self._storage.block_size))
        if blocks is None:
            raise OutOfBlocks(f"conditioning of {num_tokens} tokens: {self._pool.num_free} blocks are free")
        try:
            self.write(blocks, num_tokens, layers)
        except BaseException:
            self._pool.release(blocks)
            raise
        self.num_misses += 1
        return self.adopt(key, num_tokens, blocks)

    def adopt(self, key: str, num_tokens: int, blocks: list[int]) -> ConditioningEntry:
        """Publish K/V that stand in `blocks` already, with one reference; the blocks are the store's from now on.

        Where the key is stored already, that entry is shared and `blocks` are given back.
        """
        stored = self._entries.get(key)
        if stored is not None:
            self._pool.release(blocks)
            return self.share(stored)
        entry = self._entries[key] = ConditioningEntry(key, num_tokens, np.asarray(blocks, dtype=np.int32))
        return entry

    def write(self, blocks: list[int], num_tokens: int, layers: Iterable[tuple[Any, Any]]) -> None:
        """Fill the blocks of an entry that is not published yet."""
        expected, num_layers = self._storage.num_layers, 0
        for layer, (k, v) in enumerate(layers):
            if layer == expected:
                raise ValueError(f"conditioning: expected {expected} layers, got more")
            if len(k) != num_tokens or len(v) != num_tokens:
                raise ValueError(f"conditioning: expected {num_tokens} tokens, got {len(k)} of K and {len(v)} of V")
            self._storage.write_blocks(layer, blocks, k, v)
            num_layers += 1
        if num_layers != expected:
            raise ValueError(f"conditioning: expected {expected} layers, got {num_layers}")

    def share(self, entry: ConditioningEntry) -> ConditioningEntry:
        assert entry.num_references > 0, "a freed conditioning entry cannot be shared"
        entry.num_references += 1
        return entry

    def release(self, entry: ConditioningEntry) -> None:
        """Drop one reference; the last one frees the blocks."""
        assert entry.num_references > 0, "a conditioning entry is released twice"
        entry.num_references -= 1
        if entry.num_references == 0:
            self._pool.release(entry.blocks.tolist())
            del self._entries[entry.key]
