"""Operators' requests that wait for a copy or for room, while their session ticks, is reset or closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines import rest  # noqa: E402
from test_found_in_use import balanced, slow  # noqa: E402
from toy_model import ToyInputs, ToyModel, make_toy_engine  # noqa: E402

from worldkv.errors import AdmissionRefused, SessionEnded, SessionNotFound  # noqa: E402
from worldkv.kv.transfer import ParkJob  # noqa: E402


@pytest.mark.parametrize("how", ["reset", "close"])
def test_who_waits_for_a_copy_is_answered_though_its_session_is_reset_or_closed(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=3)
    session = engine.open_session()
    engine.submit(session, ToyInputs(0.0)).result(10)
    with slow(monkeypatch, ParkJob) as begun:
        parked = engine.begin_park(session)
        assert begun.wait(10)
        asked = [engine.begin_snapshot(session), engine.begin_fork(session), engine.begin_resume(session)]
        tick = engine.submit(session, ToyInputs(1.0))
        ended = engine.reset(session) if how == "reset" else engine.close(session, "enough")
        with pytest.raises(SessionEnded):
            tick.result(10)
    parked.result(10)
    ended.result(10)
    if how == "close":
        for future in asked:
            with pytest.raises(SessionNotFound, match="enough"):
                future.result(10)
        assert engine.capacity().num_charged == engine.capacity().blocks_shared, "a closed session was charged"
    else:
        taken, fork, _ = (future.result(10) for future in asked)
        engine.submit(session, ToyInputs(2.0)).result(10)
        engine.release(taken)
        engine.close(fork, "done")
    balanced(engine)


def test_a_session_that_closes_while_an_operator_waits_is_charged_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=2)
    session = engine.open_session()
    engine.submit(session, ToyInputs(0.0)).result(10)
    with slow(monkeypatch, ParkJob) as begun:
        engine.begin_park(session)
        assert begun.wait(10)
        asked = engine.begin_snapshot(session)
        closed = engine.close(session, "enough")
    with pytest.raises(SessionNotFound, match="enough"):
        asked.result(10)
    closed.result(10)
    rest(engine)
    assert engine.capacity().num_charged == engine.capacity().blocks_shared
    assert engine.capacity().num_more_sessions == 2
    balanced(engine)


def test_an_operator_whom_the_tick_overtook_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers leave room for the ticks of others, a session's own tick does not: so it can begin first."""
    engine = make_toy_engine(ToyModel("slide"), max_sessions=2)
    mine = engine.open_session()
    empty = engine.snapshot(mine)
    others = [engine.open_session() for _ in range(3)]
    for session in (mine, *others):
        engine.submit(session, ToyInputs(0.0)).result(10)
    assert [engine.describe(session).parked for session in (mine, *others)] == [True, True, False, False]
    engine.reset(mine).result(10)  # on neither side now, and charged nothing
    may_copy, copy = threading.Semaphore(0), ParkJob.copy

    def held(self: Any) -> None:
        assert may_copy.acquire(timeout=10)
        copy(self)

    monkeypatch.setattr(ParkJob, "copy", held)
    inputs = ToyInputs(1.0, hold=threading.Event())
    restored = engine.begin_restore(mine, empty)
    tick, other = engine.submit(mine, inputs), engine.submit(others[0], ToyInputs(2.0))
    rest(engine)
    may_copy.release()
    assert inputs.held.wait(10), "the tick did not begin"
    may_copy.release(5)
    assert inputs.hold is not None
    inputs.hold.set()
    tick.result(10)
    other.result(10)
    restored.result(10)
    rest(engine)
    assert engine.describe(mine).num_chunks == 0, "the restore came before the tick had ended"
    engine.release(empty)
    balanced(engine)


def full_house(window: str = "slide") -> tuple[Any, Any, Any]:
    """An engine of two sessions' room, both taken by sessions with a full window: whoever else wants some waits until
    the second is parked."""
    engine = make_toy_engine(ToyModel(window), max_sessions=2)  # type: ignore[arg-type]
    first, second = engine.open_session(), engine.open_session()
    for session in (second, first):
        for number in range(6):
            engine.submit(session, ToyInputs(float(number))).result(10)
    return engine, first, second


@pytest.mark.parametrize("window", ["slide", "reset"])
def test_a_snapshot_that_waits_for_room_takes_no_block_from_ticks(monkeypatch: pytest.MonkeyPatch, window: str) -> None:
    engine, session, _ = full_house(window)
    with slow(monkeypatch, ParkJob) as begun:
        asked = []
        for _ in range(8):
            asked.append(engine.begin_snapshot(session))
            assert begun.wait(10)
            for number in range(6):  # all of the window is new
                engine.submit(session, ToyInputs(float(number))).result(10)
        assert not any(future.done() for future in asked)
    outcomes = [future.exception(10) for future in asked]
    assert outcomes[0] is None, "there was room for one"
    assert all(isinstance(error, AdmissionRefused) for error in outcomes if error is not None)
    balanced(engine)


def test_a_history_that_waits_for_room_is_frozen_when_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, session, other = full_house()
    with slow(monkeypatch, ParkJob) as begun:
        asked = engine.begin_fork(session)
        assert begun.wait(10)
        engine.submit(session, ToyInputs(7.0)).result(10)
        assert not asked.done()
    fork = asked.result(10)
    assert engine.describe(fork).num_chunks == engine.describe(session).num_chunks
    ticks = [engine.submit(each, ToyInputs(8.0)).result(10).result for each in (session, fork)]
    assert ticks[0] == ticks[1], "the fork lacks the tick that came first"
    assert engine.describe(other).parked
    balanced(engine)


@pytest.mark.parametrize("what", ["snapshot", "fork"])
def test_a_reset_waits_for_nobody_who_wants_room(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    engine, session, _ = full_house()
    with slow(monkeypatch, ParkJob) as begun:
        asked = engine.begin_snapshot(session) if what == "snapshot" else engine.begin_fork(session, "fork")
        assert begun.wait(10)
        engine.reset(session).result(10)
        with pytest.raises(AdmissionRefused, match=what if what == "snapshot" else "another session"):
            asked.result(10)
        engine.submit(session, ToyInputs(1.0)).result(10)
    engine.open_session("fork")  # the name is free again
    balanced(engine)


def test_who_waits_for_room_is_told_when_the_session_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, session, _ = full_house()
    with slow(monkeypatch, ParkJob) as begun:
        asked = engine.begin_fork(session, "fork")
        assert begun.wait(10)
        engine.close(session, "enough").result(10)
        with pytest.raises(SessionNotFound, match="enough"):
            asked.result(10)
    engine.open_session("fork")
    balanced(engine)


def test_a_restore_comes_after_the_snapshot_that_was_asked_for_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=2)
    session = engine.open_session()
    empty = engine.snapshot(session)
    other = engine.open_session()
    for each in (other, session):
        for number in range(6):
            engine.submit(each, ToyInputs(float(number))).result(10)
    with slow(monkeypatch, ParkJob) as begun:
        taken, restored = engine.begin_snapshot(session), engine.begin_restore(session, empty)
        assert begun.wait(10)
        rest(engine)
        assert not restored.done()
    assert taken.result(10).num_chunks > 0, "the snapshot is of what was restored"
    restored.result(10)
    rest(engine)
    assert engine.describe(session).num_chunks == 0
    balanced(engine)
