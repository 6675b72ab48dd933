"""FlashAttention 4's paged kernel: Hopper and datacentre Blackwell, half precision, blocks of 128 slots.

Compiled when a kind of shape comes for the first time, in seconds. The best kernel for long rows; for many short ones
cuDNN's is faster (see `backend.ByShape`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from worldkv.attention.paged import PagedPlan
from worldkv.kv.row import AttentionRow, RowLimits
from worldkv.kv.storage import KVStorage

_BLOCK_SIZE = 128  # a page is a whole key tile and comes through the tensor memory accelerator
_GENERATIONS = (9, 10)  # compute capability, major


class Flash4Plan(PagedPlan):
    """The rows' tables and lengths, as the kernel takes them."""

    def launch(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        result: Any = _kernel()(
            q_THD,
            self.storage.k[layer],
            self.storage.v[layer],
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.shape_class[1],
            seqused_k=self.lengths[1],
            page_table=self.tables,
            softmax_scale=q_THD.shape[-1] ** -0.5,
            causal=False,
        )
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out


class Flash4Backend:
    name = "flash4"

    def why_not(self, storage: KVStorage) -> str | None:
        """One line on why this backend cannot serve this storage; None where it can."""
        if storage.device.type != "cuda":
            return f"flash4 attention needs an NVIDIA GPU, the cache is on {storage.device}"
        if torch.cuda.get_device_capability(storage.device)[0] not in _GENERATIONS:
            return "flash4 attention needs a Hopper or a datacentre Blackwell GPU"
        if not storage.format.is_half_precision:
            return f"flash4 attention needs bfloat16 or float16, the cache is {storage.format}"
        if storage.block_size != _BLOCK_SIZE:
            return f"flash4 attention needs blocks of {_BLOCK_SIZE} slots, they have {storage.block_size}"
        if storage.k[0].shape[-1] not in (64, 96, 128):
            return f"flash4 attention needs heads of 64, 96 or 128 numbers, they have {storage.k[0].shape[-1]}"
        try:
            _kernel()
        except Exception as error:  # whatever a broken installation raises
            return f"flash4 attention needs flash-attn-4 ({error}): pip install 'flash-attn-4[cu13]'"
        return None

    def plan(self, storage: KVStorage, rows: Sequence[AttentionRow], limits: RowLimits | None = None) -> Flash4Plan:
        return Flash4Plan(storage, rows, limits)


@cache
def _kernel() -> Any:
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func
