"""Who is served when: a joiner soon, the most urgent first, nobody never; and what shares a batch."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import inside, make_engine, make_inputs, pause  # noqa: E402
from toy_model import ToyInputs, ToyModel, make_toy_engine  # noqa: E402

from worldkv.engine import scheduler  # noqa: E402
from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.models.base import Encode  # noqa: E402


def record(engine: Engine) -> list[list[Any]]:
    """The batches that the engine runs from now on, each a list of requests, as they begin."""
    batches: list[list[Any]] = []
    executor = engine.core.executor
    run = executor.run

    def recorded(requests: list[Any]) -> list[Any]:
        batches.append(requests)
        return run(requests)

    executor.run = recorded  # type: ignore[method-assign]
    return batches


def times_served(engine: Engine, batch: list[Any], session: Any, inputs: ToyInputs | None = None) -> int:
    """Rows of the session's in a forward, or encoders run for its inputs."""
    branches = inside(engine, session).kv.branches.values()
    rows = [row for request in batch for row in getattr(request, "rows", ())]
    payloads = [request.payload for request in batch if isinstance(request, Encode)]
    return sum(row.context.branch in branches for row in rows) + sum(payload is inputs for payload in payloads)


def ready(engine: Engine, count: int) -> list[Any]:
    """Sessions whose conditioning is stored, so that a tick is three forwards."""
    sessions = [engine.open_session() for _ in range(count)]
    for session in sessions:
        engine.submit(session, ToyInputs(0.0)).result(10)
    return sessions


def busy(engine: Engine, session: Any) -> tuple[threading.Event, Any]:
    """A forward under way that ends when the event is set, and its tick's future."""
    hold = threading.Event()
    inputs = ToyInputs(1.0, hold=hold)
    future = engine.submit(session, inputs)
    assert inputs.held.wait(10)
    return hold, future


def test_a_joiner_shares_the_very_next_forward_where_it_fits() -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=5)
    *others, joiner = ready(engine, 5)
    batches = record(engine)
    hold, first = busy(engine, others[0])
    running = [first, *(engine.submit(session, ToyInputs(1.0)) for session in others[1:])]
    inputs, began = ToyInputs(2.0), len(batches)
    running.append(engine.submit(joiner, inputs))
    hold.set()
    for future in running:
        future.result(10)
    assert times_served(engine, batches[began], joiner, inputs)
    engine.shutdown()


