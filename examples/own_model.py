"""A causal video model of one's own: paged cache, sessions, batching and forks come from worldkv. Random weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worldkv import EngineConfig, start_engine
from worldkv.kv.cache import KVCache
from worldkv.kv.spec import KVSpec, Step
from worldkv.kv.state import KVState
from worldkv.kv.window import Window
from worldkv.models.base import Forward, ModelCard, Outcome, Program, Row

TOKENS, DIM, HEADS, LAYERS, STEPS = 4, 32, 2, 2, 4  # of a frame, of a token, of attention; solver steps
Seen = torch.Tensor | None  # a frame [TOKENS, DIM]; None: what was predicted last is taken for seen


@dataclass(frozen=True)
class Frame:  # a row's own inputs
    tokens: torch.Tensor
    number: int
    noise: float  # 0 (clean) to 1


class OwnModel(nn.Module):  # each tick commits the frame that was seen, and predicts the next one
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(DIM, 3 * DIM) for _ in range(LAYERS)])
        self.out = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(LAYERS)])
        ticks = ((Step(1, commits=True), Step(1)),)  # what a tick runs at most: admission charges for that
        self.spec = KVSpec(LAYERS, HEADS, DIM // HEADS, Window(TOKENS, window=8, policy="slide"), ("video",), ticks)
        self.card = ModelCard("own", f"{LAYERS} layers, width {DIM}", 0, window_chunks=8, facts={})

    def new_state(self, old: Seen = None) -> Seen:
        return None  # what was predicted last

    def fake_inputs(self, first: bool) -> Seen:
        return torch.zeros(TOKENS, DIM)

    def program(self, kv: KVState, state: Seen, inputs: Seen) -> Program[torch.Tensor, Seen]:
        if (seen := state if inputs is None else inputs) is None:
            raise ValueError("inputs: expected a frame on the first tick, got None")
        context, conditioning = kv.prepare("video", TOKENS, commit=True), kv.conditioning("video")
        yield Forward((Row(context, conditioning, 0, Frame(seen, kv.num_chunks, 0.0)),), "commit")
        frame = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(kv.num_chunks))
        context = kv.prepare("video", TOKENS, commit=False)
        for step in range(STEPS):
            noisy = Frame(frame, kv.num_chunks, 1 - step / STEPS)
            (velocity,) = yield Forward((Row(context, conditioning, 0, noisy),), "denoise")
            frame = frame - velocity / STEPS
        return Outcome(frame, frame)

    @torch.no_grad()
    def forward(self, cache: KVCache, rows: Sequence[Row[Frame]]) -> Sequence[torch.Tensor]:
        plan = cache.backend.plan(cache.storage, [row.activate() for row in rows])
        x = torch.cat([row.inputs.tokens + row.inputs.noise + 0.1 * row.inputs.number for row in rows])
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(x).view(len(x), 3, HEADS, -1).unbind(1)
            x = x + out(plan.run(layer, q, k, v).flatten(1))  # writes K and V, and attends to all that is visible
        return torch.split(x, TOKENS)

    def encode(self, encoder: str, payloads: Sequence[object]) -> Sequence[object]:
        raise NotImplementedError(encoder)  # it has none


if __name__ == "__main__":
    engine = start_engine(OwnModel(), EngineConfig(block_size=16), "cpu", torch.float32)
    sessions = [engine.open_session() for _ in range(2)]
    for number in range(3):  # the two share forwards
        for future in [engine.submit(session, torch.full((TOKENS, DIM), number + 0.5)) for session in sessions]:
            future.result()
    fork = engine.fork(sessions[0])  # no K/V is copied
    dreamed, seen = (engine.submit(*tick).result().result for tick in ((sessions[0], None), (fork, torch.zeros(4, 32))))
    dreamed, seen = (frame[0, :3].numpy().round(2) for frame in (dreamed, seen))  # of random weights: no meaning
    print(f"after its own prediction {dreamed}, after a black frame {seen}: the fork went its own way")
    print(f"rows of a forward -> forwards: {dict(engine.stats().rows_per_forward)}\n{engine.capacity().explain()}")
    engine.shutdown()
