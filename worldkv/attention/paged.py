"""The common part of all paged GPU plans: block tables, lengths and slots of one batch of rows.

Kernels read whole blocks or tiles and mask what lies past a row's n: those slots must be finite. They are the row's
own (the rest of its last block, and that block again), never a free block's.

The number of rows is rounded up to a power of two with padding rows of zero queries, keys to the limit of all rows that
ever come, and so are queries where rows differ. Many sessions make batches of many compositions, and plans and graphs,
which are built per shape, are then few enough to be made before the first one comes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
import torch

from worldkv.attention.backend import AttentionPlan
from worldkv.device import upload
from worldkv.kv.block_table import blocks_for
from worldkv.kv.row import AttentionRow, RowLimits
from worldkv.kv.storage import KVStorage

_LEAST_KEYS = 256  # no kernel reads more at once; a table is never shorter, or its end would be passed

# rows, most queries of a row, whether rows differ in queries, blocks of a table
ShapeClass = tuple[int, int, bool, int]


class PagedPlan(AttentionPlan):
    """On the device: `tables` int32 [rows, blocks], `lengths` int32 [2, rows] of queries and of keys, `starts` int32
    [rows + 1] of queries; rows rounded up."""

    def __init__(self, storage: KVStorage, rows: Sequence[AttentionRow], limits: RowLimits | None = None) -> None:
        super().__init__(storage, rows)
        lengths = np.zeros((2, _round_up(len(rows))), dtype=np.int32)
        lengths[:, : len(rows)] = [[row.num_queries for row in rows], [row.num_visible for row in rows]]
        lengths[1, len(rows) :] = 1  # of the first row's first block, for no query
        most_queries, most_keys = (int(most) for most in lengths.max(axis=1))
        is_ragged = bool((lengths[0] != most_queries).any())
        if limits is not None:
            assert most_queries <= limits.num_queries, "a row has more queries than its limits say"
            assert most_keys <= limits.num_visible, "a row sees more than its limits say"
            most_keys = limits.num_visible
            if is_ragged:  # kernels for rows that are all alike are a little faster
                most_queries = limits.num_queries
        tables = _block_tables(rows, lengths.shape[1], most_keys, storage.block_size)
        self.shape_class: ShapeClass = (len(tables), most_queries, is_ragged, tables.shape[1])
        self.tables = upload(tables, storage.device)
        self.lengths = upload(lengths, storage.device)
        self.starts = upload(np.concatenate([[0], np.cumsum(lengths[0])]).astype(np.int32), storage.device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors in which plans of one shape class differ."""
        return [self.tables, self.lengths, self.starts, *([] if self.write_slots is None else [self.write_slots])]

    def with_own_tensors(self) -> Self:
        """A copy with tensors of its own, as a CUDA graph needs: other plans of the class are copied into them."""
        own = copy(self)
        own.tables, own.lengths, own.starts = self.tables.clone(), self.lengths.clone(), self.starts.clone()
        own.write_slots = None if self.write_slots is None else self.write_slots.clone()
        return own

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """See AttentionPlan."""
        return self.launch(layer, q_THD.to(self.storage.dtype).contiguous())

    @abstractmethod
    def launch(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """The backend's own kernel: [T, heads, head_dim] in the pool's dtype to the same."""


def _block_tables(rows: Sequence[AttentionRow], num_tables: int, most_keys: int, block_size: int) -> np.ndarray:
    num_blocks = _round_up(blocks_for(max(_LEAST_KEYS, most_keys), block_size))
    tables = np.full((num_tables, num_blocks), rows[0].blocks[0], dtype=np.int32)
    for table, row in zip(tables, rows, strict=False):
        used = row.blocks[: blocks_for(row.num_visible, block_size)]
        table[: len(used)], table[len(used) :] = used, used[-1]
    return tables


def _round_up(count: int) -> int:
    """To the next power of two, so that a filling window asks for few shape classes."""
    return 1 << (count - 1).bit_length()
