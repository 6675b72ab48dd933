"""What a session costs: the bound on a branch's blocks is never exceeded, and it is reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_storage import make_cache, make_spec

from worldkv.errors import OutOfBlocks
from worldkv.kv.cache import KVCache
from worldkv.kv.spec import KVSpec
from worldkv.kv.state import KVState

BRANCH = "conditional"


@dataclass(frozen=True)
class Tick:
    """One tick of a branch, as an engine runs it."""

    observed: int
    drafted: int
    restarts: bool = False
    fails: bool = False


def spec_of(chunk_size: int, window: int, sink: int, policy: str, **sizes: int) -> KVSpec:
    return make_spec(chunk_size, window, sink, policy, num_layers=0, **sizes)


def play(cache: KVCache, state: KVState, tick: Tick) -> int:
    """Run a tick and return the most blocks that were held while it ran; no K/V is written."""
    spec, size = cache.spec, cache.spec.chunk_size
    history = state.branches[BRANCH].num_chunks
    is_full = spec.window.policy == "reset" and not spec.window.has_room(history, tick.observed + tick.drafted)
    rollback = state.snapshot()
    observed = tick.observed
    if tick.restarts or is_full or history == 0:
        state.reset()
        observed = spec.restart_chunks
    state.prepare(BRANCH, observed * size, commit=True).activate()
    peak = cache.pool.num_used
    state.commit(BRANCH)
    for _ in range(2):  # denoising steps
        state.prepare(BRANCH, tick.drafted * size, commit=False).activate(spec.max_draft_tokens)
        peak = max(peak, cache.pool.num_used)
    state.abandon()
    if tick.fails:
        state.restore(rollback)
    rollback.release()
    cache.pool.check()
    return peak


@st.composite
def specs(draw: st.DrawFn) -> tuple[KVSpec, int]:
    policy = draw(st.sampled_from(("reset", "slide")))
    restart, num_chunks, sink = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    smallest = max(restart, num_chunks, restart + num_chunks - sink if policy == "reset" else 1)
    window = draw(st.integers(smallest, smallest + 6))
    spec = spec_of(
        draw(st.sampled_from((1, 6, 16, 20, 24, 32, 50, 220))),
        window,
        sink,
        policy,
        max_chunks_per_forward=num_chunks,
        max_draft_tokens=draw(st.sampled_from((0, 1, 9, 25, 70))),
        restart_chunks=restart,
    )
    return spec, draw(st.sampled_from((4, 16, 64, 128)))


@given(specs(), st.data())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_no_sequence_of_ticks_holds_more_blocks_than_the_bound(sized: tuple[KVSpec, int], data: Any) -> None:
    spec, block_size = sized
    bound = spec.blocks_per_branch(block_size)
    cache = make_cache(spec, num_blocks=bound, block_size=block_size)  # OutOfBlocks would say that the bound is wrong
    state = cache.create_state((BRANCH,))
    num_chunks = spec.max_chunks_per_forward
    ticks = st.builds(
        Tick,
        observed=st.integers(1, num_chunks),
        # under `reset` the drafts are always whole: what they need is what the restart makes room for
        drafted=st.just(num_chunks) if spec.window.policy == "reset" else st.integers(1, num_chunks),
        restarts=st.sampled_from((False, False, False, True)),
        fails=st.booleans(),
    )
    for tick in data.draw(st.lists(ticks, min_size=1, max_size=25)):
        assert play(cache, state, tick) <= bound
    state.close()
    assert cache.pool.num_used == 0


@pytest.mark.parametrize(
    ("policy", "chunk_size", "block_size", "expected"),
    [
        ("reset", 880, 128, 70),  # the 14B: 49 blocks of 7 frames to roll back to, 21 of the window that restarts
        ("reset", 50, 128, 5),  # the 5B
        ("reset", 50, 16, 33),
        ("reset", 64, 128, 6),
        ("slide", 880, 128, 94),
        ("slide", 50, 128, 9),
        ("slide", 6, 16, 10),
    ],
)
def test_the_bound_is_reached_by_a_rollout_of_dreamzero_s_window(
    policy: str, chunk_size: int, block_size: int, expected: int
) -> None:
    spec = spec_of(chunk_size, 9, 0, policy, max_chunks_per_forward=2, max_draft_tokens=25)
    bound = spec.blocks_per_branch(block_size)
    cache = make_cache(spec, num_blocks=bound, block_size=block_size)
    state = cache.create_state((BRANCH,))
    rollout = [Tick(observed=2, drafted=2) for _ in range(40)]
    assert max(play(cache, state, tick) for tick in rollout) == bound == expected


def test_a_pool_one_block_smaller_than_the_bound_runs_out() -> None:
    spec = spec_of(880, 9, 0, "reset", max_chunks_per_forward=2, max_draft_tokens=25)
    cache = make_cache(spec, num_blocks=spec.blocks_per_branch(128) - 1, block_size=128)
    state = cache.create_state((BRANCH,))
    ticks = [Tick(observed=2, drafted=2)] * 5  # the fifth finds the window full
    assert max(play(cache, state, tick) for tick in ticks[:4]) < 70
    with pytest.raises(OutOfBlocks, match="no room for 1785 tokens"):
        play(cache, state, ticks[4])


def test_bytes_count_k_and_v_of_every_layer_and_head() -> None:
    spec = KVSpec(40, 40, 128, make_spec(880, 9, policy="reset").window, ("conditional", "unconditional"))
    assert spec.bytes_per_token(element_size=2) == 2 * 40 * 40 * 128 * 2
    assert spec.bytes_per_block(128, element_size=2) == 128 * spec.bytes_per_token(2)


def test_conditioning_costs_whole_blocks_twice_for_what_a_tick_replaces_and_once_for_what_all_share() -> None:
    branches = len(make_spec().branches)
    own = make_spec(conditioning={"text": 512, "image": 257})
    assert own.blocks_of_conditioning(128) == 2 * branches * (4 + 3)
    shared = make_spec(
        conditioning={"text": 512, "image": 257},
        entries_per_session={"text": 1, "image": 1},
        entries_shared={"text": 1},
    )
    assert shared.blocks_of_conditioning(128) == 2 * (4 + 3)
    assert (own.blocks_shared(128), shared.blocks_shared(128)) == (0, 4)
    session = branches * shared.blocks_per_branch(128) + shared.blocks_of_conditioning(128)
    assert shared.blocks_per_session(128) == session
