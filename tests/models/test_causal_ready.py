"""What causal video makes before it is ready is all that its sessions come to ask for."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from causal import make_engine, make_request  # noqa: E402

from worldkv.models.causal_wan.inputs import BlockRequest  # noqa: E402
from worldkv.models.causal_wan.random import TINY  # noqa: E402
from worldkv.models.causal_wan.ready import _capture_forward, recached_frames  # noqa: E402
from worldkv.models.wan.fused import FusedBlocks  # noqa: E402
from worldkv.models.wan.ready import sizes_up_to  # noqa: E402

FRAMEWISE = replace(TINY, frames_per_block=1, window_frames=5, sink_frames=1)
KINDS = {
    "chunks": TINY,
    "chunks, relative": replace(TINY, rope="relative"),
    "chunks, window of no whole blocks": replace(TINY, window_frames=8, sink_frames=2),
    "frames": FRAMEWISE,
    "frames, relative": replace(FRAMEWISE, rope="relative"),
}
FRAME = 6  # tokens


@pytest.mark.parametrize("kind", KINDS)
def test_every_forward_has_a_shape_that_was_made(kind: str) -> None:
    settings = KINDS[kind]
    engine = make_engine(settings, decodes=False, max_sessions=5, max_rows=5)
    network, plans = engine.model.network, engine.model.network.plans
    came: set[tuple[int, int]] = set()  # rows, tokens of each

    def watched(cache: Any, history: Any, *more: Any) -> Any:
        tokens = {row.num_queries for row in history}
        assert len(tokens) == 1, "rows of different lengths need a plan for every mixture"
        came.add((len(history), *tokens))
        return plans(cache, history, *more)

    network.plans = watched
    per_block = settings.frames_per_block
    expected = {(rows, FRAME * per_block) for rows in range(1, 6)}
    expected |= {(1, FRAME * frames) for frames in recached_frames(network)}
    dice = np.random.default_rng(0)
    sessions = [engine.open_session() for _ in range(5)]
    requests = [make_request(seed=number) for number in range(5)]
    given = torch.randn(1, 16, 2 * per_block, 4, 6)
    requests[0] = replace(requests[0], given=given)
    for number in range(2 * network.config.blocks.held_frames // per_block):
        futures = [engine.submit(*pair) for pair in zip(sessions, requests, strict=True)]
        for future in futures:
            future.result()
        prompts = [(int(dice.integers(3)), str(dice.choice(["recache", "keep"]))) for _ in sessions[1:]]
        requests = [make_request(prompt, switch=switch) for prompt, switch in [*prompts, (number % 2, "recache")]]
    engine.shutdown()
    assert came <= expected
    assert came >= {(1, FRAME * frames) for frames in recached_frames(network)}


@pytest.mark.parametrize("kind", ["chunks", "chunks, relative"])
@pytest.mark.parametrize("frames", [3, 9])
def test_what_is_run_to_make_it_touches_no_page(kind: str, frames: int) -> None:
    engine = make_engine(KINDS[kind], decodes=False)
    network, cache = engine.model.network, engine.core.cache
    ran: list[int] = []

    class Blocks(FusedBlocks):
        """As the graphs' own, which need a GPU."""

        @contextmanager
        def preparing(self, num_levels: int) -> Any:
            ran.append(num_levels)
            yield

    network.dit.run_blocks = Blocks(network.dit)
    before = [tensor.clone() for tensor in (*cache.storage.k, *cache.storage.v)]
    engine.inspect(lambda core: _capture_forward(network, network.dit.run_blocks, cache, frames, 2))
    assert ran == [2]
    assert all(torch.equal(*pair) for pair in zip(before, (*cache.storage.k, *cache.storage.v), strict=True))
    engine.shutdown()


def test_the_next_size_is_never_far() -> None:
    for most in range(1, 70):
        sizes = sizes_up_to(most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
        for wanted in range(1, most + 1):
            assert next(size for size in sizes if size >= wanted) <= 1.25 * wanted + 1


def test_on_a_cpu_nothing_is_made() -> None:
    engine = make_engine()
    assert engine._ready_steps() == []
    assert isinstance(engine.model.fake_inputs(first=True), BlockRequest)
    engine.shutdown()
