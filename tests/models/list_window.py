"""Causal video restated without pages: the window is a list of frames, each with its own K and V. The slow oracle."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from worldkv.models.wan.dit import ForwardPlans, WanDiT, WanRow
from worldkv.models.wan.rotary import rotate

Frame = tuple[torch.Tensor, torch.Tensor]  # K and V of a frame's tokens in one layer


class _Plan:
    """Attention of one forward over `seen` frames of history and the forward's own, or over fixed text. `turn`, where
    there is one, turns the keys of history by their places; `raw` then catches the forward's own before they are."""

    def __init__(self, seen: dict[int, list[Frame]], num_frames: int, num_kept: int | None = None, turn: Any = None):
        self.seen, self.num_frames, self.num_kept, self.turn = seen, num_frames, num_kept, turn
        self.own: dict[int, list[Frame]] = {}
        self.raw: dict[int, list[Frame]] = {}

    def write(self, layer: int, k: Any, v: Any) -> None:
        self.raw[layer] = list(zip(k.chunk(self.num_frames), v.chunk(self.num_frames), strict=True))

    def run(self, layer: int, q: Any, k: Any = None, v: Any = None) -> Any:
        frames = list(self.seen[layer])
        if self.turn is not None:
            frames = [(self.turn(place, key), value) for place, (key, value) in enumerate(frames)]
        if k is not None:
            own = list(zip(k.chunk(self.num_frames), v.chunk(self.num_frames), strict=True))
            self.own[layer] = own
            frames += own if self.num_kept is None else own[len(own) - self.num_kept :]
        keys, values = (torch.cat(part).transpose(0, 1)[None] for part in zip(*frames, strict=True))
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values)[0].transpose(0, 1)


class ListVideo:
    """One session. `window`: frames, sink and block included. `relative`: keys are kept unturned, and turned by their
    places among the frames that are seen, anew for each forward."""

    def __init__(self, dit: WanDiT, window: int, sink: int, relative: bool = False) -> None:
        self.relative = relative
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

    def _run(self, plan: _Plan, x: torch.Tensor, first: int, timestep: float, wants: bool) -> Any:
        """The output, and each layer's own frames as they are kept."""
        if self.relative:
            _, _, height, width = x.shape
            plan.turn = lambda place, key: rotate(key, self.dit.phases(place, 1, height, width))
        kept: Any = plan if self.relative else None
        plans: Any = ForwardPlans(plan, _Plan(self.text, 1), kept=kept)  # type: ignore[arg-type]
        (out,) = self.dit([WanRow(x, None, first, timestep, wants_velocity=wants)], plans)
        return out, plan.raw if self.relative else plan.own

    @torch.no_grad()
    def forward(self, x: torch.Tensor, timestep: float, commit: bool = False) -> Any:
        num = x.shape[1]
        visible = self._visible(num)
        plan = _Plan({layer: [kvs[i] for i in visible] for layer, kvs in enumerate(self.frames)}, num)
        first = len(visible) if self.relative else self.num_frames
        velocity, own = self._run(plan, x, first, timestep, not commit)
        if commit:
            for layer, kvs in enumerate(self.frames):
                kvs += own[layer]
            self.num_frames += num
            self.latents += x.split(1, dim=1)
        return velocity

    @torch.no_grad()
    def recache(self, timestep: float) -> None:
        num = min(self.window, self.num_frames)
        rolled = self.num_frames > self.window
        kept = self.window - self.sink if rolled else num
        seen = {layer: kvs[: self.sink] if rolled else [] for layer, kvs in enumerate(self.frames)}
        first = 0 if self.relative else self.num_frames - num
        _, own = self._run(_Plan(seen, num, kept), torch.cat(self.latents[-num:], dim=1), first, timestep, False)
        for layer, kvs in enumerate(self.frames):
            kvs[-kept:] = own[layer][-kept:]

    def cache(self, layer: int) -> torch.Tensor:
        """[2, tokens, heads, head_dim] of what is held."""
        held = list(range(self.num_frames))
        if self.num_frames > self.window:
            held = held[: self.sink] + held[-(self.window - self.sink) :]
        return torch.stack([torch.cat([self.frames[layer][i][part] for i in held]) for part in (0, 1)])
