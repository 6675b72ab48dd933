"""A causal video model without actions, encoders or conditioning: each tick commits a frame and predicts the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worldkv.errors import BadRequest
from worldkv.kv.cache import KVCache
from worldkv.kv.spec import KVSpec, Step
from worldkv.kv.state import KVState
from worldkv.kv.window import Window
from worldkv.models.base import Forward, ModelCard, Outcome, Program, Row
from worldkv.models.dots.config import DotsConfig

Seen = torch.Tensor | None  # a frame [frame_tokens, dim]; None: what was predicted last is taken for seen


@dataclass(frozen=True)
class DotsRow:
    """A frame [frame_tokens, dim], its number, and how noisy it is: 0 (clean) to 1."""

    frame: torch.Tensor
    number: int
    noise: float


class Dots(nn.Module):
    """Build it on the meta device and fill it from a checkpoint."""

    def __init__(self, config: DotsConfig) -> None:
        super().__init__()
        self.config = config
        layers = range(config.num_layers)
        self.qkv = nn.ModuleList([nn.Linear(config.dim, 3 * config.dim) for _ in layers])
        self.out = nn.ModuleList([nn.Linear(config.dim, config.dim) for _ in layers])

    @property
    def spec(self) -> KVSpec:
        config = self.config
        return KVSpec(
            config.num_layers,
            config.num_heads,
            config.dim // config.num_heads,
            Window(config.frame_tokens, config.window, policy="slide"),
            ("video",),
            ticks=((Step(1, commits=True), Step(1)),),
        )

    @property
    def card(self) -> ModelCard:
        config, num_bytes = self.config, sum(p.numel() * p.element_size() for p in self.parameters())
        sizes = f"{config.num_layers} layers, width {config.dim}"
        return ModelCard("dots", sizes, num_bytes, config.window, {"steps": config.steps})

    def new_state(self, old: Seen = None) -> Seen:
        return None

    def fake_inputs(self, first: bool) -> Seen:
        return torch.zeros(self.config.frame_tokens, self.config.dim)

    def program(self, kv: KVState, state: Seen, inputs: Seen) -> Program[torch.Tensor, Seen]:
        size, seen = (self.config.frame_tokens, self.config.dim), state if inputs is None else inputs
        if seen is None:
            raise BadRequest("frame: nothing was predicted yet that could take its place; send the first one")
        if tuple(seen.shape) != size:
            raise BadRequest(f"frame: expected shape {list(size)}, got {list(seen.shape)}")
        yield self._forward(kv, DotsRow(seen, kv.num_chunks, 0.0), commit=True)
        frame = torch.randn(size, generator=torch.Generator().manual_seed(kv.num_chunks))
        for step in range(self.config.steps):
            noisy = DotsRow(frame, kv.num_chunks, 1 - step / self.config.steps)
            (velocity,) = yield self._forward(kv, noisy, commit=False)
            frame = frame - velocity / self.config.steps
        return Outcome(frame, frame)

    def _forward(self, kv: KVState, row: DotsRow, *, commit: bool) -> Forward:
        context = kv.prepare("video", self.config.frame_tokens, commit=commit)
        return Forward((Row(context, kv.conditioning("video"), 0, row),), "commit" if commit else "denoise")

    @torch.no_grad()
    def forward(self, cache: KVCache, rows: Sequence[Row[DotsRow]]) -> Sequence[torch.Tensor]:
        plan = cache.backend.plan(cache.storage, [row.activate() for row in rows])
        x = torch.cat([row.inputs.frame + row.inputs.noise + 0.1 * row.inputs.number for row in rows])
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(x).view(len(x), 3, self.config.num_heads, -1).unbind(1)
            x = x + out(plan.run(layer, q, k, v).flatten(1))
        return torch.split(x, self.config.frame_tokens)

    def encode(self, encoder: str, payloads: Sequence[object]) -> Sequence[object]:
        raise ValueError(f"encoder: expected none, since dots has none, got {encoder!r}")
