"""The oracle: gather each row's visible slots, then torch's own attention. Any device, any dtype, any block size.

Slots outside a row's [0, n) are never read, so whatever stands in free blocks, NaN included, cannot matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from worldkv.kv.forward import AttentionRow
from worldkv.kv.storage import KVStorage


class ReferencePlan:
    """Index tensors of one batch of rows."""

    def __init__(self, storage: KVStorage, rows: Sequence[AttentionRow]) -> None:
        self._storage = storage
        self._num_queries = [row.num_queries for row in rows]
        self._visible = [_visible_slots(storage, row) for row in rows]
        writes = [row.write_slots for row in rows if row.write_slots is not None]
        assert len(writes) in (0, len(rows)), "rows that write and rows that only read do not share a plan"
        self._write_slots = torch.from_numpy(np.concatenate(writes)).to(storage.device) if writes else None

    def run(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor | None = None,
        v_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k_slots, v_slots = self._storage.slots(layer)
        if k_THD is not None and v_THD is not None:
            assert self._write_slots is not None, "this plan only reads"
            k_slots[self._write_slots] = k_THD.to(k_slots.dtype)
            v_slots[self._write_slots] = v_THD.to(v_slots.dtype)
        outputs = []
        for q_row, visible in zip(torch.split(q_THD, self._num_queries), self._visible, strict=True):
            q, k, v = (t.transpose(0, 1)[None] for t in (q_row, k_slots[visible], v_slots[visible]))
            attended = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype))
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)


class ReferenceBackend:
    name = "reference"

    def plan(self, storage: KVStorage, rows: Sequence[AttentionRow]) -> ReferencePlan:
        return ReferencePlan(storage, rows)


def _visible_slots(storage: KVStorage, row: AttentionRow) -> torch.Tensor:
    logical = np.arange(row.num_visible)
    blocks = row.blocks[logical // storage.block_size].astype(np.int64)
    return torch.from_numpy(blocks * storage.block_size + logical % storage.block_size).to(storage.device)
