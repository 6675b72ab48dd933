"""Causal video restated without pages: the window is a list of frames, each with its own K and V. The slow oracle."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from worldkv.models.wan.dit import ForwardPlans, WanDiT, WanRow

Frame = tuple[torch.Tensor, torch.Tensor]  # K and V of a frame's tokens in one layer


class _Plan:
    """Attention of one forward over `seen` frames of history and the forward's own, or over fixed text."""

    def __init__(self, seen: dict[int, list[Frame]], num_frames: int, num_kept: int | None = None) -> None:
        self.seen, self.num_frames, self.num_kept = seen, num_frames, num_kept
        self.own: dict[int, list[Frame]] = {}

    def run(self, layer: int, q: Any, k: Any = None, v: Any = None) -> Any:
        frames = list(self.seen[layer])
        if k is not None:
            own = list(zip(k.chunk(self.num_frames), v.chunk(self.num_frames), strict=True))
            self.own[layer] = own
            frames += own if self.num_kept is None else own[len(own) - self.num_kept :]
        keys, values = (torch.cat(part).transpose(0, 1)[None] for part in zip(*frames, strict=True))
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values)[0].transpose(0, 1)


class ListVideo:
    """One session. `window`: frames, sink and block included."""

    def __init__(self, dit: WanDiT, window: int, sink: int) -> None:
        self.dit, self.window, self.sink, self.num_frames = dit, window, sink, 0
        self.frames: list[list[Frame]] = [[] for _ in dit.blocks]  # all that ever came, by layer
        self.latents: list[torch.Tensor] = []
        self.text: dict[int, list[Frame]] = {}

    def prompt(self, embedding: torch.Tensor) -> None:
        self.text = {layer: [kv] for layer, kv in enumerate(self.dit.project_text(embedding))}

    def _visible(self, num_coming: int) -> list[int]:
        """Frames of history that a block of so many sees."""
        total = self.num_frames + num_coming
        if total <= self.window:
            return list(range(self.num_frames))
        return [*range(self.sink), *range(total - (self.window - self.sink), self.num_frames)]

    @torch.no_grad()
    def forward(self, x: torch.Tensor, timestep: float, commit: bool = False) -> Any:
        num = x.shape[1]
        visible = self._visible(num)
        plan = _Plan({layer: [kvs[i] for i in visible] for layer, kvs in enumerate(self.frames)}, num)
        plans: Any = ForwardPlans(plan, _Plan(self.text, 1))  # type: ignore[arg-type]
        (velocity,) = self.dit([WanRow(x, None, self.num_frames, timestep, wants_velocity=not commit)], plans)
        if commit:
            for layer, kvs in enumerate(self.frames):
                kvs += plan.own[layer]
            self.num_frames += num
            self.latents += x.split(1, dim=1)
        return velocity

    @torch.no_grad()
    def recache(self, timestep: float) -> None:
        num = min(self.window, self.num_frames)
        rolled = self.num_frames > self.window
        kept = self.window - self.sink if rolled else num
        seen = {layer: kvs[: self.sink] if rolled else [] for layer, kvs in enumerate(self.frames)}
        plan, first = _Plan(seen, num, kept), self.num_frames - num
        plans: Any = ForwardPlans(plan, _Plan(self.text, 1))  # type: ignore[arg-type]
        self.dit([WanRow(torch.cat(self.latents[-num:], dim=1), None, first, timestep, False)], plans)
        for layer, kvs in enumerate(self.frames):
            kvs[-kept:] = plan.own[layer][-kept:]

    def cache(self, layer: int) -> torch.Tensor:
        """[2, tokens, heads, head_dim] of what is held."""
        held = list(range(self.num_frames))
        if self.num_frames > self.window:
            held = held[: self.sink] + held[-(self.window - self.sink) :]
        return torch.stack([torch.cat([self.frames[layer][i][part] for i in held]) for part in (0, 1)])
