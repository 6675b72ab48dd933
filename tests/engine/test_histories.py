"""Snapshots, restores and forks of sessions: zero-copy, exact, and charged when they are taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import make_engine, make_inputs, rest  # noqa: E402

from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.errors import AdmissionRefused, SnapshotNotFound  # noqa: E402


@pytest.fixture(params=["reset", "slide"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine("ti2v", block_size=16, window_policy=request.param, batch_invariant=True, max_sessions=6)
    yield engine
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0, "blocks leaked past shutdown"


def tick(engine: Engine, session: Any, seed: int, first: bool = False) -> Any:
    return engine.submit(session, make_inputs(engine, seed, 1 if first else 4)).result().result


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a.actions, b.actions)) and torch.equal(a.video_latents, b.video_latents)


@pytest.mark.parametrize("num_ticks_since", [1, 3, 6])
def test_after_a_restore_the_same_inputs_give_bit_identical_outputs(engine: Engine, num_ticks_since: int) -> None:
    session = engine.open_session()
    for i in range(3):
        tick(engine, session, i, first=i == 0)
    snapshot = engine.snapshot(session)
    first = [tick(engine, session, 10 + i) for i in range(num_ticks_since)]  # past the window's end, at last
    engine.restore(session, snapshot)
    again = [tick(engine, session, 10 + i) for i in range(num_ticks_since)]
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    engine.release(snapshot)
    engine.release(snapshot)


def test_a_snapshot_and_a_fork_copy_no_block(engine: Engine) -> None:
    session = engine.open_session()
    for i in range(3):
        tick(engine, session, i, first=i == 0)
    num_used = engine.core.cache.pool.num_used
    engine.snapshot(session)
    engine.fork(session)
    engine.fork(engine.snapshot(session))
    assert engine.core.cache.pool.num_used == num_used


def test_forks_run_batched_are_what_they_are_alone_and_leave_their_source_alone(engine: Engine) -> None:
    session = engine.open_session()
    for i in range(2):
        tick(engine, session, i, first=i == 0)
    forks = [engine.fork(session) for _ in range(3)]
    for depth in range(3):
        futures = [engine.submit(fork, make_inputs(engine, 100 * (i + 1) + depth)) for i, fork in enumerate(forks)]
        together = [future.result().result for future in futures]
    snapshot = engine.snapshot(session)
    for i in range(3):
        engine.restore(session, snapshot)
        for depth in range(3):
            alone = tick(engine, session, 100 * (i + 1) + depth)
        assert same(alone, together[i]), f"fork {i} depends on its company"


def test_a_history_is_frozen_rewound_or_forked_after_the_tick_in_flight(engine: Engine) -> None:
    session = engine.open_session()
    tick(engine, session, 0, first=True)
    future = engine.submit(session, make_inputs(engine, 1))
    snapshot = engine.snapshot(session)
    assert future.done(), "the snapshot did not wait"
    second = engine.submit(session, make_inputs(engine, 2))
    fork = engine.fork(session)
    assert second.done(), "the fork did not wait"
    third = engine.submit(session, make_inputs(engine, 3))
    engine.restore(session, snapshot)
    assert third.done(), "rewound under a running tick"
    again = tick(engine, session, 2)
    assert same(again, second.result().result), "the snapshot is not of the tick before it"
    assert same(tick(engine, session, 3), tick(engine, fork, 3)), "the fork is not of the tick before it"


def test_a_released_snapshot_says_so(engine: Engine) -> None:
    session = engine.open_session()
    tick(engine, session, 0, first=True)
    snapshot = engine.snapshot(session)
    engine.release(snapshot)
    rest(engine)
    with pytest.raises(SnapshotNotFound, match="released"):
        engine.restore(session, snapshot)
    with pytest.raises(SnapshotNotFound, match="released"):
        engine.fork(snapshot)
    assert engine.capacity().num_sessions == 1, "a failed fork stays open"


def test_snapshots_and_forks_are_charged_when_they_are_taken() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=2, park_when_full=False)
    session = engine.open_session()
    tick(engine, session, 0, first=True)
    charged = engine.capacity().num_charged
    fork = engine.fork(session)
    with pytest.raises(AdmissionRefused, match="another session"):
        engine.fork(session)
    with pytest.raises(AdmissionRefused, match="a snapshot"):
        engine.snapshot(session)
    engine.close(fork, "done")
    rest(engine)
    snapshot = engine.snapshot(session)
    assert engine.capacity().num_charged == charged + snapshot.num_blocks_charged
    assert "more sessions fit" in engine.capacity().explain()
    engine.shutdown()


def test_with_batch_invariant_company_changes_no_bit(engine: Engine) -> None:
    sessions = [engine.open_session() for _ in range(3)]
    for i in range(4):
        futures = [
            engine.submit(s, make_inputs(engine, 10 * n + i, 1 if i == 0 else 4)) for n, s in enumerate(sessions)
        ]
        together = [future.result().result for future in futures]
    for n in range(3):
        session = engine.open_session()
        for i in range(4):
            alone = tick(engine, session, 10 * n + i, first=i == 0)
        engine.close(session, "done")
        assert same(alone, together[n])
