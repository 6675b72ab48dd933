"""The part of a causal Wan model that runs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worldkv.kv.row import RowLimits
from worldkv.kv.spec import KVSpec
from worldkv.models.base import BatchLimits
from worldkv.models.causal_wan.relative import fill_copies, kept_tokens
from worldkv.models.wan.dit import ForwardPlans, WanDiT
from worldkv.models.wan.network import ActiveRow, Layers, Pages


class CausalWanNetwork:
    """`block_tokens`: of a block."""

    def __init__(self, dit: WanDiT, spec: KVSpec, block_tokens: int) -> None:
        self.dit, self.spec, self._block_tokens = dit, spec, block_tokens

    @torch.no_grad()
    def forward(self, pages: Pages, rows: Sequence[ActiveRow]) -> list[torch.Tensor | None]:
        """Velocities of the rows."""
        limits, text_limits = self._limits([row.history.num_queries for row in rows])
        fill_copies(self.dit, pages.storage, rows)
        plans = ForwardPlans(
            pages.backend.plan(pages.storage, [row.history for row in rows], limits),
            pages.backend.plan(pages.storage, [row.conditioning["text"] for row in rows], text_limits),
            kept=kept_tokens(pages.storage, rows),
        )
        velocities: list[torch.Tensor | None] = self.dit([row.inputs for row in rows], plans)
        return velocities

    @torch.no_grad()
    def project(self, kind: str, embeddings: tuple[torch.Tensor, ...]) -> Layers:
        assert kind == "text", kind
        return self.dit.project_text(embeddings[0])

    def ready_steps(self, pages: Pages, limits: BatchLimits) -> Sequence[Callable[[], object]]:
        return ()

    def _limits(self, num_queries: Sequence[int]) -> tuple[RowLimits, RowLimits]:
        """Of history and text: as many rows of blocks always make plans of one shape. A recache, which is rare, has
        more queries, and would make all others' plans larger."""
        most = max(self._block_tokens, *num_queries)
        return RowLimits(most, self.spec.row_limits.num_visible), RowLimits(most, self.spec.conditioning["text"])
