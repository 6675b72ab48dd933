"""The part of a causal Wan model that runs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from worldkv.kv.row import AttentionRow, RowLimits
from worldkv.kv.spec import KVSpec
from worldkv.models.base import BatchLimits
from worldkv.models.causal_wan.config import CausalWanConfig
from worldkv.models.causal_wan.ready import dit_steps
from worldkv.models.causal_wan.relative import fill_copies, kept_tokens
from worldkv.models.wan.dit import ForwardPlans, KeptTokens, WanDiT
from worldkv.models.wan.network import ActiveRow, Layers, Pages


class CausalWanNetwork:
    def __init__(self, config: CausalWanConfig, dit: WanDiT, spec: KVSpec) -> None:
        self.config, self.dit, self.spec = config, dit, spec
        self._block_tokens = config.blocks.frames_per_block * config.frame_tokens

    @torch.no_grad()
    def forward(self, pages: Pages, rows: Sequence[ActiveRow]) -> list[torch.Tensor | None]:
        """Velocities of the rows."""
        fill_copies(self.dit, pages.storage, rows)
        velocities: dict[int, torch.Tensor | None] = {}
        for indices in self._alike(rows):
            some = [rows[index] for index in indices]
            kept = kept_tokens(pages.storage, some) if self.spec.reads_copy else None
            text = [row.conditioning["text"] for row in some]
            plans = self.plans(pages, [row.history for row in some], text, kept)
            velocities |= zip(indices, self.dit([row.inputs for row in some], plans), strict=True)
        return [velocities[index] for index in range(len(rows))]

    @torch.no_grad()
    def project(self, kind: str, embeddings: tuple[torch.Tensor, ...]) -> Layers:
        assert kind == "text", kind
        return self.dit.project_text(embeddings[0])

    def ready_steps(self, pages: Pages, limits: BatchLimits) -> Sequence[Callable[[], object]]:
        return list(dit_steps(self, pages, limits))

    def plans(
        self,
        pages: Pages,
        history: Sequence[AttentionRow],
        text: Sequence[AttentionRow],
        kept: KeptTokens | None = None,
    ) -> ForwardPlans:
        """Of rows that are alike. As many of one kind always make plans of one shape."""
        limits = RowLimits(history[0].num_queries, self.spec.row_limits.num_visible)
        text_limits = replace(limits, num_visible=self.spec.conditioning["text"])
        return ForwardPlans(
            pages.backend.plan(pages.storage, history, limits),
            pages.backend.plan(pages.storage, text, text_limits),
            kept=kept,
        )

    def _alike(self, rows: Sequence[ActiveRow]) -> list[list[int]]:
        """Indices of rows that run together: those of blocks; each recache, which is rare, by itself. Mixed, they would
        need plans and graphs for every mixture."""
        is_block = [row.history.num_queries == self._block_tokens for row in rows]
        blocks = [index for index, is_alike in enumerate(is_block) if is_alike]
        others = [[index] for index, is_alike in enumerate(is_block) if not is_alike]
        return [blocks, *others] if blocks else others
