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
from worldkv.models.wan.dit import KeptTokens, WanDiT
from worldkv.models.wan.network import ActiveRow
from worldkv.models.wan.rotary import rotate


def fill_copies(dit: WanDiT, storage: KVStorage, rows: Sequence[ActiveRow]) -> None:
    """Those copies that no earlier forward has filled."""
    copies = [(row.copy, row.inputs.latents.shape[2:]) for row in rows if row.copy is not None]
    if not copies:
        return
    sources = upload(np.concatenate([copy.sources for copy, _ in copies]), storage.device)
    targets = upload(np.concatenate([copy.targets for copy, _ in copies]), storage.device)
    phases = [dit.phases(0, copy.num_frames, height, width) for copy, (height, width) in copies]
    cos, sin = (torch.cat(parts) for parts in zip(*phases, strict=True))
    for layer in range(storage.num_layers):
        k, v = storage.slots(layer)
        storage.write(layer, targets, rotate(k[sources], (cos, sin)), v[sources])


def kept_tokens(storage: KVStorage, rows: Sequence[ActiveRow]) -> KeptTokens:
    """Those of committing rows."""
    slots = [
        np.full(row.history.num_queries, -1, dtype=np.int64) if row.kept_slots is None else row.kept_slots
        for row in rows
    ]
    return KeptTokens(storage, upload(np.concatenate(slots), storage.device))
