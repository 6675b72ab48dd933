"""The engine's executor where a model runs on several ranks: the leader's part is run here, the others are told."""

from __future__ import annotations

from collections.abc import Sequence

from worldkv.engine.executor import LocalExecutor
from worldkv.kv.cache import KVCache
from worldkv.models.base import Encode, Forward, WorldModel
from worldkv.ranks.leader import Leader


class RanksExecutor(LocalExecutor):
    """`model.forward` and the cache tell the other ranks; this tells the engine when they are lost."""

    def __init__(
        self, leader: Leader, model: WorldModel[object, object, object], cache: KVCache, *, alone: bool = False
    ) -> None:
        super().__init__(model, cache, alone=alone)
        self._leader = leader

    def check(self) -> None:
        """Raises RanksLost."""
        self._leader.check()

    def run(self, requests: Sequence[Forward | Encode]) -> list[object]:
        results = super().run(requests)
        if self._leader.fault is not None:  # nobody's own failure
            raise self._leader.fault
        return results
