"""What waits for room or for a copy while its session is reset: all come in the order in which they were asked for."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("torch")

from engines import rest
from toy_model import ToyInputs, ToyModel, make_toy_engine

from worldkv.engine.engine import Engine
from worldkv.errors import AdmissionRefused, SessionEnded, SessionNotFound
from worldkv.kv.transfer import ParkJob, ResumeJob


class Held:
    """Copies of one kind, each of which waits to be let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, job: type) -> None:
        self.begun, self.go_on, copy = threading.Event(), threading.Event(), job.copy  # type: ignore[attr-defined]
        held = self

        def slow(job: Any) -> None:
            held.begun.set()
            assert held.go_on.wait(10)
            copy(job)

        monkeypatch.setattr(job, "copy", slow)


def tick(engine: Engine[Any, Any, Any], session: Any, number: float = 1.0) -> Any:
    return engine.submit(session, ToyInputs(number)).result(10)


@pytest.mark.parametrize("what", ["restore", "resume", "snapshot", "fork"])
def test_a_reset_comes_after_what_was_asked_for_before_it(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A parked session waits for its copy, or another one's that makes room for it, when it is reset."""
    most = 3 if what == "fork" else 2  # room beside its own would not be waited for
    engine = make_toy_engine(ToyModel("slide"), max_sessions=most, max_parked_bytes=1 << 30)
    try:
        first = engine.open_session()
        tick(engine, first)
        frozen = engine.snapshot(first)
        engine.park(first)
        tick(engine, engine.open_session())
        if what == "fork":  # it needs room for two
            engine.release(frozen)
        rest(engine)
        held = Held(monkeypatch, ResumeJob if what == "fork" else ParkJob)
        asked: Future[Any] = {
            "restore": lambda: engine.begin_restore(first, frozen),
            "resume": lambda: engine.begin_resume(first),
            "snapshot": lambda: engine.begin_snapshot(first),
            "fork": lambda: engine.begin_fork(first),
        }[what]()
        waits = held.begun.wait(1)
        done = engine.reset(first)
        held.go_on.set()
        brought = asked.result(10)
        done.result(10)
        rest(engine)
        assert waits, "the test is of something that waits"
        assert engine.describe(first).num_chunks == 0, "the reset was undone by what was asked for before it"
        if what == "snapshot":
            assert brought.num_chunks == 1, "the snapshot was asked for before the reset"
        if what == "fork":
            assert engine.describe(brought).num_chunks == 1
    finally:
        engine.shutdown()


@pytest.mark.parametrize("what", ["restore", "resume", "snapshot", "fork"])
@pytest.mark.parametrize("then", ["reset", "close"])
@pytest.mark.parametrize("ticks", [False, True])
def test_whoever_waits_for_room_is_answered_and_nothing_stays_promised(
    monkeypatch: pytest.MonkeyPatch, what: str, then: str, ticks: bool
) -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=2, max_parked_bytes=1 << 30)
    try:
        first = engine.open_session()
        tick(engine, first)
        frozen = engine.snapshot(first)
        engine.park(first)
        second = engine.open_session()
        tick(engine, second)
        rest(engine)
        held = Held(monkeypatch, ParkJob)
        argument = (frozen,) if what == "restore" else ()
        asked: Future[Any] = getattr(engine, f"begin_{what}")(first, *argument)
        assert held.begun.wait(5), "it does not wait"
        waiting = engine.submit(first, ToyInputs(2.0)) if ticks else None
        back = engine.close(first, "gone") if then == "close" else engine.reset(first)
        rest(engine)
        held.go_on.set()
        back.result(10)
        error = asked.exception(10)
        assert error is None or isinstance(error, SessionNotFound | AdmissionRefused), repr(error)
        assert waiting is None or isinstance(waiting.exception(10), SessionEnded)
        if error is None and what in ("snapshot", "fork"):
            engine.release(asked.result()) if what == "snapshot" else engine.close(asked.result(), "done")
        for session in (first, second):
            engine.close(session, "done").result(10)
        engine.release(frozen).result(10)
        rest(engine)
        assert engine.inspect(lambda core: core.admission.num_charged) == 0, "promised to nobody"
    finally:
        engine.shutdown()
