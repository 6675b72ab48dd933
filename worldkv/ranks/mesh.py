"""The collectives of one rank, through torch.distributed: gloo between CPUs, NCCL between GPUs.

Rank `guidance * tensor_size + tensor`: the shards of one branch stand side by side, as they speak most. Each collective
fails after `timeout_s`, whatever the others do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from worldkv.models.wan.network import Part
from worldkv.models.wan.shard import WHOLE, Mesh, Shard
from worldkv.ranks.codec import TensorShape
from worldkv.ranks.place import TCPStore

_ALIGNMENT = 16  # bytes, of a tensor in a broadcast


@dataclass(frozen=True)
class _RankShard(Shard):
    """Adds through its group."""

    group: dist.ProcessGroup | None = None

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial, group=self.group)
        return partial


@dataclass(frozen=True)
class _RankBranches:
    """Exchanges through its group."""

    index: int
    size: int
    group: dist.ProcessGroup | None

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor.contiguous()
        everyones = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(everyones, tensor, group=self.group)
        return everyones


class RankMesh:
    """Joins the others, all of them at once; `leave` once they are no longer needed."""

    def __init__(self, mesh: Mesh, rank: int, store: TCPStore, device: torch.device, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self.mesh, self.rank, self.device = mesh, rank, device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # a collective that fails is given up, and its process lives to say so
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=mesh.num_ranks,
            timeout=timeout,
        )
        self._shards, self._branches = None, None
        for guidance in range(mesh.guidance):  # everybody makes all groups, in one order
            members = [guidance * mesh.tensor + tensor for tensor in range(mesh.tensor)]
            group = dist.new_group(members, timeout=timeout)
            self._shards = group if rank in members else self._shards
        for tensor in range(mesh.tensor):
            members = [guidance * mesh.tensor + tensor for guidance in range(mesh.guidance)]
            group = dist.new_group(members, timeout=timeout)
            self._branches = group if rank in members else self._branches

    @property
    def part(self) -> Part:
        """This rank's."""
        guidance, tensor = divmod(self.rank, self.mesh.tensor)
        shard = _RankShard(tensor, self.mesh.tensor, self._shards) if self.mesh.tensor > 1 else WHOLE
        branches = _RankBranches(guidance, self.mesh.guidance, self._branches) if self.mesh.guidance > 1 else None
        return Part(self.device, shard, branches)

    def share(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The leading rank gives these to all, in one broadcast."""
        shapes = [TensorShape(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        packed = torch.zeros(_offsets(shapes)[-1], dtype=torch.uint8, device=self.device)
        for tensor, part in zip(tensors, _parts(packed, shapes), strict=True):
            part.copy_(tensor)
        dist.broadcast(packed, 0)
        return _parts(packed, shapes)

    def take(self, shapes: Sequence[TensorShape]) -> list[torch.Tensor]:
        """What the leading rank shares."""
        packed = torch.empty(_offsets(shapes)[-1], dtype=torch.uint8, device=self.device)
        dist.broadcast(packed, 0)
        return _parts(packed, shapes)

    def leave(self) -> None:
        """Safe twice."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _offsets(shapes: Sequence[TensorShape]) -> list[int]:
    """Where each begins, and the end of all."""
    offsets = [0]
    for each in shapes:
        size = torch.Size(each.shape).numel() * each.dtype.itemsize
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _parts(packed: torch.Tensor, shapes: Sequence[TensorShape]) -> list[torch.Tensor]:
    """Views of the broadcast bytes."""
    parts = []
    for start, each in zip(_offsets(shapes), shapes, strict=False):
        size = torch.Size(each.shape).numel() * each.dtype.itemsize
        parts.append(packed[start : start + size].view(each.dtype).view(each.shape))
    return parts
