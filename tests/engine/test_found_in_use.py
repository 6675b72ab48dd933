"""What met robots in use and must not come back: each test failed on the engine with a lock and a worker's errands."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines import inside, pause, rest  # noqa: E402
from toy_model import CHUNK, Injected, ToyInputs, ToyModel, make_toy_engine  # noqa: E402

from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.errors import AdmissionRefused, ModelError, SessionEnded, SnapshotNotFound  # noqa: E402
from worldkv.kv.transfer import ParkJob, ResumeJob  # noqa: E402
from worldkv.models.base import Encode, Forward, OnHost, Outcome, Row  # noqa: E402


@contextmanager
def slow(monkeypatch: pytest.MonkeyPatch, job: type) -> Iterator[threading.Event]:
    """Copies of that kind do not end before the `with` does; the event says that one has begun."""
    begun, go_on, copy = threading.Event(), threading.Event(), job.copy  # type: ignore[attr-defined]

    def held(self: Any) -> None:
        begun.set()
        assert go_on.wait(10)
        copy(self)

    monkeypatch.setattr(job, "copy", held)
    try:
        yield begun
    finally:
        go_on.set()


def balanced(engine: Engine[Any, Any, Any]) -> None:
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0, "blocks outlived their engine"


def test_a_session_whose_reset_tick_still_runs_is_never_parked() -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=1)
    first = engine.open_session()
    engine.submit(first, ToyInputs(0.0)).result(10)
    second = engine.open_session()  # first is parked
    for number in range(5):
        hold = threading.Event()
        inputs = ToyInputs(1.0, hold=hold)
        running = engine.submit(second, inputs)
        assert inputs.held.wait(10)
        waiting = engine.submit(first, ToyInputs(2.0))
        engine.reset(second)
        following = engine.submit(second, ToyInputs(3.0))
        hold.set()
        with pytest.raises(SessionEnded):
            running.result(10)
        waiting.result(10)
        following.result(10)
        assert engine.describe(second).num_chunks == 1
        assert engine.describe(first).num_chunks == number + 2
    balanced(engine)


def test_a_waiting_tick_counts_the_room_of_a_session_that_is_being_closed() -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=1)
    first, second = engine.open_session(), engine.open_session()
    assert engine.describe(first).parked
    go_on = pause(engine)
    waiting = engine.submit(first, ToyInputs(1.0))
    engine.close(second, "done")
    go_on.set()
    waiting.result(10)
    balanced(engine)


def test_a_waiting_tick_waits_for_a_copy_that_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=1)
    first, second = engine.open_session(), engine.open_session()
    engine.submit(second, ToyInputs(1.0)).result(10)
    with slow(monkeypatch, ParkJob) as begun:
        parking = threading.Thread(target=engine.park, args=(second,))
        parking.start()
        assert begun.wait(10)
        waiting = engine.submit(first, ToyInputs(1.0))
        rest(engine)
        assert not waiting.done(), "it was refused, although a room is about to come"
    waiting.result(10)
    parking.join(10)
    balanced(engine)


@pytest.mark.parametrize("job", [ParkJob, ResumeJob])
def test_a_long_copy_holds_up_nobody(monkeypatch: pytest.MonkeyPatch, job: type) -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=3)
    copied, other = engine.open_session(), engine.open_session()
    for session in (copied, other):
        engine.submit(session, ToyInputs(1.0)).result(10)
    if job is ResumeJob:
        engine.park(copied)
    with slow(monkeypatch, job) as begun:
        act = engine.park if job is ParkJob else lambda session: engine.submit(session, ToyInputs(2.0)).result(10)
        thread = threading.Thread(target=act, args=(copied,))
        thread.start()
        assert begun.wait(10)
        started = time.perf_counter()
        engine.capacity(), engine.stats(), engine.describe(copied), engine.block_map(), engine.health()
        future = engine.submit(other, ToyInputs(2.0))
        asked = time.perf_counter() - started
        future.result(10)
        engine.close(engine.open_session(), "done")
        later = engine.submit(copied, ToyInputs(3.0)) if job is ParkJob else None
    assert asked < 0.5, f"asking took {asked:.3f} s while a copy was made"
    thread.join(10)
    if later is not None:
        later.result(10)
    assert engine.describe(copied).num_chunks == 2
    balanced(engine)


def test_a_session_that_is_reset_or_closed_while_it_is_copied_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=3)
    for end in (engine.reset, lambda session: engine.close(session, "test")):
        for job in (ParkJob, ResumeJob):
            session = engine.open_session()
            engine.submit(session, ToyInputs(1.0)).result(10)
            if job is ResumeJob:
                engine.park(session)
            with monkeypatch.context() as patch, slow(patch, job) as begun:
                tick = engine.submit(session, ToyInputs(2.0)) if job is ResumeJob else None
                thread = threading.Thread(target=engine.park, args=(session,))
                if tick is None:
                    thread.start()
                assert begun.wait(10)
                ended = end(session)
                if tick is not None:
                    with pytest.raises(SessionEnded):
                        tick.result(10)
            ended.result(10)
            if tick is None:
                thread.join(10)
            rest(engine)
            assert engine.core.cache.pool.num_used == 0
            if end == engine.reset:
                engine.submit(session, ToyInputs(3.0)).result(10)
                assert engine.describe(session).num_chunks == 1
                engine.close(session, "done").result(10)
    assert engine.capacity().num_charged == engine.capacity().blocks_shared
    balanced(engine)


def test_copies_and_messages_that_do_not_end_make_the_engine_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=2, stuck_after_s=0.1)
    session = engine.open_session()
    engine.submit(session, ToyInputs(1.0)).result(10)
    with slow(monkeypatch, ParkJob) as begun:
        thread = threading.Thread(target=engine.park, args=(session,))
        thread.start()
        assert begun.wait(10)
        time.sleep(0.2)
        assert "one copy has run" in engine.health().reason
    thread.join(10)
    go_on = pause(engine)
    time.sleep(0.3)
    assert "one turn has run" in engine.health().reason
    go_on.set()
    time.sleep(0.1)
    assert engine.health().ready
    balanced(engine)


def test_host_memory_for_parked_sessions_has_a_limit_and_a_reason() -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=1, max_parked_bytes=1)
    session = engine.open_session()
    engine.submit(session, ToyInputs(1.0)).result(10)
    for refused in (lambda: engine.park(session), engine.open_session):
        with pytest.raises(AdmissionRefused, match=r"no room on the host .* larger max_parked_bytes"):
            refused()
    engine.submit(session, ToyInputs(2.0)).result(10)
    assert engine.describe(session).num_chunks == 2
    balanced(engine)


@pytest.mark.parametrize("how", ["of another engine", "without room"])
def test_a_refused_restore_loses_nothing(how: str) -> None:
    engine, other = (make_toy_engine(ToyModel("slide"), max_sessions=2, park_when_full=False) for _ in range(2))
    session = engine.open_session()
    engine.submit(session, ToyInputs(1.0)).result(10)
    engine.park(session)
    if how == "without room":
        source = engine.open_session()
        engine.submit(source, ToyInputs(1.0)).result(10)
        snapshot = engine.snapshot(source)
        with pytest.raises(AdmissionRefused):
            engine.restore(session, snapshot)
        engine.close(source, "makes room")
        engine.release(snapshot)
    else:
        source = other.open_session()
        other.submit(source, ToyInputs(1.0)).result(10)
        with pytest.raises(SnapshotNotFound):
            engine.restore(session, other.snapshot(source))
    engine.submit(session, ToyInputs(2.0)).result(10)
    assert engine.describe(session).num_chunks == 2, "its history was lost"
    balanced(engine)
    other.shutdown()


def no_generator(self: Any, kv: Any, state: Any, inputs: Any) -> Any:
    return torch.zeros(3)


def no_outcome(self: Any, kv: Any, state: Any, inputs: Any) -> Any:
    yield OnHost(lambda: None, "preprocess")
    return torch.zeros(3)


def no_request(self: Any, kv: Any, state: Any, inputs: Any) -> Any:
    yield "please"


def too_few_outputs(self: Any, kv: Any, state: Any, inputs: Any) -> Any:
    kv.reset()
    kv.set_conditioning("left", "text", kv.cache.conditioning.publish("mine", 5, [(torch.zeros(5, 1, 2),) * 2] * 2))
    yield Forward((Row(kv.prepare("left", CHUNK, False), kv.conditioning("left"), 0, None),), "denoise")
    return Outcome(None, None)


def a_bad_encoder(self: Any, kv: Any, state: Any, inputs: Any) -> Any:
    yield Encode("number", inputs)
    return Outcome(None, None)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (no_generator, "expected a generator .* got Tensor"),
        (no_outcome, "expected to return Outcome.* got Tensor"),
        (no_request, "expected to be asked for a Forward, an Encode or OnHost, got str"),
        (too_few_outputs, "expected a list with an output for each of 1 rows or payloads, got 0"),
        (a_bad_encoder, "expected a list .* got int"),
    ],
)
def test_what_a_model_does_wrong_fails_its_own_tick_with_what_was_expected(
    monkeypatch: pytest.MonkeyPatch, program: Any, expected: str
) -> None:
    model = ToyModel("slide")
    engine = make_toy_engine(model, max_sessions=2)
    good, bad = engine.open_session(), engine.open_session()
    engine.submit(good, ToyInputs(1.0)).result(10)
    free = engine.core.cache.pool.num_free
    with monkeypatch.context() as patch:
        patch.setattr(ToyModel, "program", program)
        if program is too_few_outputs:
            patch.setattr(ToyModel, "forward", lambda self, cache, rows: [])
        if program is a_bad_encoder:
            patch.setattr(ToyModel, "encode", lambda self, encoder, payloads: 7)
        with pytest.raises(ModelError, match=expected):
            engine.submit(bad, ToyInputs(1.0)).result(10)
    rest(engine)
    assert engine.health().ready
    assert engine.core.cache.pool.num_free == free
    for session in (good, bad):
        engine.submit(session, ToyInputs(2.0)).result(10)
    balanced(engine)


def test_stages_add_up_to_the_total_under_load() -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=8, max_rows=4)
    sessions = [engine.open_session() for _ in range(8)]
    for _ in range(3):
        futures = [(time.perf_counter(), engine.submit(session, ToyInputs(1.0))) for session in sessions]
        for submitted, future in futures:
            timings = dict(future.result(10).info.timings)
            seen = 1e3 * (time.perf_counter() - submitted)
            total = timings.pop("total")
            assert sum(timings.values()) == pytest.approx(total, rel=0.02)
            assert 0 < total <= seen
    assert timings["queue"] > 0
    balanced(engine)


def test_a_failed_tick_is_not_published_as_history() -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=1)
    session = engine.open_session()
    engine.submit(session, ToyInputs(1.0)).result(10)
    with pytest.raises(Injected):
        engine.submit(session, ToyInputs(2.0, fail_at="draft")).result(10)
    assert engine.describe(session).num_chunks == 1 == inside(engine, session).kv.num_chunks
    balanced(engine)


def test_sessions_open_and_close_while_others_wait_for_room() -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=2)
    sessions = [engine.open_session() for _ in range(6)]
    stop, errors = threading.Event(), []

    def churn() -> None:
        while not stop.is_set():
            try:
                engine.close(engine.open_session(), "churn")
            except AdmissionRefused:
                pass
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(30):
        futures = [engine.submit(session, ToyInputs(float(number))) for session in sessions]
        for future in futures:
            future.result(20)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not errors
    balanced(engine)
