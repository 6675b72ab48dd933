"""A part of a DiT: some heads of each attention, some width of each feed-forward.

What a part computes of a sum over all of them is partial, until `Shard.sum` has added the others'. Everything else of
the DiT is whole in each part, and the same. Knows no process: whoever has several brings a Shard that adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldkv.models.checkpoints.source import TensorSource

if TYPE_CHECKING:
    import torch

    from worldkv.models.wan.config import WanConfig

# tensors of a block, by what is split: the outputs of a product (rows of its weight) or its inputs (columns)
_ROWS = re.compile(r"blocks\.\d+\.(?:(?:self_attn|cross_attn)\.(?:q|k|v|k_img|v_img|norm_\w+)|ffn\.0)\.\w+")
_COLUMNS = re.compile(r"blocks\.\d+\.(?:(?:self_attn|cross_attn)\.o|ffn\.2)\.weight")


@dataclass(frozen=True)
class Shard:
    """Part `index` of `size` equal ones; the only one by itself."""

    index: int = 0
    size: int = 1

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Over all parts, in place."""
        assert self.size == 1, "several parts need a Shard that adds what they have"
        return partial

    def sources(self, names: Mapping[str, str]) -> dict[str, str | TensorSource]:
        """Where this part's tensors come from; `names`: a WanDiT's names to the checkpoint's."""
        return {name: self._source(name, stored) for name, stored in names.items()} if self.size > 1 else dict(names)

    def _source(self, name: str, stored: str) -> str | TensorSource:
        for pattern, dim in ((_ROWS, 0), (_COLUMNS, 1)):
            if pattern.fullmatch(name):
                return TensorSource(stored, self.index, self.size, dim=dim)
        return stored


WHOLE = Shard()


@dataclass(frozen=True)
class Mesh:
    """How many ranks a model runs on: `guidance` branches (1: all of them together) of `tensor` shards each."""

    guidance: int = 1
    tensor: int = 1

    @property
    def num_ranks(self) -> int:
        return self.guidance * self.tensor

    def __str__(self) -> str:
        return f"guidance-parallel {self.guidance}, tensor-parallel {self.tensor}"


ALONE = Mesh()


def split_shapes(shapes: Mapping[str, tuple[int, ...]], size: int, prefix: str) -> dict[str, tuple[int, ...]]:
    """The shapes of one of `size` parts; `prefix`: of the DiT's tensors among them."""
    shard = Shard(0, size)
    sources = shard.sources({name.removeprefix(prefix): name for name in shapes if name.startswith(prefix)})
    split = {s.key: s for s in sources.values() if isinstance(s, TensorSource)}
    parts = {name: split[name].shape(shape) if name in split else shape for name, shape in shapes.items()}
    return {name: shape for name, shape in parts.items() if shape is not None}


def check_parts(config: WanConfig, size: int) -> None:
    """Raises ValueError for a number of parts that heads or feed-forward cannot be divided into."""
    if size < 1 or config.num_heads % size or config.ffn_dim % size:
        fitting = [n for n in _up_to(config.num_heads) if config.num_heads % n == 0 and config.ffn_dim % n == 0]
        raise ValueError(
            f"tensor_parallel: expected a number that divides the model's {config.num_heads} heads and feed-forward "
            f"of {config.ffn_dim}, got {size}; one of {', '.join(map(str, fitting))}"
        )


def _up_to(most: int) -> Iterable[int]:
    return range(1, min(most, 64) + 1)
