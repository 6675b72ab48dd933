"""Keys turned by their place in the window (LongLive's "infinity"): no position grows, however long a session is.

History holds keys as they are before rotation. When a block begins, its session's window is copied in temporal order
and the keys are turned by their places, once; the block's drafts and its clean pass read that copy. Costs, per block:
one pass over the window's K and V (read, write), and blocks for as many tokens again while it lasts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worldkv.device import upload
from worldkv.kv.storage import KVStorage
from worldkv.models.base import Row
from worldkv.models.wan.dit import KeptTokens, WanDiT, WanRow
from worldkv.models.wan.rotary import rotate


def fill_copies(dit: WanDiT, storage: KVStorage, rows: Sequence[Row[WanRow]]) -> None:
    """Of rows that are active: those copies that no earlier forward has filled."""
    copies = [(row.context.branch.copy, row.inputs.latents.shape[2:]) for row in rows]
    empty = [(copy, size) for copy, size in copies if copy is not None and not copy.is_filled]
    filled = [(copy, size) for copy, size in empty if len(copy.sources)]
    if filled:
        sources = upload(np.concatenate([copy.sources for copy, _ in filled]), storage.device)
        targets = upload(np.concatenate([copy.targets for copy, _ in filled]), storage.device)
        phases = [dit.phases(0, len(copy.chunks.history), height, width) for copy, (height, width) in filled]
        cos, sin = (torch.cat(parts) for parts in zip(*phases, strict=True))
        for layer in range(storage.num_layers):
            k, v = storage.slots(layer)
            storage.write(layer, targets, rotate(k[sources], (cos, sin)), v[sources])
    for copy, _ in empty:
        copy.is_filled = True


def kept_tokens(storage: KVStorage, rows: Sequence[Row[WanRow]]) -> KeptTokens:
    """Those of committing rows, of rows that are active."""
    slots = [
        np.full(row.activate().num_queries, -1, dtype=np.int64)
        if row.context.history_slots is None
        else row.context.history_slots
        for row in rows
    ]
    return KeptTokens(storage, upload(np.concatenate(slots), storage.device))
