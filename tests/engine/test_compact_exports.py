"""Sessions in a few bytes: their pages are computed anew, bit for bit where their history is complete, and it is told
where it is not."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import causal  # noqa: E402
from engines import droid_observation, inside, make_engine, make_inputs, random_checkpoint, rest  # noqa: E402
from test_exports import nothing_is_held, same, tick  # noqa: E402
from toy_model import ToyModel, make_toy_engine  # noqa: E402

from worldkv.engine.engine import Engine, EngineConfig  # noqa: E402
from worldkv.errors import AdmissionRefused, BadRequest  # noqa: E402
from worldkv.load import load_policy  # noqa: E402
from worldkv.models.causal_wan.random import TINY  # noqa: E402
from worldkv.models.session_file import Part, read, write  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(("kind", "policy"), [("i2v", "reset"), ("ti2v", "reset"), ("ti2v", "slide")])
def test_a_session_without_its_pages_goes_on_bit_for_bit_while_its_history_is_complete(kind: str, policy: str) -> None:
    here = make_engine(kind, block_size=16, window_policy=policy)
    there = make_engine(kind, block_size=32, window_policy=policy, max_sessions=2)
    session = here.open_session()
    exact = []
    for number, prompt in enumerate([0, 0, 0, 0, 0, 0, 1, 1]):
        if number == 2:
            here.park(session)
        export = here.export(session, compact=True)
        assert number == 0 or export.num_bytes < here.export(session).num_bytes / 2
        expected = tick(here, session, number, prompt)
        rebuilt = there.import_session(export.to_bytes())
        assert there.describe(rebuilt).inexact == export.inexact
        again = there.export(rebuilt, compact=True)
        assert (again.to_bytes() == export.to_bytes()) or export.inexact, f"another session after tick {number}"
        found = tick(there, rebuilt, number, prompt)
        exact.append(export.inexact is None)
        assert same(found, expected) == exact[-1] or not exact[-1], f"tick {number}"
        assert found.start_frame == expected.start_frame, "its frames stand at other places"
        assert np.isfinite(found.actions).all()
        there.close(rebuilt, "done").result()
        assert nothing_is_held(there)
    assert exact == [True] * 8 if policy == "reset" else exact[:4] == [True] * 4 and not all(exact) and exact[-1], exact
    here.shutdown()
    there.shutdown()


def test_where_it_cannot_be_exact_that_is_told_and_refused_on_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine("ti2v", block_size=16, window_policy="slide", max_sessions=2)
    session = engine.open_session()
    for number in range(8):
        tick(engine, session, number)
    export = engine.export(session, compact=True)
    assert export.inexact is not None
    assert "have left the window" in export.inexact
    with pytest.raises(BadRequest, match=r"import: exact: .* have left the window"):
        engine.import_session(export.to_bytes(), exact=True)
    rebuilt = engine.import_session(export.to_bytes(), "moved")
    assert engine.describe(rebuilt).inexact == export.inexact
    assert "session moved does not go on exactly" in caplog.text
    for number in range(8, 11):
        expected, found = tick(engine, session, number), tick(engine, rebuilt, number)
        assert (found.start_frame, found.restart_reason) == (expected.start_frame, None)
    pages = engine.export(rebuilt).to_bytes()
    engine.close(session, "done").result()
    with pytest.raises(BadRequest, match="have left"):
        engine.import_session(pages, exact=True)
    moved = engine.import_session(pages)
    assert engine.describe(moved).inexact is not None, "forgotten by the second move"
    assert same(tick(engine, moved, 11), tick(engine, rebuilt, 11))
    engine.reset(moved).result()
    assert engine.describe(moved).inexact is None
    engine.shutdown()


def test_an_imagined_window_is_rebuilt_too() -> None:
    engine = make_engine("i2v", block_size=16, max_sessions=2)
    session = engine.open_session()
    for number in range(7):
        inputs = make_inputs(engine, number, 1 if number == 0 else 4)
        inputs = inputs if number < 2 else replace(inputs, frames=None)
        if number:
            rebuilt = engine.import_session(engine.export(session, compact=True).to_bytes(), exact=True)
            found = engine.submit(rebuilt, inputs).result().result
            engine.close(rebuilt, "done").result()
        expected = engine.submit(session, inputs).result().result
        assert number == 0 or same(found, expected), number
    engine.shutdown()


VIDEO = [
    (0, {}),
    (0, {}),
    (1, {"switch": "keep"}),
    (1, {}),
    (2, {"switch": "recache"}),
    (2, {}),
    (0, {"switch": "blend", "blend_blocks": 3}),
    (0, {}),
]


@pytest.mark.parametrize("rope", ["absolute", "relative"])
@pytest.mark.parametrize("window", [-1, 12])
def test_a_video_goes_on_bit_for_bit_whatever_its_prompts_were(rope: str, window: int) -> None:
    settings = replace(TINY, rope=rope, window_frames=24 if window == -1 else window)
    here, there = causal.make_engine(settings, 16), causal.make_engine(settings, 64, max_sessions=2)
    session, exact = here.open_session(), []
    for number, (prompt, more) in enumerate(VIDEO):
        export = here.export(session, compact=True)
        request = causal.make_request(prompt, seed=4 if number == 0 else None, **more)
        expected = causal.run(here, session, request)
        rebuilt = there.import_session(export.to_bytes())
        found = causal.run(there, rebuilt, request)
        exact.append(export.inexact is None)
        assert not exact[-1] or causal.same(found, expected), f"block {number}"
        assert found.first_frame == expected.first_frame
        assert found.video.shape == expected.video.shape
        assert torch.isfinite(found.latents).all()
        there.close(rebuilt, "done").result()
        assert nothing_is_held(there)
    assert all(exact) if window == -1 else not all(exact) and exact[0] and exact[1], exact
    here.shutdown()
    there.shutdown()


def test_a_second_blend_in_one_window_is_told_and_a_recache_makes_it_whole() -> None:
    settings = replace(TINY, window_frames=24)
    engine = causal.make_engine(settings, 16, max_sessions=2)
    session, told = engine.open_session(), []
    for prompt, more in [
        (0, {}),
        (1, {"switch": "blend", "blend_blocks": 3}),
        (2, {"switch": "blend"}),
        (3, {}),
        (3, {}),
    ]:
        causal.run(engine, session, causal.make_request(prompt, **more))
        told.append(engine.export(session, compact=True).inexact)
    assert [reason is None for reason in told] == [True, True, False, True, True], told
    assert "two blends" in str(told[2])
    rebuilt = engine.import_session(engine.export(session, compact=True).to_bytes(), exact=True)
    request = causal.make_request(3)
    assert causal.same(causal.run(engine, rebuilt, request), causal.run(engine, session, request))
    engine.shutdown()


def test_a_clip_that_a_video_starts_from_is_rebuilt() -> None:
    engine = causal.make_engine(replace(TINY, window_frames=24), 16, max_sessions=2)
    session = engine.open_session()
    frames = TINY.frames_per_block
    clip = np.random.default_rng(3).integers(0, 256, (1 + 4 * (2 * frames - 1), 32, 48, 3), dtype=np.uint8)
    causal.run(engine, session, causal.make_request(0, clip=clip))
    causal.run(engine, session, causal.make_request(0))
    rebuilt = engine.import_session(engine.export(session, compact=True).to_bytes(), exact=True)
    request = causal.make_request(1)
    assert causal.same(causal.run(engine, rebuilt, request), causal.run(engine, session, request))
    engine.shutdown()


def test_a_robot_goes_on_with_what_it_saw_and_said() -> None:
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=2))
    session, rng = policy.open_session(), np.random.default_rng(1)
    for number in range(3):
        session.infer(droid_observation(rng, 1 if number == 0 else 2)).result()
    data = session.begin_export(compact=True).result().to_bytes()
    rebuilt = policy.imported(policy.begin_import(data, "again", exact=True).result())
    seen = droid_observation(rng, 2)
    assert np.array_equal(rebuilt.infer(seen).result().actions, session.infer(seen).result().actions)
    policy.engine.shutdown()


def test_a_rebuild_that_fails_leaves_nothing_behind_and_disturbs_nobody() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=2)
    session = engine.open_session("mine")
    for number in range(3):
        tick(engine, session, number)
    data = engine.export(session, compact=True).to_bytes()
    used, charged = engine.core.cache.pool.num_used, engine.capacity().num_charged
    forward, calls = engine.model.forward, []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return forward(*arguments)

    engine.model.forward = failing
    with pytest.raises(RuntimeError, match="no memory"):
        engine.import_session(data, "other")
    engine.model.forward = forward
    rest(engine)
    assert (engine.core.cache.pool.num_used, engine.capacity().num_charged) == (used, charged)
    other = engine.import_session(data, "other", exact=True)
    assert same(tick(engine, other, 3), tick(engine, session, 3))
    engine.shutdown()


def test_an_import_without_room_is_refused_before_it_is_rebuilt() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=1, park_when_full=False)
    session = engine.open_session("mine")
    tick(engine, session, 0)
    data = engine.export(session, compact=True).to_bytes()
    with pytest.raises(AdmissionRefused):
        engine.import_session(data, "other")
    assert set(engine.core.names) == {"mine"}
    engine.shutdown()


def test_while_one_is_rebuilt_others_are_served_and_parked_as_ever() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=2, batch_invariant=True)
    first = engine.open_session()
    for number in range(3):
        tick(engine, first, number)
    data = engine.export(first, compact=True).to_bytes()
    coming, inputs = engine.begin_import(data), make_inputs(engine, 3)
    expected = engine.submit(first, inputs)
    rebuilt = [coming.result()]
    expected.result()
    rebuilt += [engine.import_session(data) for _ in range(2)]
    assert engine.stats().num_parked == 2
    for session in rebuilt:
        assert same(engine.submit(session, inputs).result().result, expected.result().result)
    engine.shutdown()


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ([path] if path else []) + [place for key, each in named for place in _places(each, (*path, key))]


@pytest.mark.parametrize("family", ["dreamzero", "causal_wan"])
def test_a_compact_export_that_was_changed_breaks_no_more_than_its_import(family: str) -> None:
    if family == "dreamzero":
        engine: Engine[Any, Any, Any] = make_engine("i2v", block_size=16, max_sessions=1)
        session = engine.open_session()
        for number in range(2):
            tick(engine, session, number)
    else:
        engine = causal.make_engine(replace(TINY, window_frames=24), 16, max_sessions=1)
        session = engine.open_session()
        for prompt in (0, 1):
            causal.run(engine, session, causal.make_request(prompt, switch="blend"))
    about, tensors = read(engine.export(session, compact=True).to_bytes())
    engine.close(session, "done").result()
    parts = {name: Part.of(tensor) for name, tensor in tensors.items()}
    others = (None, -1, "x", [], {}, 1e300)
    changes: list[tuple[Any, Any]] = [(path, others[i % 6]) for i, path in enumerate(_places(about["state"]))]
    for path, other in changes:
        changed = copy.deepcopy(about["state"])
        place: Any = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = other
        _import(engine, write({**about, "state": changed}, parts).to_bytes(), (path, other))
    for name, tensor in tensors.items():
        for bad in (tensor[:0], tensor.flatten(), tensor.to(torch.float16), torch.cat([tensor, tensor])):
            _import(engine, write(about, {**parts, name: Part.of(bad.contiguous())}).to_bytes(), (name, bad.shape))
    engine.shutdown()


def _import(engine: Engine[Any, Any, Any], data: bytes, what: object) -> None:
    try:
        engine.close(engine.import_session(data), "done").result()
    except BadRequest as error:
        assert str(error).startswith("import: "), what  # noqa: PT017
    rest(engine)
    assert engine.core.cache.pool.num_used == 0, what
    assert not engine.core.names, what


def test_a_model_that_cannot_compute_it_anew_says_so() -> None:
    toy = make_toy_engine(ToyModel())
    with pytest.raises(BadRequest, match="cannot leave"):
        toy.export(toy.open_session(), compact=True)
    toy.shutdown()


def test_what_a_rebuild_needs_lies_on_the_host() -> None:
    engine = make_engine("ti2v", block_size=16)
    session = engine.open_session()
    for number in range(7):
        tick(engine, session, number)
    past = inside(engine, session).state.past
    assert sum(each.shape[1] for each in past.observed) <= engine.core.cache.spec.window.max_chunks
    assert all(each.device.type == "cpu" for each in past.observed)
    engine.shutdown()


def test_what_sessions_remember_takes_of_the_host_s_room_for_parked_ones() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=2, max_parked_bytes=1 << 30)
    session, residency = engine.open_session(), engine.core.residency
    assert engine.inspect(lambda _: residency.bytes_parked) == 0
    for number in range(3):
        tick(engine, session, number)
    export = engine.export(session, compact=True)
    held = engine.inspect(lambda _: residency.bytes_parked)
    assert held == sum(piece.nbytes for piece in export.pieces)
    engine.park(session)
    assert engine.inspect(lambda _: residency.bytes_parked) == held + engine.describe(session).bytes_parked
    residency._config = replace(residency._config, max_parked_bytes=residency.bytes_parked)
    with pytest.raises(AdmissionRefused, match=r"no room on the host .* larger max_parked_bytes"):
        engine.export(session, compact=True)
    residency._config = replace(residency._config, max_parked_bytes=residency.bytes_parked + held)
    for _ in range(2):
        assert engine.export(session, compact=True).to_bytes() == export.to_bytes(), "room was not given back"
    engine.close(session, "done").result()
    assert engine.inspect(lambda _: residency.bytes_parked) == 0
    engine.shutdown()
