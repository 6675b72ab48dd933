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
from worldkv.kv.footprint import Tick, chunks_committed, chunks_reached
from worldkv.kv.spec import KVSpec, Step
from worldkv.kv.state import KVState
from worldkv.kv.window import Window

BRANCH = "conditional"


@dataclass(frozen=True)
class Played:
    """One tick of a branch, as an engine runs it."""

    steps: Tick
    restarts: bool = False
    fails: bool = False


def observing(observed: int, drafted: int, num_draft_tokens: int = 25) -> Tick:
    """DreamZero's: what was observed is committed, then the next chunks are drafted, with actions."""
    return Step(observed, commits=True), Step(drafted, num_draft_tokens=num_draft_tokens)


def dreamzero_ticks(num_chunks: int, restart: int = 1, num_draft_tokens: int = 25) -> dict[str, Any]:
    return {
        "ticks": tuple(observing(n, num_chunks, num_draft_tokens) for n in range(1, num_chunks + 1)),
        "restarts": (observing(restart, num_chunks, num_draft_tokens),),
    }


def spec_of(chunk_size: int, window: int, sink: int, policy: str, **sizes: Any) -> KVSpec:
    return make_spec(chunk_size, window, sink, policy, num_layers=0, **sizes)


def play(cache: KVCache, state: KVState, tick: Played) -> int:
    """Run a tick and return the most blocks that were held while it ran; no K/V is written.

    Where it does not fit or nothing is there to follow, a restart runs instead, if the spec has one.
    """
    spec, size, steps = cache.spec, cache.spec.chunk_size, tick.steps
    history = state.branches[BRANCH].num_chunks
    is_full = spec.window.policy == "reset" and not spec.window.has_room(history, chunks_reached(steps))
    if is_full and not spec.restarts:
        return 0
    rollback, peak = state.snapshot(), 0
    if spec.restarts and (tick.restarts or is_full or history == 0):
        state.reset()
        steps = spec.restarts[0]
    for step in steps:
        for _ in range(1 if step.commits else 2):  # denoising steps
            num_tokens = step.num_chunks * size
            if step.rewrites:
                state.prepare_rewrite(BRANCH, num_tokens).activate()
            else:
                state.prepare(BRANCH, num_tokens, step.commits).activate(step.num_draft_tokens)
            peak = max(peak, cache.pool.num_used)
        state.commit(BRANCH)
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
        **dreamzero_ticks(num_chunks, restart, draw(st.sampled_from((0, 1, 9, 25, 70)))),
    )
    return spec, draw(st.sampled_from((4, 16, 64, 128)))


