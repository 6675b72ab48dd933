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
from worldkv.kv.spec import KVSpec, Step
from worldkv.kv.state import KVState
from worldkv.kv.storage import KVStorage
from worldkv.kv.window import Window, WindowPolicy
from worldkv.models.base import Encode, Forward, ModelCard, Outcome, Program, Row

BRANCHES = ("left", "right")
CHUNK, DRAFT_TOKENS, TEXT_TOKENS, LAYERS = 3, 2, 5, 2
TICK = (Step(1, commits=True), Step(1, num_draft_tokens=DRAFT_TOKENS))
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


@dataclass(frozen=True)
class ToyRow:
    number: float
    tick: ToyInputs


@dataclass(frozen=True)
class ToyAhead:
    """A tick that has observed its number."""

    number: float
    prompt: int
    restarted: bool


ToyState = int | ToyAhead | None


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
            ticks=(TICK,),
            restarts=(TICK,),
            conditioning={"text": TEXT_TOKENS},
            entries_per_session={"text": 1},
        )

    @property
    def card(self) -> ModelCard:
        return ModelCard("toy", "two layers", 0, self.spec.window.max_chunks, {})

    def new_state(self, old: int | None = None) -> int | None:
        return None  # the last prompt

    def fake_inputs(self, first: bool) -> ToyInputs:
        return ToyInputs(0.0)

    def program(self, kv: KVState, state: ToyState, inputs: ToyInputs) -> Program[ToyResult, ToyState]:
        if inputs.fail_at == "begin":
            raise Injected("begin")
        begun = state if isinstance(state, ToyAhead) else (yield from self._observe(kv, state, inputs))
        draft = self._forward(kv, inputs, DRAFT, commit=False)
        first = yield draft
        second = yield draft
        assert first == second, "a repeated draft changed something"
        kv.abandon()
        return Outcome(ToyResult(tuple(second), begun.restarted), inputs.prompt)

    def ahead(self, kv: KVState, state: ToyState, inputs: ToyInputs) -> Program[None, ToyState]:
        assert not isinstance(state, ToyAhead), "a tick has begun twice"
        return Outcome(None, (yield from self._observe(kv, state, inputs)))

    def goes_on(self, state: ToyAhead, inputs: ToyInputs) -> bool:
        return (state.number, state.prompt) == (inputs.number, inputs.prompt)

    def _observe(self, kv: KVState, state: int | None, inputs: ToyInputs) -> Generator[Any, Any, ToyAhead]:
        restart = state != inputs.prompt
        if self.spec.window.policy == "reset":
            restart = restart or not self.spec.window.has_room(kv.branches["left"].num_chunks, 2)
        if restart:
            kv.reset(keep=("text",) if state == inputs.prompt else ())
        if state != inputs.prompt:
            key = f"text {inputs.prompt}"
            entry = kv.cache.conditioning.acquire(key)
            if entry is None:
                value = yield Encode("text", inputs)
                tokens = torch.full((TEXT_TOKENS, 1, 2), value, dtype=torch.float64)
                entry = kv.cache.conditioning.publish(key, TEXT_TOKENS, [(tokens, tokens)] * LAYERS)
            for branch in BRANCHES:
                kv.set_conditioning(branch, "text", kv.cache.conditioning.share(entry))
            kv.cache.conditioning.release(entry)
        yield self._forward(kv, inputs, inputs.number, commit=True)
        return ToyAhead(inputs.number, inputs.prompt, restart)

    def _forward(self, kv: KVState, inputs: ToyInputs, number: float, *, commit: bool) -> Forward:
        extra = 0 if commit else DRAFT_TOKENS
        rows = tuple(
            Row(
                kv.prepare(branch, CHUNK, commit), kv.conditioning(branch), extra, ToyRow(number + sign(branch), inputs)
            )
            for branch in BRANCHES
        )
        return Forward(rows, "commit" if commit else "denoise")

    def encode(self, encoder: str, payloads: Sequence[ToyInputs]) -> list[float]:
        for inputs in payloads:
            if inputs.fail_at == "encode":
                raise Injected("encode")
        return [100.0 + inputs.prompt for inputs in payloads]

    def forward(self, cache: KVCache, rows: Sequence[Row[ToyRow]]) -> list[float]:
        made = [row.activate() for row in rows]
        plan = cache.backend.plan(cache.storage, made)
        values = torch.cat(
            [torch.full((m.num_queries, 1, 2), r.inputs.number) for m, r in zip(made, rows, strict=True)]
        )
        values = values.to(torch.float64)
        for layer in range(LAYERS):
            out = plan.run(layer, torch.zeros_like(values), values + layer, values + layer)
            if layer == 0:
                self._misbehave(rows)  # half-way: some layers are written, others not
        text = [cache.storage.gather(0, r.conditioning["text"].blocks, _SLOTS)[0][0, 0, 0] for r in rows]
        ends = torch.tensor([m.num_queries for m in made]).cumsum(0) - 1
        return [float(out[end, 0, 0]) + float(t) for end, t in zip(ends, text, strict=True)]

    def _misbehave(self, rows: Sequence[Row[ToyRow]]) -> None:
        for row in rows:
            if row.inputs.tick.hold is not None:
                row.inputs.tick.held.set()
                row.inputs.tick.hold.wait(10)
            if row.inputs.tick.fail_at == ("commit" if row.context.commits else "draft"):
                raise Injected(row.inputs.tick.fail_at)


def sign(branch: str) -> float:
    """What tells the branches' numbers apart."""
    return 0.0 if branch == "left" else 1000.0


def expected_average(visible: Sequence[float], prompt: int, branch: str) -> float:
    """What a tick returns when it committed `visible`, the number it observed last, all others before."""
    tokens = [number + sign(branch) for number in visible for _ in range(CHUNK)]
    tokens += [DRAFT + sign(branch)] * (CHUNK + DRAFT_TOKENS)
    return sum(tokens) / len(tokens) + (LAYERS - 1) + 100.0 + prompt


def make_toy_engine(
    model: ToyModel, *, block_size: int = 4, num_blocks: int | None = None, **options: Any
) -> Engine[ToyInputs, int | None, ToyResult]:
    shared = options.pop("shared", None)
    config = EngineConfig(block_size=block_size, **options)
    if num_blocks is None:
        num_blocks = (config.max_sessions or 4) * model.spec.blocks_per_session(block_size)
    storage = KVStorage(model.spec, num_blocks, block_size, dtype=torch.float64)
    return Engine(model, KVCache(model.spec, storage, ReferenceBackend()), config, shared=shared)


_SLOTS = torch.arange(1).numpy()
