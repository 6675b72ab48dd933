"""Operators' requests come between two ticks of a robot, in order, and cost it none."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from engines import rest
from toy_model import ToyInputs, ToyModel, make_toy_engine

from worldkv.engine.engine import Engine
from worldkv.errors import (
    EngineStopped,
    SessionBusy,
    SessionEnded,
    SessionNotFound,
)

NUM_REQUESTS = 200


@pytest.fixture
def engine() -> Iterator[Engine[Any, Any, Any]]:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=8, batch_invariant=True)
    yield engine
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0


class Held:
    """A tick that runs until it is let go."""

    def __init__(self, engine: Engine[Any, Any, Any], session: Any, number: float = 1.0) -> None:
        self.hold = threading.Event()
        inputs = ToyInputs(number, hold=self.hold)
        self.future = engine.submit(session, inputs)
        assert inputs.held.wait(10)


def num_chunks(engine: Engine[Any, Any, Any], session: Any) -> int:
    rest(engine)
    return engine.describe(session).num_chunks


def test_what_an_operator_asks_for_during_a_tick_is_done_in_order_once_it_has_ended(engine: Any) -> None:
    session = engine.open_session()
    empty = engine.snapshot(session)
    tick = Held(engine, session)
    first = engine.begin_snapshot(session)
    fork = engine.begin_fork(session)
    parked = engine.begin_park(session)
    second = engine.begin_snapshot(session)
    restored = engine.begin_restore(session, empty)
    assert not any(answer.done() for answer in (first, fork, parked, second, restored))
    tick.hold.set()
    assert tick.future.result(10).info.num_chunks == 1
    assert first.result(10).num_chunks == second.result(10).num_chunks == 1
    parked.result(10)
    restored.result(10)
    assert num_chunks(engine, fork.result(10)) == 1
    assert num_chunks(engine, session) == 0, "the restore came last"


def test_a_robot_beside_many_operators_loses_no_tick_and_no_bit(engine: Any) -> None:
    """None is refused as busy either, and what they freeze goes on as the robot did."""
    numbers = [float(n) for n in range(60)]

    def drive(session: Any) -> list[Any]:
        return [engine.submit(session, ToyInputs(n)).result(10).result.averages for n in numbers]

    undisturbed = drive(engine.open_session())
    session, failures = engine.open_session(), []

    def operate(seed: int) -> None:
        pick = random.Random(seed)
        for _ in range(NUM_REQUESTS // 4):
            try:
                kind = pick.choice(("snapshot", "fork", "park", "restore"))
                if kind == "snapshot":
                    engine.release(engine.snapshot(session))
                elif kind == "fork":
                    engine.close(engine.fork(session), "seen enough")
                elif kind == "park":
                    engine.park(session)
                else:
                    other = engine.open_session()
                    snapshot = engine.snapshot(session)
                    engine.restore(other, snapshot)
                    engine.release(snapshot)
                    engine.close(other, "seen enough")
            except Exception as error:
                failures.append(error)

    operators = [threading.Thread(target=operate, args=(seed,)) for seed in range(4)]
    for operator in operators:
        operator.start()
    disturbed = drive(session)
    for operator in operators:
        operator.join(30)
    assert not failures
    assert disturbed == undisturbed


def test_a_robot_that_asks_twice_at_once_is_still_refused(engine: Any) -> None:
    session = engine.open_session()
    tick = Held(engine, session)
    waiting = engine.begin_snapshot(session)
    second = engine.submit(session, ToyInputs(2.0))
    tick.hold.set()
    assert isinstance(second.exception(10), SessionBusy)
    tick.future.result(10)
    waiting.result(10)


def test_an_operator_s_tick_costs_the_robot_none(engine: Any) -> None:
    session = engine.open_session()
    tick = Held(engine, session)
    imagined = engine.submit(session, ToyInputs(2.0), waits_its_turn=True)
    second = engine.submit(session, ToyInputs(3.0))
    tick.hold.set()
    assert isinstance(second.exception(10), SessionBusy), "two of the robot's at once"
    tick.future.result(10)
    robots = engine.submit(session, ToyInputs(3.0))  # behind the imagined one, running or waiting
    assert imagined.result(10).info.num_chunks == 2
    assert robots.result(10).info.num_chunks == 3


def test_the_time_that_a_tick_waited_for_an_operator_is_in_its_queue(engine: Any) -> None:
    session, hold = engine.open_session(), threading.Event()
    imagined = ToyInputs(1.0, hold=hold)
    engine.submit(session, imagined, waits_its_turn=True)
    assert imagined.held.wait(10)
    robots = engine.submit(session, ToyInputs(2.0))
    time.sleep(0.2)
    hold.set()
    assert robots.result(10).info.timings["queue"] >= 190


@pytest.mark.parametrize("how", ["reset", "close"])
def test_a_reset_or_an_end_answers_everybody_who_waits(engine: Any, how: str) -> None:
    session = engine.open_session()
    engine.submit(session, ToyInputs(1.0)).result(10)
    tick = Held(engine, session, 2.0)
    snapshot = engine.begin_snapshot(session)
    imagined = engine.submit(session, ToyInputs(3.0), waits_its_turn=True)
    end = engine.reset(session) if how == "reset" else engine.close(session, "test")
    tick.hold.set()
    assert isinstance(tick.future.exception(10), SessionEnded)
    assert isinstance(imagined.exception(10), SessionEnded)
    if how == "reset":
        assert snapshot.result(10).num_chunks == 1, "it was asked for before the reset"
    else:
        assert isinstance(snapshot.exception(10), SessionNotFound)
    end.result(10)


def test_what_is_asked_for_before_a_reset_comes_before_it(engine: Any) -> None:
    session = engine.open_session()
    engine.submit(session, ToyInputs(1.0)).result(10)
    other = Held(engine, engine.open_session())  # so that both messages are read in one turn
    snapshot = engine.begin_snapshot(session)
    engine.reset(session)
    other.hold.set()
    assert snapshot.result(10).num_chunks == 1


def test_whoever_gives_up_waiting_leaves_nothing_behind(engine: Any) -> None:
    session = engine.open_session()
    charged = engine.capacity().num_charged
    tick = Held(engine, session)
    waiting = [engine.begin_snapshot(session), engine.begin_fork(session), engine.begin_park(session)]
    kept = engine.begin_snapshot(session)
    assert all(answer.cancel() for answer in waiting)
    tick.hold.set()
    engine.release(kept.result(10))
    rest(engine)
    assert (engine.capacity().num_charged, engine.capacity().num_sessions) == (charged, 1)
    assert not engine.describe(session).parked


def test_the_end_of_the_engine_answers_those_who_wait_their_turn() -> None:
    engine = make_toy_engine(ToyModel())
    session = engine.open_session()
    tick = Held(engine, session)
    waiting = engine.begin_snapshot(session)
    stopping = threading.Thread(target=engine.shutdown)
    stopping.start()
    tick.hold.set()
    stopping.join(10)
    assert isinstance(waiting.exception(10), EngineStopped) or waiting.result().num_chunks == 1


def test_an_operator_is_not_refused_the_room_that_is_kept_for_the_same_session() -> None:
    engine = make_toy_engine(ToyModel(), max_sessions=2)
    try:
        session, other = engine.open_session(), engine.open_session()
        empty = engine.snapshot(session)
        engine.submit(session, ToyInputs(1.0)).result(10)
        engine.park(session)
        tick = Held(engine, other)  # and never idle: nobody can be parked for anybody
        restored = engine.begin_restore(session, empty)
        robots = engine.submit(session, ToyInputs(2.0))
        tick.hold.set()
        restored.result(10)
        assert robots.result(10).info.num_chunks == 1
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", ["snapshot", "fork", "park", "inspect", "open_session"])
def test_waiting_on_the_engine_s_own_thread_is_an_error_and_no_deadlock(engine: Any, name: str) -> None:
    session = engine.open_session()
    acts: dict[str, Callable[[], object]] = {
        "inspect": lambda: engine.inspect(lambda core: None),
        "open_session": lambda: engine.open_session("another"),
    }
    act, raised, called = acts.get(name, lambda: getattr(engine, name)(session)), [], threading.Event()

    def answered(_: object) -> None:
        try:
            act()
        except RuntimeError as error:
            raised.append(str(error))
        called.set()

    tick = Held(engine, session)
    tick.future.add_done_callback(answered)
    tick.hold.set()
    assert called.wait(10), "it waits for itself"
    assert len(raised) == 1
    assert "called on the engine's own thread" in raised[0]
    engine.submit(session, ToyInputs(2.0)).result(10)
