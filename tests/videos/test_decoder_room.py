"""What a session of video keeps beside its K/V is charged, goes to the host with it, and comes back bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from causal import make_engine, make_request, run, same  # noqa: E402
from engines import inside  # noqa: E402

from worldkv.engine.room import Room  # noqa: E402
from worldkv.errors import AdmissionRefused  # noqa: E402
from worldkv.models.wan.encoders import VAEStream  # noqa: E402


def test_what_is_charged_is_what_a_session_ever_keeps_and_what_its_tick_rolls_back_to() -> None:
    engine = make_engine()
    session = engine.open_session()
    for _ in range(5):
        run(engine, session, make_request())
        kept = inside(engine, session).state.num_bytes
        assert 2 * kept <= engine.model.max_state_bytes
    for number in range(1, 4):  # the text on its way to another one, and that one's mixture on its way to the next
        run(engine, session, make_request(number, switch="blend"))
        state = inside(engine, session).state
        assert state.blend is not None
        assert 2 * state.num_bytes <= engine.model.max_state_bytes, "a mixture is kept that nobody was charged for"
    assert 2 * state.num_bytes == engine.model.max_state_bytes
    engine.shutdown()


def test_the_decoder_s_memory_leaves_room_for_fewer_sessions_and_the_sum_says_so() -> None:
    with_it, without = make_engine(max_sessions=2), make_engine(max_sessions=2, decodes=False, recache=False)
    assert with_it.capacity().blocks_of_state > without.capacity().blocks_of_state  # of a blend's text alone
    for engine in (with_it, without):
        capacity = engine.capacity()
        assert capacity.num_more_sessions == 2
        assert "for what it keeps beside its K/V" in capacity.explain()
    spec, state_bytes = with_it.model.spec, with_it.model.max_state_bytes
    room = Room.of(spec, 16, 4, state_bytes)
    alone = Room.of(spec, 16, 4)
    assert room.bytes_per_session == alone.bytes_per_session + state_bytes
    assert room.sessions_in(room.bytes_for(3)) == 3
    assert room.sessions_in(room.bytes_for(3) - 1) == 2
    for engine in (with_it, without):
        engine.shutdown()


def test_a_snapshot_takes_a_session_s_place() -> None:
    engine = make_engine(max_sessions=2, park_when_full=False)
    session = engine.open_session()
    run(engine, session, make_request())
    mark = engine.snapshot(session)
    with pytest.raises(AdmissionRefused, match="no room for another session"):
        engine.open_session()
    engine.release(mark)
    other = engine.open_session()
    assert run(engine, other, make_request()).first_frame == 0
    engine.shutdown()


@pytest.mark.parametrize("num_blocks", [1, 4])
def test_a_parked_session_s_decoder_is_on_the_host_and_counted_there(num_blocks: int) -> None:
    engine = make_engine()
    session = engine.open_session()
    for _ in range(num_blocks):
        run(engine, session, make_request(seed=2))
    fork = engine.fork(session)
    expected = run(engine, fork, make_request())
    moves: list[Any] = []
    move = engine.model.move_state

    def moving(state: Any, device: Any) -> Any:
        moves.append(str(device))
        return move(state, "cpu").to("cpu") if state.decoder is None else clone(move(state, "cpu"))

    engine.model.move_state = moving
    kept = inside(engine, session).state.num_bytes
    before = engine.stats().bytes_parked
    engine.park(session)
    info = engine.describe(session)
    kv = inside(engine, session).parked.num_bytes
    assert info.bytes_parked == kv + kept
    assert engine.stats().bytes_parked - before == kv + kept
    assert same(run(engine, session, make_request()), expected)
    assert moves == ["cpu", "cpu"], "to the host, and back"
    assert engine.stats().bytes_parked == before
    engine.shutdown()


def clone(state: Any) -> Any:
    """As a copy from another device would be: no tensor is the same object."""
    tails = [tail.clone() if isinstance(tail, torch.Tensor) else tail for tail in state.decoder.tails]
    stream = VAEStream(state.decoder.num_latent_frames, tails)
    return replace(state, recent=state.recent.clone(), decoder=stream)


def test_a_state_that_cannot_be_moved_leaves_the_session_where_it_is() -> None:
    engine = make_engine()
    session = engine.open_session()
    expected = [run(engine, session, make_request()) for _ in range(2)]
    again = engine.open_session()
    run(engine, again, make_request())
    move, fails = engine.model.move_state, [True]

    def failing(state: Any, device: Any) -> Any:
        if fails[0]:
            raise MemoryError("no memory")
        return move(state, device)

    engine.model.move_state = failing
    with pytest.raises(MemoryError):
        engine.park(again)
    assert not engine.describe(again).parked
    fails[0] = False
    engine.park(again)
    fails[0] = True
    with pytest.raises(MemoryError):
        engine.resume(again)
    assert engine.describe(again).parked
    fails[0] = False
    assert same(run(engine, again, make_request()), expected[1])
    engine.shutdown()


@pytest.mark.parametrize("mistake", ["raises", "no number"])
def test_a_session_whose_state_cannot_be_counted_is_not_parked_and_goes_on(mistake: str) -> None:
    engine = make_engine()
    session, alike = engine.open_session(), engine.open_session()
    for each in (session, alike):
        run(engine, each, make_request())
    engine.model.state_bytes = lambda state: 1 / 0 if mistake == "raises" else "many"
    with pytest.raises(ZeroDivisionError if mistake == "raises" else ValueError):
        engine.park(session)
    assert not engine.describe(session).parked
    assert same(run(engine, session, make_request()), run(engine, alike, make_request()))
    engine.shutdown()


def test_a_moved_state_that_cannot_be_counted_fails_its_parking_and_nothing_else() -> None:
    engine = make_engine()
    session = engine.open_session()
    run(engine, session, make_request())
    move, count = engine.model.move_state, engine.model.state_bytes
    engine.model.move_state = lambda state, device: "no state" if str(device) == "cpu" else move(state, device)
    parking = engine.begin_park(session)
    with pytest.raises(AttributeError):
        parking.result(10)
    engine.model.move_state, engine.model.state_bytes = move, count
    assert engine.health().ready
    assert run(engine, session, make_request()).first_frame == 3
    engine.shutdown()
