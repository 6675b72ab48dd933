"""What fails beside the ticks: parking, settling, a tick that comes right after a reset."""

from __future__ import annotations

import threading
import time

from toy_model import ToyInputs, ToyModel, make_toy_engine

from worldkv.kv.transfer import ParkJob


def make(**k):
    return make_toy_engine(ToyModel(), **k)


def test_parking_that_fails_for_want_of_host_memory_does_not_end_the_engine(monkeypatch):
    engine = make(park_after_s=0.05)
    s = engine.open_session()
    engine.submit(s, ToyInputs(1.0)).result(5)

    def no_memory(job):
        raise MemoryError("pinned host memory")

    monkeypatch.setattr(ParkJob, "copy", no_memory)
    time.sleep(1.5)
    assert engine.health().ready, engine.health()


def test_a_session_can_tick_right_after_a_reset():
    engine = make()
    s = engine.open_session()
    gate = threading.Event()
    inputs = ToyInputs(1.0, hold=gate)
    engine.submit(s, inputs)
    inputs.held.wait(5)
    engine.reset(s)
    threading.Timer(0.5, gate.set).start()
    try:
        engine.submit(s, ToyInputs(2.0)).result(5)
    finally:
        gate.set()
        engine.shutdown()


def test_other_ticks_end_when_settling_one_fails(monkeypatch):
    engine = make()
    a, b = engine.open_session(), engine.open_session()
    gate = threading.Event()
    ia = ToyInputs(1.0, hold=gate)
    real = engine.core.finish

    def finish(tick, outcome=None, error=None):
        if tick.session.handle == a:
            raise RuntimeError("our own bug")
        real(tick, outcome, error)

    engine.core.finish = finish
    engine.submit(a, ia)
    ia.held.wait(5)
    fb = engine.submit(b, ToyInputs(2.0))
    gate.set()
    time.sleep(1)
    assert fb.exception(timeout=3) is not None
