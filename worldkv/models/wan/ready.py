"""What the families of Wan share in making their graphs ahead: sizes of batches, and rows that touch nobody's pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worldkv.kv.block_table import blocks_for
from worldkv.kv.row import AttentionRow
from worldkv.kv.storage import KVStorage


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 3, ... 8, 10, 12, 14, 16, 20, ...: whatever is asked for, the next one is at most a quarter more."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += max(1, 1 << max(0, size.bit_length() - 3))
    return [*sizes, most]


def reading_rows(
    storage: KVStorage, num_keys: int, counts: Sequence[int], *, writes: bool = False
) -> list[AttentionRow]:
    """Of so many tokens each, over the pool's first blocks. `writes`: as rows that write, though nowhere."""
    held = np.arange(blocks_for(num_keys, storage.block_size), dtype=np.int32) % storage.num_blocks
    return [
        AttentionRow(held, num_keys, count, np.full(count, -1, dtype=np.int64) if writes else None) for count in counts
    ]
