"""The part of DreamZero that runs on every rank: its DiT, and guidance where each rank runs a branch of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from worldkv.kv.row import AttentionRow
from worldkv.kv.spec import KVSpec
from worldkv.models.base import BatchLimits
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.dit import DreamZeroDiT, RowOutput
from worldkv.models.dreamzero.ready import dit_steps
from worldkv.models.wan.dit import ForwardPlans
from worldkv.models.wan.network import ActiveRow, Branches, Layers, Pages


class DreamZeroNetwork:
    """`branches`: None where this rank runs all of them."""

    def __init__(
        self, config: DreamZeroConfig, dit: DreamZeroDiT, spec: KVSpec, branches: Branches | None = None
    ) -> None:
        self.config, self.dit, self.spec, self._branches = config, dit, spec, branches

    @torch.no_grad()
    def forward(self, pages: Pages, rows: Sequence[ActiveRow]) -> list[RowOutput]:
        """Velocities of the rows; guided where each rank runs a branch."""
        read = {kind: [row.conditioning[kind] for row in rows] for kind in self.spec.conditioning}
        plans = self.plans(pages, [row.history for row in rows], read)
        outputs: list[RowOutput] = self.dit([row.inputs for row in rows], plans)
        return outputs if self._branches is None else self._guided(outputs, self._branches)

    @torch.no_grad()
    def project(self, kind: str, embeddings: tuple[torch.Tensor, ...]) -> Layers:
        """Of this rank's branch."""
        own = embeddings[0] if self._branches is None or len(embeddings) == 1 else embeddings[self._branches.index]
        return self.dit.project_text(own) if kind == "text" else self.dit.project_image(own)

    def ready_steps(self, pages: Pages, limits: BatchLimits) -> Sequence[Callable[[], object]]:
        return list(dit_steps(self, pages, limits))

    def plans(
        self, pages: Pages, history: Sequence[AttentionRow], read: Mapping[str, Sequence[AttentionRow]]
    ) -> ForwardPlans:
        """`read`: the rows of each kind of conditioning. As many rows always make plans of one shape."""
        limits = self.spec.row_limits
        text, image = (
            pages.backend.plan(pages.storage, read[kind], replace(limits, num_visible=self.spec.conditioning[kind]))
            for kind in ("text", "image")
        )
        return ForwardPlans(pages.backend.plan(pages.storage, history, limits), text, image)

    def _guided(self, outputs: list[RowOutput], branches: Branches) -> list[RowOutput]:
        """Of all rows in one exchange. The actions are the conditional branch's."""
        videos = [output.video_velocity for output in outputs if output.video_velocity is not None]
        if not videos:
            return outputs
        packed = branches.exchange(torch.cat([video.flatten() for video in videos]))
        sizes = [video.numel() for video in videos]
        conditional, unconditional = (iter(torch.split(each, sizes)) for each in packed)
        guided = []
        for output in outputs:
            video = output.video_velocity
            if video is not None:
                video = guide(
                    next(conditional).view_as(video), next(unconditional).view_as(video), self.config.cfg_scale
                )
            guided.append(RowOutput(video, output.action_velocity))
        return guided


def guide(conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance."""
    return unconditional + scale * (conditional - unconditional)
