"""A DiT on several ranks, as the model at the leader calls it: every call is a command to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from worldkv.models.base import BatchLimits
from worldkv.models.wan.network import ActiveRow, Layers, Network, Pages
from worldkv.ranks.leader import Leader


@dataclass(frozen=True)
class Projection:
    """Conditioning that is still to be projected; iterated, it is the leader's own part."""

    network: Network
    kind: str
    embeddings: tuple[torch.Tensor, ...]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.network.project(self.kind, self.embeddings))


class RankedNetwork:
    """Its pages are the ranks' own: those that it is given are the leader's."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def forward(self, pages: Pages, rows: Sequence[ActiveRow]) -> Sequence[object]:
        own = self._leader.work.call("forward", list(rows))[0]
        assert isinstance(own, Sequence)
        return own

    def project(self, kind: str, embeddings: tuple[torch.Tensor, ...]) -> Layers:
        return Projection(self._leader.worker.network, kind, embeddings)

    def ready_steps(self, pages: Pages, limits: BatchLimits) -> Sequence[Callable[[], object]]:
        count = self._leader.work.call("ready_steps", limits)[0]
        assert isinstance(count, int)
        return [partial(self._leader.work.call, "make_ready", step) for step in range(count)]
