"""Tiny DiTs with random weights over a cache of their own, without engine and checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from worldkv.attention.backend import load_backend
from worldkv.kv.cache import KVCache
from worldkv.kv.spec import KVSpec
from worldkv.kv.state import KVState
from worldkv.kv.storage import KVStorage
from worldkv.kv.window import Window
from worldkv.models.dreamzero.config import DiTConfig
from worldkv.models.dreamzero.dit import DreamZeroDiT, DreamZeroRow
from worldkv.models.wan.config import WanConfig
from worldkv.models.wan.dit import ForwardPlans, WanDiT, WanRow

HEIGHT, WIDTH, FRAME_TOKENS = 4, 6, 6  # of a latent frame
SIZES: dict[str, Any] = {
    "dim": 64,
    "ffn_dim": 128,
    "num_heads": 2,
    "num_layers": 3,
    "freq_dim": 32,
    "text_dim": 48,
    "text_len": 16,
    "image_dim": 40,
}
ACTIONS: dict[str, Any] = {
    "frame_tokens": FRAME_TOKENS,
    "image_tokens": 21,
    "action_dim": 8,
    "max_state_dim": 16,
    "hidden_size": 32,
    "num_actions_per_chunk": 6,
}


def make_dit(kind: str) -> Any:
    """ "t2v" is plain Wan; "i2v" and "ti2v" are DreamZero's. The same kind has the same weights."""
    if kind == "t2v":
        dit: WanDiT = WanDiT(WanConfig(model_type="t2v", in_dim=16, out_dim=16, **SIZES))
    else:
        channels, concat = (16, True) if kind == "i2v" else (48, False)
        in_dim = 2 * channels + 4 if concat else channels
        sizes = {**SIZES, **ACTIONS, "concat_first_frame_latent": concat}
        dit = DreamZeroDiT(DiTConfig(model_type=kind, in_dim=in_dim, out_dim=channels, **sizes))
    with torch.no_grad():
        for name, parameter in dit.named_parameters():
            generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(around + 0.1 * torch.randn(parameter.shape, generator=generator))
    return dit.eval().requires_grad_(False)


class Stage:
    """A DiT over its cache: sessions of one branch each, their prompts, and forwards of rows of several sessions."""

    def __init__(self, dit: Any, num_sessions: int = 2) -> None:
        config = dit.config
        self.dit = dit
        self.random = torch.Generator().manual_seed(0)
        conditioning = {"text": config.text_len} | ({"image": config.image_tokens} if config.image_tokens else {})
        spec = KVSpec(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            window=Window(FRAME_TOKENS, 9),
            branches=("a",),
            conditioning=conditioning,
        )
        self.cache = KVCache(spec, KVStorage(spec, 160, 16, "cpu", torch.float32), load_backend("reference"))
        self.sessions = [self.cache.create_state(("a",)) for _ in range(num_sessions)]
        self.prompts = [self.randn(config.text_len, config.text_dim) for _ in self.sessions]
        for index, session in enumerate(self.sessions):
            self.condition(session, "text", f"text{index}", dit.project_text(self.prompts[index]))
            if config.image_tokens:
                feature = self.randn(config.image_tokens, config.image_dim)
                self.condition(session, "image", f"image{index}", dit.project_image(feature))

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def condition(self, session: KVState, kind: str, key: str, layers: Any) -> None:
        num_tokens = self.cache.spec.conditioning[kind]
        session.set_conditioning("a", kind, self.cache.conditioning.publish(key, num_tokens, layers))

    def row(self, session: KVState, num_frames: int, timestep: float = 0, *, draft: bool = False) -> Any:
        """Random latents; a draft wants a velocity, and brings actions and a state where the DiT takes them."""
        config = self.dit.config
        channels = config.in_dim - config.out_dim
        inputs = (
            self.randn(config.out_dim, num_frames, HEIGHT, WIDTH),
            self.randn(channels, num_frames, HEIGHT, WIDTH) if channels else None,
            session.branches["a"].num_chunks,
            timestep,
            draft,
        )
        if not isinstance(config, DiTConfig):
            return WanRow(*inputs)
        if not draft:
            return DreamZeroRow(*inputs)
        actions = self.randn(config.num_actions_per_chunk, config.action_dim)
        return DreamZeroRow(*inputs, actions, self.randn(config.num_states, config.max_state_dim), timestep / 2)

    def forward(self, sessions: Sequence[KVState], rows: Sequence[Any]) -> list[Any]:
        """One forward; rows that want no velocity are committed, the others' blocks go back."""
        plan, storage = self.cache.backend.plan, self.cache.storage
        history = []
        for session, row in zip(sessions, rows, strict=True):
            context = session.prepare("a", FRAME_TOKENS * row.latents.shape[1], commit=not row.wants_velocity)
            history.append(context.activate(getattr(row, "num_draft_tokens", 0)))
        conditioning = {
            kind: plan(
                storage,
                [s.conditioning("a")[kind].row(h.num_queries) for s, h in zip(sessions, history, strict=True)],
            )
            for kind in self.cache.spec.conditioning
        }
        outputs: list[Any] = self.dit(list(rows), ForwardPlans(plan(storage, history), **conditioning))
        for session, row in zip(sessions, rows, strict=True):
            if row.wants_velocity:
                session.abandon()
            else:
                session.commit("a")
        return outputs

    def ticks(self, num_ticks: int = 4) -> list[torch.Tensor]:
        """Ticks of all sessions side by side: a clean pass, then two drafts. All velocities, then all K and V."""
        velocities: list[torch.Tensor] = []
        for tick in range(num_ticks):
            rows = [self.row(session, 1 if tick == 0 else 2) for session in self.sessions]
            self.forward(self.sessions, rows)
            for timestep in (999, 700):
                rows = [self.row(session, 2, timestep, draft=True) for session in self.sessions]
                velocities += [part for output in self.forward(self.sessions, rows) for part in _tensors(output)]
        layers = range(self.cache.spec.num_layers)
        return velocities + [part for s in self.sessions for layer in layers for part in s.layer_kv("a", layer)]


def _tensors(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else [output.video_velocity, output.action_velocity]
