"""The oracle: gather each row's visible slots, then torch's own attention. Any device, any dtype, any block size.

Slots outside a row's [0, n) are never read, so whatever stands in free blocks, NaN included, cannot matter. Rows with
equally many queries and keys are one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from worldkv.attention.backend import AttentionPlan
from worldkv.device import upload
from worldkv.kv.row import AttentionRow, RowLimits
from worldkv.kv.storage import KVStorage


@dataclass(frozen=True)
class _Group:
    """Rows of one shape: which tokens they are, [rows * queries], and which slots they see, [rows, keys]."""

    num_rows: int
    tokens: torch.Tensor | None  # None: all tokens, in order
    slots: torch.Tensor


class ReferencePlan(AttentionPlan):
    """Index tensors of one batch of rows."""

    def __init__(self, storage: KVStorage, rows: Sequence[AttentionRow]) -> None:
        super().__init__(storage, rows)
        self._groups = _group(storage, rows)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        k_slots, v_slots = self.storage.slots(layer)
        out = torch.empty_like(q_THD)
        for group in self._groups:
            q = q_THD if group.tokens is None else q_THD[group.tokens]
            attended = F.scaled_dot_product_attention(
                q.reshape(group.num_rows, -1, *q.shape[1:]).transpose(1, 2),
                k_slots[group.slots].to(q.dtype).transpose(1, 2),
                v_slots[group.slots].to(q.dtype).transpose(1, 2),
            )
            flat = attended.transpose(1, 2).reshape(q.shape)
            if group.tokens is None:
                return flat
            out[group.tokens] = flat
        return out


class ReferenceBackend:
    name = "reference"

    def why_not(self, storage: KVStorage) -> str | None:
        return None

    def plan(self, storage: KVStorage, rows: Sequence[AttentionRow], limits: RowLimits | None = None) -> ReferencePlan:
        return ReferencePlan(storage, rows)


def _group(storage: KVStorage, rows: Sequence[AttentionRow]) -> list[_Group]:
    starts = np.cumsum([0, *(row.num_queries for row in rows)])
    members: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault((row.num_queries, row.num_visible), []).append(index)
    groups = []
    for (num_queries, num_visible), indices in members.items():
        logical = np.arange(num_visible)
        blocks = np.stack([rows[i].blocks[logical // storage.block_size] for i in indices]).astype(np.int64)
        slots = upload(blocks * storage.block_size + logical % storage.block_size, storage.device)
        tokens = None
        if len(members) > 1:
            runs = [np.arange(starts[i], starts[i] + num_queries) for i in indices]
            tokens = upload(np.concatenate(runs), storage.device)
        groups.append(_Group(len(indices), tokens, slots))
    return groups
