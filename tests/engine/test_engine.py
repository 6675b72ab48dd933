"""The engine: many sessions at once, failures that change nothing, ends that give everything back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import inside, make_engine, make_inputs, pause, rest  # noqa: E402

from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.errors import (  # noqa: E402
    AdmissionRefused,
    BadRequest,
    EngineStopped,
    SessionBusy,
    SessionEnded,
    SessionNotFound,
)
from worldkv.kv.branch import ForwardContext  # noqa: E402
from worldkv.kv.transfer import ResumeJob  # noqa: E402


@pytest.fixture(params=["ti2v", "i2v"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine(request.param, block_size=16)
    yield engine
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0, "blocks leaked past shutdown"


def frames_of(tick: int) -> int:
    return 1 if tick == 0 else 4


def run_alone(engine: Engine, seed: int, num_ticks: int) -> list[Any]:
    session = engine.open_session()
    results = [
        engine.submit(session, make_inputs(engine, seed + t, frames_of(t))).result().result for t in range(num_ticks)
    ]
    engine.close(session, "done")
    return results


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a.actions, b.actions)) and torch.equal(a.video_latents, b.video_latents)


def close_to(a: Any, b: Any) -> bool:
    return torch.allclose(a.video_latents, b.video_latents, rtol=1e-4, atol=1e-5)


def test_a_rollout_passes_its_window_and_restarts_with_the_reason(engine: Engine) -> None:
    reasons = [result.restart_reason for result in run_alone(engine, 0, 6)]
    assert reasons == ["first tick", None, None, None, "window full", None]


def test_a_session_repeats_bit_for_bit(engine: Engine) -> None:
    first, second = run_alone(engine, 3, 3), run_alone(engine, 3, 3)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))


def test_sessions_ticking_at_once_get_what_they_get_alone(engine: Engine) -> None:
    alone = [run_alone(engine, 100 * i, 6) for i in range(3)]
    sessions = [engine.open_session() for _ in range(3)]
    for tick in range(6):
        inputs = [make_inputs(engine, 100 * i + tick, frames_of(tick)) for i in range(3)]
        futures = [engine.submit(s, x) for s, x in zip(sessions, inputs, strict=True)]
        for i, future in enumerate(futures):
            assert close_to(future.result().result, alone[i][tick]), (
                f"session {i} depends on its company at tick {tick}"
            )


def test_sessions_at_different_fills_share_forwards(engine: Engine) -> None:
    sizes: list[int] = []
    forward = engine.model.forward

    def counted(cache: Any, rows: Any) -> Any:
        sizes.append(len(rows))
        return forward(cache, rows)

    engine.model.forward = counted
    old, new = engine.open_session(), engine.open_session()
    for tick in range(2):
        engine.submit(old, make_inputs(engine, tick, frames_of(tick))).result()
    engine.submit(new, make_inputs(engine, 8, 1)).result()
    go_on = pause(engine)  # so that both begin at once
    futures = [engine.submit(old, make_inputs(engine, 2)), engine.submit(new, make_inputs(engine, 9))]
    go_on.set()
    for future in futures:
        future.result()
    assert max(sizes) == 4, "two ticks in flight never shared a forward"


@pytest.mark.parametrize("failing_call", range(10))
def test_a_tick_that_fails_at_any_forward_changes_nothing_and_its_retry_is_identical(failing_call: int) -> None:
    engine = make_engine("ti2v", block_size=16)
    expected = run_alone(engine, 50, 3)
    session = engine.open_session()
    for tick in range(2):
        engine.submit(session, make_inputs(engine, 50 + tick, frames_of(tick))).result()
    before = [
        tuple(t.clone() for t in inside(engine, session).kv.layer_kv(b, 0)) for b in inside(engine, session).kv.branches
    ]
    num_free = engine.core.cache.pool.num_free
    forward, calls = engine.model.forward, iter(range(100))

    def failing(cache: Any, rows: Any) -> Any:
        outputs = forward(cache, rows)
        if next(calls) == failing_call:
            raise RuntimeError("injected")
        return outputs

    engine.model.forward = failing
    if failing_call < 9:  # one clean pass and eight denoising forwards
        with pytest.raises(RuntimeError, match="injected"):
            engine.submit(session, make_inputs(engine, 52)).result()
        assert engine.core.cache.pool.num_free == num_free, "a failed tick kept blocks"
        for branch, (k, v) in zip(inside(engine, session).kv.branches, before, strict=True):
            k_now, v_now = inside(engine, session).kv.layer_kv(branch, 0)
            assert torch.equal(k, k_now), "a failed tick changed committed keys"
            assert torch.equal(v, v_now), "a failed tick changed committed values"
    engine.model.forward = forward
    assert same(engine.submit(session, make_inputs(engine, 52)).result().result, expected[2])
    engine.shutdown()
    assert engine.core.cache.pool.num_used == 0


@pytest.mark.parametrize("encoder", ["text", "image", "video"])
def test_a_tick_that_fails_in_an_encoder_changes_nothing(engine: Engine, encoder: str) -> None:
    session = engine.open_session()
    engine.submit(session, make_inputs(engine, 0, 1)).result()
    num_free, original = engine.core.cache.pool.num_free, engine.model.encode

    def failing(name: str, payloads: Any) -> Any:
        if name == encoder:
            raise RuntimeError("injected")
        return original(name, payloads)

    engine.model.encode = failing
    with pytest.raises(RuntimeError, match="injected"):  # a new prompt and a new image use all three
        engine.submit(session, make_inputs(engine, 1, 1, prompt=3)).result()
    engine.model.encode = original
    assert engine.core.cache.pool.num_free == num_free
    assert engine.submit(session, make_inputs(engine, 2, 4)).result().result.restart_reason is None, (
        "the old prompt was lost"
    )


@pytest.mark.parametrize("step", [0, 7, 15])
def test_a_tick_that_fails_in_the_solver_changes_nothing_and_its_retry_is_identical(
    engine: Engine, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_alone(engine, 60, 2)
    session, other = engine.open_session(), engine.open_session()
    engine.submit(session, make_inputs(engine, 60, 1)).result()
    schedule, calls = engine.model.video_schedule, iter(range(1000))
    advance = type(schedule).step

    def failing(self: Any, index: int, *rest: Any) -> Any:
        if index == step and next(calls) == 0:
            raise RuntimeError("injected")
        return advance(self, index, *rest)

    num_free = engine.core.cache.pool.num_free
    with monkeypatch.context() as patch:
        patch.setattr(type(schedule), "step", failing)
        with pytest.raises(RuntimeError, match="injected"):
            engine.submit(session, make_inputs(engine, 61)).result()
        assert engine.core.cache.pool.num_free == num_free, "a failed tick kept blocks"
        assert same(engine.submit(session, make_inputs(engine, 61)).result().result, expected[1])
    assert same(engine.submit(other, make_inputs(engine, 60, 1)).result().result, expected[0])


def test_a_failing_session_does_not_disturb_its_company(engine: Engine) -> None:
    alone = run_alone(engine, 7, 2)
    good, bad = engine.open_session(), engine.open_session()
    branches = inside(engine, bad).kv.branches.values()
    engine.submit(good, make_inputs(engine, 7, 1)).result()
    engine.submit(bad, make_inputs(engine, 8, 1)).result()
    forward = engine.model.forward

    def failing(cache: Any, rows: Any) -> Any:
        if any(row.context.branch in branches for row in rows):
            raise RuntimeError("injected")
        return forward(cache, rows)

    engine.model.forward = failing
    doomed = engine.submit(bad, make_inputs(engine, 9))
    fine = engine.submit(good, make_inputs(engine, 8))
    with pytest.raises(RuntimeError, match="injected"):
        doomed.result()
    assert close_to(fine.result().result, alone[1])


def test_reset_and_close_during_a_tick_cancel_it_and_give_its_blocks_back(engine: Engine) -> None:
    entered, go_on = threading.Event(), threading.Event()
    forward = engine.model.forward

    def slow(cache: Any, rows: Any) -> Any:
        entered.set()
        go_on.wait(10)
        return forward(cache, rows)

    for end in (engine.reset, lambda session: engine.close(session, "test")):
        session = engine.open_session()
        entered.clear(), go_on.clear()
        engine.model.forward = slow
        future = engine.submit(session, make_inputs(engine, 0, 1))
        assert entered.wait(10)
        second = engine.submit(session, make_inputs(engine, 0, 1))
        end(session)
        go_on.set()
        with pytest.raises(SessionBusy):
            second.result()
        with pytest.raises(SessionEnded):
            future.result()
        engine.model.forward = forward
        rest(engine)  # the errand after the cancelled tick
        assert engine.core.cache.pool.num_used == 0


def test_after_a_reset_the_next_tick_is_a_first_tick(engine: Engine) -> None:
    expected = run_alone(engine, 20, 1)
    session = engine.open_session()
    for tick in range(2):
        engine.submit(session, make_inputs(engine, tick, frames_of(tick))).result()
    engine.reset(session)
    result = engine.submit(session, make_inputs(engine, 20, 1)).result().result
    assert result.restart_reason == "first tick"
    assert same(result, expected[0])


def test_a_session_has_forgotten_as_soon_as_it_is_told_to(engine: Engine) -> None:
    session = engine.open_session()
    engine.submit(session, make_inputs(engine, 0, 1)).result()
    assert engine.describe(session).num_chunks == 1
    held = pause(engine)
    forgotten = engine.reset(session)
    held.set()
    forgotten.result()
    assert engine.describe(session).num_chunks == 0
    engine.submit(session, make_inputs(engine, 0, 1)).result()
    assert engine.describe(session).num_chunks == 1


def test_a_prompt_change_restarts_the_window_and_equal_conditioning_is_stored_once(engine: Engine) -> None:
    first, second = engine.open_session(), engine.open_session()
    engine.submit(first, make_inputs(engine, 0, 1)).result()
    engine.submit(second, make_inputs(engine, 0, 1)).result()
    assert len(engine.core.cache.conditioning) == 3, "prompt, negative prompt and image are the same for both sessions"
    result = engine.submit(first, make_inputs(engine, 1, 4, prompt=2)).result().result
    assert result.restart_reason == "prompt changed"
    engine.close(first, "done")
    engine.close(second, "done")
    rest(engine)
    assert len(engine.core.cache.conditioning) == 0


def test_the_frame_index_passes_1024_in_a_sliding_window() -> None:
    engine = make_engine("ti2v", block_size=16, window_policy="slide")
    session = engine.open_session()
    engine.submit(session, make_inputs(engine, 0, 1)).result()
    for branch in inside(engine, session).kv.branches.values():
        branch.num_chunks = 1 + 9 * 200  # as if 200 windows had passed; the ring's content stays valid to read
        branch.table.release()
        branch.table.blocks = engine.core.cache.pool.allocate(-(-9 * branch.window.chunk_size // 16)) or []
    results = [engine.submit(session, make_inputs(engine, tick)).result().result for tick in range(3)]
    assert [result.start_frame for result in results] == [1803, 1805, 1807]
    assert all(np.isfinite(result.actions).all() for result in results)
    engine.shutdown()


def test_opening_one_session_too_many_is_refused_with_the_sum() -> None:
    engine = make_engine("ti2v", max_sessions=2, park_when_full=False)
    sessions = [engine.open_session() for _ in range(2)]
    with pytest.raises(AdmissionRefused, match=r"needs \d+ blocks"):
        engine.open_session()
    engine.close(sessions[0], "make room")
    engine.open_session()
    engine.shutdown()


def test_a_full_house_of_sessions_never_runs_out_of_blocks() -> None:
    engine = make_engine("ti2v", max_sessions=3, block_size=16)
    sessions = [engine.open_session() for _ in range(3)]
    for tick in range(7):
        futures = [
            engine.submit(s, make_inputs(engine, 10 * tick + i, frames_of(tick % 6), prompt=tick // 3 + i))
            for i, s in enumerate(sessions)
        ]
        for future in futures:
            future.result()
    engine.shutdown()


def test_wrong_inputs_name_the_field(engine: Engine) -> None:
    session = engine.open_session()
    good = make_inputs(engine, 0, 1)
    with pytest.raises(BadRequest, match="frames"):
        engine.submit(session, make_inputs(engine, 0, 3)).result()
    with pytest.raises(BadRequest, match="noise"):
        engine.submit(session, make_inputs(engine, 0, 1, noise_video=torch.zeros(1, 2))).result()
    assert engine.submit(session, good).result().result.restart_reason == "first tick"


def test_closed_sessions_and_a_stopped_engine_say_so(engine: Engine) -> None:
    session = engine.open_session("robot")
    with pytest.raises(BadRequest, match="robot"):
        engine.open_session("robot")
    engine.close(session, "idle too long")
    engine.close(session, "again")
    with pytest.raises(SessionNotFound, match="idle too long"):
        engine.submit(session, make_inputs(engine, 0, 1)).result()
    assert engine.health().ready
    engine.shutdown()
    engine.shutdown()
    assert not engine.health().ready
    with pytest.raises(EngineStopped):
        engine.open_session()


def test_two_engines_live_in_one_process() -> None:
    one, two = make_engine("ti2v"), make_engine("i2v")
    futures = [e.submit(e.open_session(), make_inputs(e, 1, 1)) for e in (one, two)]
    assert all(np.isfinite(future.result().result.actions).all() for future in futures)
    one.shutdown()
    assert two.health().ready
    two.shutdown()


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_commit_that_fails_in_company_fails_its_own_tick_only(guilty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("ti2v", block_size=16, batch_invariant=True)
    expected = [run_alone(engine, 10 * i, 3) for i in range(2)]
    sessions = [engine.open_session() for _ in range(2)]
    for tick in range(2):
        for i, session in enumerate(sessions):
            engine.submit(session, make_inputs(engine, 10 * i + tick, frames_of(tick))).result()
    doomed = inside(engine, sessions[guilty]).kv.branches["unconditional"]
    commit = ForwardContext.commit

    def failing(context: ForwardContext) -> None:
        if context.branch is doomed:
            raise RuntimeError("injected")
        commit(context)

    monkeypatch.setattr(ForwardContext, "commit", failing)
    futures = [engine.submit(s, make_inputs(engine, 10 * i + 2)) for i, s in enumerate(sessions)]
    with pytest.raises(RuntimeError, match="injected"):
        futures[guilty].result()
    assert same(futures[1 - guilty].result().result, expected[1 - guilty][2])
    monkeypatch.undo()
    retried = engine.submit(sessions[guilty], make_inputs(engine, 10 * guilty + 2)).result().result
    assert same(retried, expected[guilty][2])
    engine.shutdown()
    assert engine.core.cache.pool.num_used == 0


def test_a_session_that_cannot_come_back_from_the_host_stays_parked_and_can_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("ti2v", block_size=16)
    expected = run_alone(engine, 0, 3)
    session = engine.open_session()
    for tick in range(2):
        engine.submit(session, make_inputs(engine, tick, frames_of(tick))).result()
    engine.park(session)
    monkeypatch.setattr(ResumeJob, "copy", lambda _: (_ for _ in ()).throw(RuntimeError("injected")))
    with pytest.raises(RuntimeError, match="injected"):
        engine.submit(session, make_inputs(engine, 2)).result()
    assert engine.core.cache.pool.num_used == 0
    monkeypatch.undo()
    assert same(engine.submit(session, make_inputs(engine, 2)).result().result, expected[2])
    engine.shutdown()


def test_a_stuck_engine_is_unready_refuses_work_and_recovers() -> None:
    engine = make_engine("ti2v", stuck_after_s=0.05)
    session, go_on, entered = engine.open_session(), threading.Event(), threading.Event()
    idle = engine.open_session()
    forward = engine.model.forward

    def stuck(cache: Any, rows: Any) -> Any:
        entered.set()
        go_on.wait(10)
        return forward(cache, rows)

    engine.model.forward = stuck
    future = engine.submit(session, make_inputs(engine, 0, 1))
    assert entered.wait(10)
    with pytest.raises(EngineStopped, match="stuck"):
        engine.snapshot(idle)  # asked for before anybody could know
    assert not engine.health().ready
    assert "stuck" in engine.health().reason
    with pytest.raises(EngineStopped, match="stuck"):
        engine.open_session()
    go_on.set()
    future.result()
    engine.model.forward = forward
    assert engine.health().ready
    charged = engine.capacity().num_charged
    engine.release(engine.snapshot(idle))
    rest(engine)
    assert engine.capacity().num_charged == charged, "the snapshot that was given up was taken after all"
    engine.shutdown()


def test_stats_count_forwards_by_rows_and_conditioning_by_hits(engine: Engine) -> None:
    sessions = [engine.open_session() for _ in range(2)]
    for session in sessions:
        engine.submit(session, make_inputs(engine, 0, 1)).result()
    fork = engine.fork(sessions[0])
    engine.park(sessions[1])
    stats = engine.stats()
    assert stats.rows_per_forward == {2: 18}
    assert (stats.conditioning_misses, stats.conditioning_hits) == (3, 3), "the second session finds all three stored"
    assert (stats.num_sessions, stats.num_parked, stats.num_ticks_in_flight) == (3, 1, 0)
    assert 0 < stats.blocks_shared <= stats.blocks_used
    engine.close(fork, "done")
