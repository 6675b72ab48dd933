"""The format of K and V in the pages, and its cost.

A format with scales needs three things: `KVStorage.write` to quantise, the fused kernel that writes pages itself
(models/wan/kernels_triton), and attention backends whose kernels read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from worldkv.kv.spec import KVSpec


@dataclass(frozen=True)
class PageFormat:
    """`dtype`: of each element. `scales`: dtype of the factor of each head of a slot; None if elements need none."""

    dtype: torch.dtype
    scales: torch.dtype | None = None

    def __str__(self) -> str:
        return str(self.dtype) if self.scales is None else f"{self.dtype} with scales in {self.scales}"

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def scale_size(self) -> int:
        """Bytes of the scale of one head of a slot, for K and for V each; 0 where there is none."""
        return 0 if self.scales is None else self.scales.itemsize

    @property
    def is_half_precision(self) -> bool:
        """Whether elements stand as they are in bfloat16 or float16, as the GPU kernels read them."""
        return self.scales is None and self.dtype.is_floating_point and self.element_size == 2

    def bytes_per_block(self, spec: KVSpec, block_size: int) -> int:
        """K and V of one block over all layers."""
        return spec.bytes_per_block(block_size, self.element_size, self.scale_size)