@pytest.mark.parametrize("max_rows", [2, 4])
def test_where_forwards_are_full_who_came_first_ends_first_and_nobody_waits_for_those_who_came_later(
    max_rows: int,
) -> None:
    """All carried on together would all end last: a full device gains nothing by it."""
    engine = make_toy_engine(ToyModel("slide"), max_sessions=5, max_rows=max_rows)
    first, *others = ready(engine, 5)
    batches = record(engine)
    hold, running = busy(engine, first)
    order: list[int] = []
    futures = [running]
    for number, session in enumerate(others):
        futures.append(engine.submit(session, ToyInputs(1.0)))
        futures[-1].add_done_callback(lambda _, number=number: order.append(number))
    began = len(batches)
    hold.set()
    for future in futures:
        future.result(10)
    assert order == [0, 1, 2, 3]
    ends = [
        max(n for n, batch in enumerate(batches[began:]) if times_served(engine, batch, session)) for session in others
    ]
    forwards_of_a_tick = 3
    for number, end in enumerate(ends):
        together = max_rows // 2
        assert end < forwards_of_a_tick * (number // together + 2), f"{ends}: number {number} waited for later ones"
    engine.shutdown()


def test_the_earliest_deadline_is_done_first_and_none_is_last() -> None:
    engine = make_toy_engine(ToyModel("slide"), max_sessions=5, max_rows=2)
    first, *others = ready(engine, 5)
    hold, running = busy(engine, first)
    order: list[str] = []
    now = time.perf_counter()
    due = {"third": now + 0.3, "first": now + 0.1, "none": None, "second": now + 0.2}
    futures = [running]
    for session, (name, deadline) in zip(others, due.items(), strict=True):
        future = engine.submit(session, ToyInputs(2.0), deadline)
        future.add_done_callback(lambda _, name=name: order.append(name))
        futures.append(future)
    hold.set()
    for future in futures:
        future.result(10)
    assert order == ["first", "second", "third", "none"]
    engine.shutdown()


@pytest.mark.parametrize("early", [-0.001, 0.0, 1000.0], ids=["a moment ahead", "now", "long past"])
def test_nobody_starves_under_a_steady_stream_of_urgent_ticks(early: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PATIENCE_S", 0.05)
    engine = make_toy_engine(ToyModel("slide"), max_sessions=3, max_rows=2)
    patient, *urgent = ready(engine, 3)
    served, enough = [0], threading.Event()

    def again(session: Any) -> None:
        if not enough.is_set():
            future = engine.submit(session, ToyInputs(0.0), time.perf_counter() - early)
            served[0] += 1
            future.add_done_callback(lambda _: again(session))

    for session in urgent:
        again(session)
    try:
        for _ in range(2):
            engine.submit(patient, ToyInputs(1.0)).result(5)
    finally:
        enough.set()
    assert served[0] > 20, "the stream has to be steady"
    engine.shutdown()


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 1), (2, 100), (5, 100), (100, 17), (16, 32768)])
def test_no_batch_is_larger_than_the_limits_and_each_is_of_one_kind(max_rows: int, max_tokens: int) -> None:
    limits = {"max_rows": max_rows, "max_tokens": max_tokens, "max_encodes": max_rows}
    engine = make_toy_engine(ToyModel("slide"), max_sessions=6, **limits)
    batches, dice = record(engine), random.Random(max_rows)
    sessions = [engine.open_session() for _ in range(6)]
    for _ in range(12):
        go_on = pause(engine)
        futures = [engine.submit(session, ToyInputs(1.0, dice.randrange(9))) for session in sessions]
        go_on.set()
        for future in futures:
            future.result(10)
    sizes = set()
    for batch in batches:
        kinds = {getattr(request, "encoder", "a forward") for request in batch}
        assert len(kinds) == 1, f"{kinds} share a batch"
        rows = [row for request in batch for row in getattr(request, "rows", [None])]
        num_tokens = sum(row.context.num_tokens for row in rows if row is not None)
        sizes.add(len(batch))
        if len(batch) > 1:  # a tick's own rows always fit
            assert len(rows) <= max_rows, "max_rows, max_encodes"
            assert num_tokens <= max_tokens, "max_tokens"
    assert (max(sizes) > 1) == (max_rows > 1), "what fits shares a batch"
    engine.shutdown()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_new_prompts_are_encoded_together_unless_each_must_be_alone(batch_invariant: bool) -> None:
    model = ToyModel("slide")
    engine = make_toy_engine(model, max_sessions=3, batch_invariant=batch_invariant)
    calls, encode = [], model.encode

    def counted(encoder: str, payloads: Any) -> Any:
        calls.append(len(payloads))
        return encode(encoder, payloads)

    model.encode = counted  # type: ignore[method-assign]
    sessions = [engine.open_session() for _ in range(3)]
    batches, go_on = record(engine), pause(engine)
    futures = [engine.submit(session, ToyInputs(1.0, prompt)) for prompt, session in enumerate(sessions)]
    go_on.set()
    for future in futures:
        future.result(10)
    assert len(batches[0]) == 3
    assert calls == ([1, 1, 1] if batch_invariant else [3])
    engine.shutdown()


def test_frames_are_encoded_together_where_their_shapes_agree() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=3)
    sessions = [engine.open_session() for _ in range(3)]
    for session in sessions:
        engine.submit(session, make_inputs(engine, 0, 1)).result()
    shapes, encoders = [], engine.model.encoding.graphed
    encode = encoders["video"]

    def recorded(pixels: Any) -> Any:
        shapes.append((pixels.shape[0], pixels.shape[2]))
        return encode(pixels)

    encoders["video"] = recorded
    go_on = pause(engine)
    num_frames = (4, 1, 4)  # the one that sends a single frame starts a new window, with an image that is stored
    futures = [
        engine.submit(session, make_inputs(engine, 0, n)) for session, n in zip(sessions, num_frames, strict=True)
    ]
    go_on.set()
    for future in futures:
        future.result()
    assert shapes == [(2, 9), (1, 1)], "(sessions, frames) of each call"
    engine.shutdown()