@given(specs(), st.data())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_no_sequence_of_ticks_holds_more_blocks_than_the_bound(sized: tuple[KVSpec, int], data: Any) -> None:
    spec, block_size = sized
    bound = spec.blocks_per_branch(block_size)
    cache = make_cache(spec, num_blocks=bound, block_size=block_size)  # OutOfBlocks would say that the bound is wrong
    state = cache.create_state((BRANCH,))
    num_chunks, num_draft_tokens = len(spec.ticks), spec.ticks[0][1].num_draft_tokens
    ticks = st.builds(
        Played,
        steps=st.builds(
            observing,
            observed=st.integers(1, num_chunks),
            # under `reset` the drafts are always whole: what they need is what the restart makes room for
            drafted=st.just(num_chunks) if spec.window.policy == "reset" else st.integers(1, num_chunks),
            num_draft_tokens=st.just(num_draft_tokens),
        ),
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
    spec = spec_of(chunk_size, 9, 0, policy, **dreamzero_ticks(2))
    bound = spec.blocks_per_branch(block_size)
    cache = make_cache(spec, num_blocks=bound, block_size=block_size)
    state = cache.create_state((BRANCH,))
    rollout = [Played(observing(2, 2)) for _ in range(40)]
    assert max(play(cache, state, tick) for tick in rollout) == bound == expected


def test_a_pool_one_block_smaller_than_the_bound_runs_out() -> None:
    spec = spec_of(880, 9, 0, "reset", **dreamzero_ticks(2))
    cache = make_cache(spec, num_blocks=spec.blocks_per_branch(128) - 1, block_size=128)
    state = cache.create_state((BRANCH,))
    ticks = [Played(observing(2, 2))] * 5  # the fifth finds the window full
    assert max(play(cache, state, tick) for tick in ticks[:4]) < 70
    with pytest.raises(OutOfBlocks, match="no room for 1785 tokens"):
        play(cache, state, ticks[4])


SELF_FORCING = (Step(3), Step(3, commits=True))  # denoised, then written again as it is to be read


@pytest.mark.parametrize(
    ("window", "sink", "policy", "expected"),
    [
        (21, 0, "slide", 256 + 38),  # the full ring, and the blocks that three frames touch once more
        (9, 3, "slide", 147 + 38),
        (
            21,
            0,
            "reset",
            256 + 1,
        ),  # the last tick fills the window and copies the block that it shares with the history
    ],
)
def test_a_tick_that_drafts_its_chunks_and_then_commits_them_is_charged_for_them_once(
    window: int, sink: int, policy: str, expected: int
) -> None:
    spec = spec_of(1560, window, sink, policy, ticks=(SELF_FORCING,))
    bound = spec.blocks_per_branch(128)
    cache = make_cache(spec, num_blocks=bound, block_size=128)
    state = cache.create_state((BRANCH,))
    assert max(play(cache, state, Played(SELF_FORCING)) for _ in range(40)) == bound == expected


@st.composite
def any_specs(draw: st.DrawFn) -> tuple[KVSpec, int]:
    steps = st.builds(Step, st.integers(1, 3), st.booleans(), st.sampled_from((0, 0, 1, 9)))
    tick = st.lists(steps, min_size=1, max_size=3).map(tuple)
    ticks = tuple(draw(st.lists(tick, min_size=1, max_size=2)))
    restarts = tuple(draw(st.lists(tick, max_size=2)))
    window = draw(st.integers(max(map(chunks_reached, ticks + restarts)), 11))
    sink, policy = draw(st.integers(0, 2)), draw(st.sampled_from(("reset", "slide")))
    spec = spec_of(draw(st.sampled_from((1, 6, 20))), window, sink, policy, ticks=ticks, restarts=restarts)
    return spec, draw(st.sampled_from((4, 16)))


@given(any_specs())
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_the_bound_is_the_most_that_any_sequence_of_ticks_holds(sized: tuple[KVSpec, int]) -> None:
    spec, block_size = sized
    window, slides = spec.window, spec.window.policy == "slide"
    cache = make_cache(spec, num_blocks=400, block_size=block_size)
    paths: dict[int, tuple[tuple[Tick, bool], ...]] = {0: ()}  # how to come to each length of history
    most, waiting = 0, [0]
    for length in waiting:
        for tick, restarts in [(t, True) for t in spec.restarts] + [(t, False) for t in spec.ticks]:
            if not restarts and not slides and not window.has_room(length, chunks_reached(tick)):
                continue
            state = cache.create_state((BRANCH,))
            for path in (*paths[length], (tick, restarts)):
                peak = play_as_it_is(cache, state, *path)
            most = max(most, peak)
            after = state.branches[BRANCH].num_chunks
            assert after == (0 if restarts else length) + chunks_committed(tick)
            if after not in paths and after <= window.max_chunks + 2 * window.window:
                paths[after] = (*paths[length], (tick, restarts))
                waiting.append(after)
            state.close()
    assert spec.blocks_per_branch(block_size) == most


def play_as_it_is(cache: KVCache, state: KVState, steps: Tick, restarts: bool) -> int:
    """A tick without a choice: it restarts or it does not."""
    rollback, peak = state.snapshot(), 0
    if restarts:
        state.reset()
    for step in steps:
        state.prepare(BRANCH, step.num_chunks * cache.spec.chunk_size, step.commits).activate(step.num_draft_tokens)
        peak = max(peak, cache.pool.num_used)
        state.commit(BRANCH)
    state.abandon()
    rollback.release()
    return peak


@pytest.mark.parametrize(
    ("window", "ticks", "restarts", "message"),
    [
        (Window(4, 2), ((Step(3),),), (), r"ticks: expected forwards of 1 to 2 chunks \(the window\), got 3"),
        (Window(4, 2), ((Step(1),),), ((Step(3),),), r"restarts: expected forwards of 1 to 2 chunks .*, got 3"),
        (Window(4, 2), (), (), "ticks: expected at least one kind of tick, got none"),
        (Window(4, 2), ((),), (), "ticks: expected at least one forward in each tick, got none"),
        (
            Window(4, 3, policy="reset"),
            (observing(2, 2),),
            (observing(2, 2),),
            "restarts: a tick of 4 chunks does not fit an empty window of 3; expected a larger window",
        ),
        (
            Window(4, 3, policy="reset"),
            (observing(2, 2),),
            (),
            "ticks: a tick of 4 chunks does not fit an empty window",
        ),
    ],
)
def test_ticks_that_no_window_has_room_for_are_refused(
    window: Window, ticks: tuple[Tick, ...], restarts: tuple[Tick, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KVSpec(1, 1, 1, window, (BRANCH,), ticks, restarts)


def test_under_reset_a_tick_that_never_fits_is_no_error_where_a_restart_takes_its_place() -> None:
    spec = spec_of(4, 3, 0, "reset", ticks=(observing(2, 2),), restarts=(observing(1, 2),))
    assert spec.blocks_per_branch(4) == spec_of(
        4, 3, 0, "reset", ticks=(observing(1, 2),), restarts=(observing(1, 2),)
    ).blocks_per_branch(4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_chunks": 0}, "num_chunks: expected at least 1, got 0"),
        ({"num_chunks": 1, "num_draft_tokens": -1}, "num_draft_tokens: expected 0 or more, got -1"),
    ],
)
def test_a_step_without_a_chunk_or_with_less_than_no_tokens_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Step(**sizes)


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


def rewriting(num_rewritten: int, num_chunks: int) -> Tick:
    """Causal video's, after another prompt: history is computed anew, then a block is drafted and committed."""
    return Step(num_rewritten, commits=True, rewrites=True), Step(num_chunks), Step(num_chunks, commits=True)


@given(
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(0, 3),
    st.sampled_from((4, 16, 64)),
    st.booleans(),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_ticks_that_rewrite_history_stay_within_the_bound_and_reach_it(
    chunk_size: int, num_chunks: int, more: int, sink: int, block_size: int, reads_copy: bool
) -> None:
    window = num_chunks + more
    ticks = (rewriting(window + sink, num_chunks), rewriting(window + sink, num_chunks)[1:])
    spec = spec_of(chunk_size, window, sink, "slide", ticks=ticks, reads_copy=reads_copy)
    bound, peak = spec.blocks_per_branch(block_size), 0
    cache = make_cache(spec, num_blocks=bound, block_size=block_size)
    for stride in range(1, 4):  # how often history is rewritten
        state = cache.create_state((BRANCH,))
        for number in range(2 * (window + sink) + 2):
            history = state.branches[BRANCH].num_chunks
            steps = ticks[1]
            if history and number % stride == 0:
                steps = rewriting(min(history, window + sink), num_chunks)
            peak = max(peak, play(cache, state, Played(steps)))
        state.close()
    assert peak == bound


def test_a_step_that_rewrites_commits_and_fits_the_window() -> None:
    with pytest.raises(ValueError, match="rewrites: expected a step that commits"):
        Step(1, rewrites=True)
    with pytest.raises(ValueError, match="ticks: expected to rewrite 4 chunks at most"):
        spec_of(6, 3, 1, "slide", ticks=(rewriting(5, 1),))
    with pytest.raises(ValueError, match="ticks: expected no draft tokens where forwards read a copy"):
        spec_of(6, 3, 1, "slide", ticks=((Step(1, num_draft_tokens=2),),), reads_copy=True)
