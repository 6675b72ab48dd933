"""A world model without a network: K/V are real, attention is an average, so an output says exactly what was visible.

A tick observes one number, commits it as a chunk of every branch, drafts twice, and returns, per branch, the average of
all numbers it could see, its draft's own included. Failures and pauses can be asked for at any place.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from worldkv.attention.reference import ReferenceBackend
from worldkv.engine.engine import Engine, EngineConfig
from worldkv.kv.cache import KVCache
from worldkv.kv.spec import KVSpec
from worldkv.kv.state import KVState
from worldkv.kv.storage import KVStorage
from worldkv.kv.window import Window, WindowPolicy
from worldkv.models.base import EncodeRequest, ForwardRequest

BRANCHES = ("left", "right")
CHUNK, DRAFT_TOKENS, TEXT_TOKENS, LAYERS = 3, 2, 5, 2
DRAFT = 0.5  # what a draft writes, video and draft-only tokens alike


@dataclass(frozen=True)
class ToyInputs:
    """`fail_at`: "begin", "encode", "commit" or "draft"; `hold`: the first forward waits for it."""

    number: float
    prompt: int = 0
    fail_at: str | None = None
    hold: threading.Event | None = None
    held: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class ToyResult:
    averages: tuple[float, ...]
    restarted: bool
    timings: dict[str, float] = field(default_factory=dict)
    blocks_used: int = 0
    blocks_free: int = 0


@dataclass(frozen=True)
class ToyRow:
    context: Any
    conditioning: Any
    number: float
    num_draft_tokens: int
    inputs: ToyInputs


class Injected(RuntimeError):
    pass


class ToyModel:
    def __init__(self, policy: WindowPolicy = "reset", window: int = 5, sink: int = 0) -> None:
        self.spec = KVSpec(
            num_layers=LAYERS,
            num_heads=1,
            head_dim=2,
            window=Window(CHUNK, window, sink, policy),
            branches=BRANCHES,
            max_draft_tokens=DRAFT_TOKENS,
            conditioning={"text": TEXT_TOKENS},
            entries_per_session={"text": 1},
        )

    def new_rollout(self) -> int | None:
        return None  # the last prompt

    def tick(
        self, cache: KVCache, kv: KVState, rollout: int | None, inputs: ToyInputs
    ) -> Generator[Any, Any, tuple[ToyResult, int]]:
        if inputs.fail_at == "begin":
            raise Injected("begin")
        restart = rollout != inputs.prompt
        if self.spec.window.policy == "reset":
            restart = restart or not self.spec.window.has_room(kv.branches["left"].num_chunks, 2)
        if restart:
            kv.reset(keep=("text",) if rollout == inputs.prompt else ())
        if rollout != inputs.prompt:
            key = f"text {inputs.prompt}"
            entry = cache.conditioning.acquire(key)
            if entry is None:
                value = yield EncodeRequest("text", inputs)
                tokens = torch.full((TEXT_TOKENS, 1, 2), value, dtype=torch.float64)
                entry = cache.conditioning.publish(key, TEXT_TOKENS, [(tokens, tokens)] * LAYERS)
            for branch in BRANCHES:
                kv.set_conditioning(branch, "text", cache.conditioning.share(entry))
            cache.conditioning.release(entry)
        yield self._forward(kv, inputs, inputs.number, commit=True)
        draft = self._forward(kv, inputs, DRAFT, commit=False)
        first = yield draft
        second = yield draft
        assert first == second, "a repeated draft changed something"
        kv.abandon()
        return ToyResult(tuple(second), restart), inputs.prompt

    def _forward(self, kv: KVState, inputs: ToyInputs, number: float, *, commit: bool) -> ForwardRequest:
        extra = 0 if commit else DRAFT_TOKENS
        rows: Any = tuple(
            ToyRow(kv.prepare(branch, CHUNK, commit), kv.conditioning(branch), number + sign(branch), extra, inputs)
            for branch in BRANCHES
        )
        return ForwardRequest(rows, "commit" if commit else "denoise")

    def encode(self, encoder: str, payloads: Sequence[ToyInputs]) -> list[float]:
        for inputs in payloads:
            if inputs.fail_at == "encode":
                raise Injected("encode")
        return [100.0 + inputs.prompt for inputs in payloads]

    def forward(self, cache: KVCache, rows: Sequence[ToyRow]) -> list[float]:
        made = [row.context.activate(row.num_draft_tokens) for row in rows]
        plan = cache.backend.plan(cache.storage, made)
        values = torch.cat([torch.full((m.num_queries, 1, 2), r.number) for m, r in zip(made, rows, strict=True)])
        values = values.to(torch.float64)
        for layer in range(LAYERS):
            out = plan.run(layer, torch.zeros_like(values), values + layer, values + layer)
            if layer == 0:
                self._misbehave(rows)  # half-way: some layers are written, others not
        text = [cache.storage.gather(0, r.conditioning["text"].blocks, _SLOTS)[0][0, 0, 0] for r in rows]
        ends = torch.tensor([m.num_queries for m in made]).cumsum(0) - 1
        return [float(out[end, 0, 0]) + float(t) for end, t in zip(ends, text, strict=True)]

    def _misbehave(self, rows: Sequence[ToyRow]) -> None:
        for row in rows:
            if row.inputs.hold is not None:
                row.inputs.held.set()
                row.inputs.hold.wait(10)
            if row.inputs.fail_at == ("commit" if row.context.commits else "draft"):
                raise Injected(row.inputs.fail_at)


def sign(branch: str) -> float:
    """What tells the branches' numbers apart."""
    return 0.0 if branch == "left" else 1000.0


def expected_average(visible: Sequence[float], prompt: int, branch: str) -> float:
    """What a tick returns when it committed `visible`, the number it observed last, all others before."""
    tokens = [number + sign(branch) for number in visible for _ in range(CHUNK)]
    tokens += [DRAFT + sign(branch)] * (CHUNK + DRAFT_TOKENS)
    return sum(tokens) / len(tokens) + (LAYERS - 1) + 100.0 + prompt


def make_toy_engine(model: ToyModel, *, block_size: int = 4, num_blocks: int | None = None, **options: Any) -> Engine:
    config = EngineConfig(block_size=block_size, **options)
    if num_blocks is None:
        num_blocks = config.max_sessions * model.spec.blocks_per_session(block_size)
    storage = KVStorage(model.spec, num_blocks, block_size, dtype=torch.float64)
    return Engine(model, KVCache(model.spec, storage, ReferenceBackend()), config)


_SLOTS = torch.arange(1).numpy()
