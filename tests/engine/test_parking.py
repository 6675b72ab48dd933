"""Idle sessions on the host: bit for bit the same afterwards, by call, under pressure, and after a while."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import inside, make_engine, make_inputs  # noqa: E402
from server_fakes import eventually  # noqa: E402
from toy_model import ToyInputs, ToyModel, make_toy_engine  # noqa: E402

from worldkv.engine import residency  # noqa: E402
from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.errors import AdmissionRefused, EngineStopped, SessionEnded  # noqa: E402


def ticks(engine: Engine, session: Any, first: int, count: int) -> list[Any]:
    return [
        engine.submit(session, make_inputs(engine, seed, 1 if seed == 0 else 4)).result().result
        for seed in range(first, first + count)
    ]


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a.actions, b.actions)) and torch.equal(a.video_latents, b.video_latents)


@pytest.mark.parametrize("policy", ["reset", "slide"])
def test_a_parked_session_holds_no_block_and_goes_on_bit_for_bit(policy: str) -> None:
    engine = make_engine("ti2v", block_size=16, window_policy=policy)
    expected = ticks(engine, engine.open_session(), 0, 7)
    engine.close(next(iter(engine.core.sessions)), "done")
    session = engine.open_session()
    got = []
    for seed in range(7):
        got += ticks(engine, session, seed, 1)
        engine.park(session)
        engine.park(session)
        assert engine.core.cache.pool.num_used == 0
        assert engine.capacity().num_charged == engine.capacity().blocks_shared
    assert all(same(a, b) for a, b in zip(expected, got, strict=True))
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0


def test_more_sessions_than_fit_take_turns_on_the_host() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=2)
    sessions = [engine.open_session() for _ in range(5)]
    rounds = [[ticks(engine, session, seed, 1)[0] for session in sessions] for seed in range(3)]
    for results in rounds:
        assert all(same(results[0], result) for result in results), "parking changed a session's result"
    engine.shutdown()
    assert engine.core.cache.pool.num_used == 0


def test_a_busy_session_is_never_parked() -> None:
    engine = make_engine("ti2v", max_sessions=1)
    session = engine.open_session()
    future = engine.submit(session, make_inputs(engine, 0, 1))
    with pytest.raises(AdmissionRefused):
        engine.open_session()
    assert future.result().result.restart_reason == "first tick"
    engine.open_session()
    assert engine.describe(session).parked
    engine.shutdown()


def test_an_idle_session_is_parked_after_a_while() -> None:
    engine = make_engine("ti2v", park_after_s=0.05)
    session = engine.open_session()
    ticks(engine, session, 0, 1)
    deadline = time.monotonic() + 10
    while not engine.describe(session).parked and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine.describe(session).parked
    assert engine.describe(session).bytes_parked > 0
    assert ticks(engine, session, 1, 1)[0].restart_reason is None
    engine.shutdown()


def test_a_parked_session_can_be_frozen_forked_reset_and_closed() -> None:
    engine = make_engine("ti2v", block_size=16)
    session = engine.open_session()
    ticks(engine, session, 0, 2)
    engine.park(session)
    snapshot = engine.snapshot(session)
    first = ticks(engine, session, 5, 1)[0]
    engine.park(session)
    fork = engine.fork(snapshot)
    assert same(ticks(engine, fork, 5, 1)[0], first)
    engine.park(fork)
    engine.restore(fork, snapshot)
    assert same(ticks(engine, fork, 5, 1)[0], first)
    engine.park(fork)
    child = engine.fork(fork)
    assert same(ticks(engine, child, 6, 1)[0], ticks(engine, fork, 6, 1)[0])
    engine.park(child)
    engine.reset(child)
    assert ticks(engine, child, 0, 1)[0].restart_reason == "first tick"
    engine.park(child)
    engine.close(child, "done")
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0


def test_forking_in_a_full_house_parks_others_but_not_the_source() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=2)
    source, other = engine.open_session(), engine.open_session()
    ticks(engine, other, 0, 1)
    ticks(engine, source, 0, 2)
    inside(engine, source).last_used = 0.0
    fork = engine.fork(source)
    assert engine.describe(other).parked
    assert not engine.describe(source).parked
    assert ticks(engine, fork, 2, 1)[0].restart_reason is None
    engine.shutdown()


def test_a_snapshot_has_idle_sessions_parked_where_it_finds_no_room() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=2)
    first, second = engine.open_session(), engine.open_session()
    for session in (first, second):
        engine.submit(session, make_inputs(engine, 0, 1)).result()
    snapshot = engine.snapshot(second)
    assert engine.describe(first).parked
    assert not engine.describe(second).parked
    engine.release(snapshot)
    engine.shutdown()


def test_a_session_that_is_resumed_ticks_as_if_it_had_never_been_parked() -> None:
    engine = make_engine("ti2v", block_size=16)
    session = engine.open_session()
    ticks(engine, session, 0, 2)
    fork = engine.fork(session)
    expected = ticks(engine, fork, 5, 1)[0]
    before = engine.describe(session)
    engine.park(session)
    for _ in range(2):  # safe twice
        engine.resume(session)
        assert engine.describe(session) == before
    assert same(ticks(engine, session, 5, 1)[0], expected)
    engine.shutdown()


def test_a_session_that_is_resumed_is_not_parked_again_at_once() -> None:
    engine = make_engine("ti2v", block_size=16, park_after_s=1.0)
    session = engine.open_session()
    ticks(engine, session, 0, 1)
    eventually(lambda: engine.describe(session).parked)
    resumed = time.monotonic()
    engine.resume(session)
    assert not engine.describe(session).parked
    eventually(lambda: engine.describe(session).parked)
    assert time.monotonic() - resumed > 0.9
    engine.shutdown()


def test_host_memory_is_pinned_ahead_once_the_pool_is_full_and_again_after_each_park() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=2)
    storage, pinned = engine.core.cache.storage, []
    storage.pin_ahead = pinned.append  # type: ignore[method-assign]
    one = engine.open_session()
    engine.submit(one, make_inputs(engine, 0, 1)).result()
    assert pinned == [], "there is room for another"
    engine.open_session()
    eventually(lambda: pinned == [engine.core.admission.blocks_per_session])
    engine.park(one)
    assert len(pinned) == 1, "there is room again"
    engine.submit(one, make_inputs(engine, 1)).result()
    eventually(lambda: len(pinned) == 2)
    engine.shutdown()


@pytest.mark.parametrize("why", ["no host memory is allowed", "nobody is parked for another"])
def test_nothing_is_pinned_ahead_that_is_never_used(why: str) -> None:
    never = {"max_parked_bytes": 0} if why.startswith("no host") else {"park_when_full": False}
    engine = make_engine("ti2v", block_size=16, max_sessions=1, **never)
    pinned: list[int] = []
    engine.core.cache.storage.pin_ahead = pinned.append  # type: ignore[method-assign]
    engine.submit(engine.open_session(), make_inputs(engine, 0, 1)).result()
    assert pinned == []
    engine.shutdown()


def test_a_machine_that_pins_nothing_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=1)

    def fails(num_blocks: int) -> None:
        raise RuntimeError("out of locked memory")

    engine.core.cache.storage.pin_ahead = fails  # type: ignore[method-assign]
    engine.submit(engine.open_session(), make_inputs(engine, 0, 1)).result()
    eventually(lambda: "no host memory could be pinned ahead for parking: out of locked memory" in caplog.text)
    engine.shutdown()


def test_a_reset_waits_for_the_copy_that_begins_where_another_ends() -> None:
    """A tick brings its session back; parking it and a reset wait for that copy. Parking is a copy again: were the
    history dropped during it, the engine would die of that."""
    engine = make_toy_engine(ToyModel("slide"), max_sessions=2)
    session = engine.open_session()
    engine.submit(session, ToyInputs(1.0)).result(10)
    engine.park(session)
    may_copy, executor = threading.Event(), engine.core.executor
    on_host = executor.on_host

    def slow(function: Any) -> Any:
        return on_host(lambda: (may_copy.wait(10), function())[1])

    executor.on_host = slow  # type: ignore[method-assign]
    coming = engine.submit(session, ToyInputs(2.0))
    while engine.inspect(lambda core: core.residency.oldest_copy) is None:
        time.sleep(0.01)
    parked, reset = engine.begin_park(session), engine.reset(session)
    engine.inspect(lambda core: None)
    may_copy.set()
    with pytest.raises(SessionEnded):
        coming.result(10)
    assert parked.result(10) is None
    assert reset.result(10) is None
    info = engine.describe(session)
    assert (info.num_chunks, info.num_blocks, info.parked) == (0, 0, False)
    assert engine.submit(session, ToyInputs(3.0)).result(10).result.averages
    assert engine.health().ready
    engine.shutdown()


def test_whoever_waits_for_a_copy_is_told_when_the_engine_dies_at_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=2)
    session = engine.open_session()
    engine.submit(session, ToyInputs(1.0)).result(10)

    def broken(*_: object) -> object:
        raise AssertionError("our own bug")

    monkeypatch.setattr(residency, "finish_park", broken)
    told: list[BaseException] = []

    def park() -> None:
        try:
            engine.park(session)
        except EngineStopped as error:
            told.append(error)

    waiting = threading.Thread(target=park, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive(), "it waits for an answer that nobody gives any more"
    assert "our own bug" in str(told[0])
    engine.shutdown()
