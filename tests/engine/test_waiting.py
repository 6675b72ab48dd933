"""Ticks of parked sessions that find no room wait for it, in the order in which they came, and nobody starves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from toy_model import ToyInputs, ToyModel, make_toy_engine  # noqa: E402

from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.errors import AdmissionRefused, SessionEnded  # noqa: E402


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=2)
    yield engine
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0


def held(engine: Engine, session: Any, hold: threading.Event) -> Any:
    """A tick that is running and stays so until `hold` is set."""
    inputs = ToyInputs(1.0, hold=hold)
    future = engine.submit(session, inputs)
    assert inputs.held.wait(10)
    return future


def test_more_robots_than_room_tick_at_once_and_all_are_answered(engine: Engine) -> None:
    sessions = [engine.open_session() for _ in range(5)]
    for number in range(4):
        futures = [engine.submit(session, ToyInputs(float(number))) for session in sessions]
        for future in futures:
            future.result(10)
    assert {engine.describe(session).num_chunks for session in sessions} == {4}
    assert engine.stats().num_parked == 3


def test_a_waiting_tick_is_not_starved_by_ticks_that_came_later(engine: Engine) -> None:
    sessions = [engine.open_session() for _ in range(3)]
    engine.park(sessions[2])
    hold, order = threading.Event(), []

    def again(session: Any, left: int) -> None:
        """Tick after tick, each submitted in the moment in which the last one ended."""
        future = engine.submit(session, ToyInputs(0.0, hold=hold))
        future.add_done_callback(lambda _: order.append(session))
        if left:
            future.add_done_callback(lambda _: again(session, left - 1))

    for session in sessions[:2]:
        engine.submit(session, ToyInputs(0.0)).result(10)
    for session in sessions[:2]:
        again(session, 20)
    waiting = engine.submit(sessions[2], ToyInputs(5.0))
    waiting.add_done_callback(lambda _: order.append(sessions[2]))
    hold.set()
    waiting.result(10)
    before = order[: order.index(sessions[2])]  # one goes on while the other is copied, which takes as long as it takes
    fewest = min(before.count(session) for session in sessions[:2])
    assert fewest <= 2, "it waits for the ticks under way, not for those after them"


def test_a_newcomer_does_not_take_the_room_that_a_tick_waits_for(engine: Engine) -> None:
    first, second, third = (engine.open_session() for _ in range(3))
    assert engine.describe(first).parked
    hold = threading.Event()
    running = [held(engine, session, hold) for session in (second,)]
    running.append(engine.submit(third, ToyInputs(1.0)))
    waiting = engine.submit(first, ToyInputs(2.0))
    refused: list[BaseException] = []

    def newcomer() -> None:
        try:
            engine.open_session()
        except AdmissionRefused as error:
            refused.append(error)

    thread = threading.Thread(target=newcomer)
    thread.start()
    engine.close(second, "makes room, for the one that waits")
    hold.set()
    thread.join(10)
    with pytest.raises(SessionEnded):
        running[0].result(10)
    running[1].result(10)
    waiting.result(10)
    assert refused


def test_a_waiting_tick_can_be_cancelled(engine: Engine) -> None:
    first, second, third = (engine.open_session() for _ in range(3))
    hold = threading.Event()
    running = [held(engine, second, hold), engine.submit(third, ToyInputs(1.0))]
    waiting = engine.submit(first, ToyInputs(2.0))
    engine.reset(first)
    hold.set()
    with pytest.raises(SessionEnded, match="was reset"):
        waiting.result(10)
    for future in running:
        future.result(10)
    engine.submit(first, ToyInputs(3.0)).result(10)


def test_where_nothing_may_be_parked_for_it_a_tick_is_refused_at_once() -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=1, park_when_full=False)
    first = engine.open_session()
    engine.park(first)
    second = engine.open_session()
    with pytest.raises(AdmissionRefused, match="it needs 24 blocks, 0 of 24 are not promised to others"):
        engine.submit(first, ToyInputs(1.0)).result(10)
    engine.close(second, "makes room")
    engine.submit(first, ToyInputs(1.0)).result(10)
    engine.shutdown()
