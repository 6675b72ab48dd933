"""Ticks that begin before they are asked for: the same answers, the same history, and no trace where they were not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from engines import inside, pause, rest
from toy_model import Injected, ToyInputs, ToyModel, make_toy_engine

from worldkv.engine.engine import Engine
from worldkv.errors import ModelError, SessionBusy, SessionEnded, SessionNotFound
from worldkv.kv.window import WindowPolicy


@pytest.fixture
def engine() -> Iterator[Engine[Any, Any, Any]]:
    engine = make_toy_engine(ToyModel(), max_sessions=4, batch_invariant=True)
    yield engine
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0


def tick(engine: Any, session: Any, number: float, prompt: int = 0) -> Any:
    return engine.submit(session, ToyInputs(number, prompt)).result(10)


def begin(engine: Any, session: Any, number: float, prompt: int = 0) -> None:
    engine.work_ahead(session, ToyInputs(number, prompt)).result(10)


@pytest.mark.parametrize("policy", ["reset", "slide"])
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_every_tick_may_begin_ahead_in_a_pool_for_one_session(policy: WindowPolicy, block_size: int) -> None:
    """It is one tick in two halves: what it holds between them was charged."""
    answers = []
    for ahead in (False, True):
        engine = make_toy_engine(ToyModel(policy), block_size=block_size, max_sessions=1, park_when_full=False)
        session = engine.open_session()
        replies = []
        for number in range(1, 16):
            if ahead:
                begin(engine, session, number, number // 7)
            replies.append(tick(engine, session, number, number // 7))
        answers.append([(reply.result, reply.info.num_chunks, reply.info.blocks_used) for reply in replies])
        engine.shutdown()
        assert engine.core.cache.pool.num_used == 0
    assert answers[0] == answers[1]


def test_what_was_done_ahead_is_not_done_again(engine: Any) -> None:
    session = engine.open_session()
    begin(engine, session, 1.0)
    before = sum(engine.core.executor.rows_per_forward.values())
    reply = tick(engine, session, 1.0)
    assert "commit" not in reply.info.timings
    assert reply.info.timings["denoise"] > 0
    num_forwards = sum(engine.core.executor.rows_per_forward.values()) - before
    assert num_forwards == 4, "two drafts, a row at a time"


def test_another_tick_than_the_one_that_began_finds_the_session_as_it_was(engine: Any) -> None:
    expected, session = engine.open_session(), engine.open_session()
    tick(engine, expected, 1.0)
    tick(engine, session, 1.0)
    begin(engine, session, 7.0)
    assert engine.describe(session).num_chunks == 2
    assert tick(engine, session, 2.0).result == tick(engine, expected, 2.0).result
    begin(engine, session, 3.0, prompt=1)  # restarts the window
    assert tick(engine, session, 3.0).result == tick(engine, expected, 3.0).result
    begin(engine, session, 4.0)
    begin(engine, session, 5.0)  # the newest counts
    assert tick(engine, session, 5.0).result == tick(engine, expected, 5.0).result


@pytest.mark.parametrize("fail_at", ["encode", "commit"])
def test_a_beginning_that_fails_changes_nothing(engine: Any, fail_at: str) -> None:
    expected, session = engine.open_session(), engine.open_session()
    tick(engine, session, 1.0)
    with pytest.raises(Injected):
        engine.work_ahead(session, ToyInputs(2.0, 5, fail_at)).result(10)
    assert inside(engine, session).ahead is None
    tick(engine, expected, 1.0)
    assert tick(engine, session, 2.0).result == tick(engine, expected, 2.0).result


def test_a_tick_that_goes_on_and_fails_can_be_asked_for_again(engine: Any) -> None:
    expected, session = engine.open_session(), engine.open_session()
    for each in (expected, session):
        tick(engine, each, 1.0)
    begin(engine, session, 2.0)
    with pytest.raises(Injected):
        engine.submit(session, ToyInputs(2.0, 0, "draft")).result(10)
    rest(engine)
    assert engine.describe(session).num_chunks == 1, "as its last tick left it"
    assert tick(engine, session, 2.0).result == tick(engine, expected, 2.0).result


def _park(engine: Any, session: Any) -> Any:
    engine.park(session)
    return session


def _restore(engine: Any, session: Any) -> Any:
    begun = engine.snapshot(session)
    engine.reset(session)
    engine.restore(session, begun)
    engine.release(begun)
    return session


def _fork_of_snapshot(engine: Any, session: Any) -> Any:
    frozen = engine.snapshot(session)
    fork = engine.fork(frozen)
    engine.release(frozen)
    return fork


BETWEEN: dict[str, Callable[[Any, Any], Any]] = {
    "park": _park,
    "snapshot": lambda engine, session: [session, engine.release(engine.snapshot(session))][0],
    "fork": lambda engine, session: engine.fork(session),
    "fork of a snapshot": _fork_of_snapshot,
    "restore": _restore,
}


@pytest.mark.parametrize("between", BETWEEN)
def test_operators_find_the_session_as_its_last_tick_left_it(engine: Any, between: str) -> None:
    expected, session = engine.open_session(), engine.open_session()
    for each in (expected, session):
        tick(engine, each, 1.0)
    begin(engine, session, 2.0)
    session = BETWEEN[between](engine, session)
    rest(engine)
    assert engine.describe(session).num_chunks == 1
    assert tick(engine, session, 2.0).result == tick(engine, expected, 2.0).result


@pytest.mark.parametrize("ends", ["reset", "close"])
def test_a_reset_and_a_close_forget_what_was_done_ahead(engine: Any, ends: str) -> None:
    session = engine.open_session()
    tick(engine, session, 1.0)
    begin(engine, session, 2.0)
    if ends == "close":
        engine.close(session, "test").result(10)
        with pytest.raises(SessionNotFound):
            begin(engine, session, 2.0)
    else:
        engine.reset(session)
        assert tick(engine, session, 2.0).result == tick(engine, engine.open_session(), 2.0).result


def test_a_reset_ends_what_is_being_done_and_what_waits_to_be_done_ahead(engine: Any) -> None:
    session = engine.open_session()
    go_on = pause(engine)
    running, waiting = (engine.work_ahead(session, ToyInputs(number)) for number in (1.0, 2.0))
    engine.reset(session)
    go_on.set()
    for ended in (running, waiting):
        with pytest.raises(SessionEnded):
            ended.result(10)


def test_a_robot_s_tick_waits_for_its_beginning_and_makes_it_urgent(engine: Any) -> None:
    session = engine.open_session()
    go_on = pause(engine)
    begun = [engine.work_ahead(session, ToyInputs(number)) for number in (1.0, 2.0)]
    reply = engine.submit(session, ToyInputs(2.0), 5.0)
    busy = engine.submit(session, ToyInputs(3.0), 4.0)
    seen: list[float | None] = []
    core = engine.core
    want = core.want

    def watch(wanted: Any) -> None:
        want(wanted)
        seen.append(wanted.deadline)

    core.want = watch
    try:
        go_on.set()
        assert reply.result(10).info.num_chunks == 1
    finally:
        core.want = want
    assert [each.exception(10) for each in begun] == [None, None]
    with pytest.raises(SessionBusy):
        busy.result(10)
    assert seen[1:] == [5.0, 5.0], "what was to be done ahead is due when the tick is that waits for it"


class OnlyWholeTicks(ToyModel):
    ahead = None  # type: ignore[assignment]


def test_a_model_whose_ticks_cannot_begin_ahead_says_so() -> None:
    engine = make_toy_engine(OnlyWholeTicks(), max_sessions=1)
    session = engine.open_session()
    with pytest.raises(ModelError, match="OnlyWholeTicks: its ticks cannot begin before they are asked for"):
        begin(engine, session, 1.0)
    tick(engine, session, 1.0)
    engine.shutdown()
