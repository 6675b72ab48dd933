"""DreamZero's tick against the reference's recordings, and its rules."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import inside, make_engine, make_inputs, rest  # noqa: E402

from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.errors import BadRequest  # noqa: E402
from worldkv.load import load_engine  # noqa: E402
from worldkv.models.base import Encode, Forward, Request, batches_of_alike  # noqa: E402
from worldkv.models.dreamzero.inputs import fill_chunk  # noqa: E402
from worldkv.models.dreamzero.steps import Steps  # noqa: E402
from worldkv.models.dreamzero.verify import GoldenObserver, GoldenRecording, relative_error  # noqa: E402
from worldkv.models.world_action import TickInputs  # noqa: E402

TOLERANCE = 1e-4


def test_every_recorded_quantity_of_a_rollout_is_reproduced(golden_folder: Path) -> None:
    recording = GoldenRecording.open(golden_folder)
    observer = GoldenObserver(recording)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine = load_engine(
            golden_folder,
            EngineConfig(block_size=16),
            negative_prompt=recording.prompt("unconditional"),
            observer=observer.observe,
        )
    session = engine.open_session()
    observer.watch(engine.model, inside(engine, session).kv)
    for call in recording.calls["calls"]:
        observer.begin_call(call["call"])
        result = engine.submit(session, recording.inputs(call["call"])).result().result
        observer.end_call(result)
        assert result.start_frame == call["denoise_start_frame"]
        assert (result.restart_reason is not None) == call["reset"]
    for name, expected in recording.expected(engine.model).items():
        if not name.endswith("decoded_video"):
            error = relative_error(observer.ours[name], expected)
            assert error < TOLERANCE, f"{name}: relative error {error:.2e}"
    engine.shutdown()


@pytest.mark.parametrize("steps", [5, 6, 7, 8, "all", "dynamic"])
def test_a_tick_runs_the_chosen_steps(steps: Steps) -> None:
    ran: list[Request] = []
    engine = make_engine("ti2v", steps=steps, observer=lambda kv, request, result: ran.append(request))
    result = engine.submit(engine.open_session(), make_inputs(engine, 0, 1)).result().result
    num_steps = len([request for request in ran if isinstance(request, Forward) and request.stage == "denoise"])
    assert np.isfinite(result.actions).all()
    assert num_steps == {"all": 16}.get(str(steps), num_steps if steps == "dynamic" else steps)
    assert num_steps >= 2
    engine.shutdown()


def test_the_seeded_noise_is_the_same_at_every_tick() -> None:
    engine = make_engine("ti2v")
    model = engine.model
    first, second = (model._noise(make_inputs(engine, seed, 1), (2, 6)) for seed in (0, 1))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    engine.shutdown()


def test_four_frames_become_nine_and_eight_are_not_repeated() -> None:
    for num_frames, expected in ((4, [0, 0, 0, 1, 1, 2, 2, 3, 3]), (8, [0, *range(8)]), (9, list(range(9)))):
        frames = np.arange(num_frames, dtype=np.uint8).reshape(-1, 1, 1, 1)
        assert fill_chunk(frames, 2).ravel().tolist() == expected


def test_a_restart_on_four_frames_begins_with_the_newest() -> None:
    engine = make_engine("ti2v")
    session = engine.open_session()
    many = make_inputs(engine, 0, 4)
    from_four = engine.submit(session, many).result().result
    engine.reset(session)
    newest = make_inputs(engine, 0, 1)
    newest = TickInputs(many.frames[-1:], many.state, newest.token_ids, newest.attention_mask)
    assert np.array_equal(from_four.actions, engine.submit(session, newest).result().result.actions)
    engine.shutdown()


@pytest.mark.parametrize("kind", ["ti2v", "i2v"])
def test_an_imagined_rollout_feeds_predictions_back_past_a_window_restart(kind: str) -> None:
    engine = make_engine(kind, block_size=16)
    session = engine.open_session()
    first = engine.submit(session, make_inputs(engine, 0, 1)).result().result
    dream = dataclasses.replace(make_inputs(engine, 1), frames=None)
    given = dataclasses.replace(dream, latents=first.video_latents)
    by_hand = engine.submit(engine.fork(session), given).result().result
    results = [engine.submit(session, dream).result().result for _ in range(5)]
    assert torch.equal(results[0].observed_latents, first.video_latents)
    assert np.array_equal(results[0].actions, by_hand.actions)
    assert [result.restart_reason for result in results] == [None, None, None, "window full", None]
    assert all(np.isfinite(result.actions).all() for result in results)
    engine.shutdown()


def test_nothing_can_be_imagined_before_the_first_frames() -> None:
    engine = make_engine("ti2v")
    with pytest.raises(BadRequest, match="frames"):
        engine.submit(engine.open_session(), dataclasses.replace(make_inputs(engine, 0), frames=None)).result()
    engine.shutdown()


def test_another_seed_gives_another_future_and_the_same_seed_the_same() -> None:
    engine = make_engine("ti2v")
    session = engine.open_session()
    engine.submit(session, make_inputs(engine, 0, 1)).result()
    futures = [
        engine.submit(engine.fork(session), make_inputs(engine, 1, noise_seed=seed)).result().result
        for seed in (1, 2, 1)
    ]
    assert np.array_equal(futures[0].actions, futures[2].actions)
    assert not np.array_equal(futures[0].actions, futures[1].actions)
    engine.shutdown()


def test_without_guidance_one_branch_runs_and_is_charged() -> None:
    ran: list[Request] = []
    plain = make_engine("ti2v", cfg_scale=1.0, observer=lambda kv, request, result: ran.append(request))
    guided = make_engine("ti2v")
    session = plain.open_session()
    result = plain.submit(session, make_inputs(plain, 0, 1)).result().result
    assert np.isfinite(result.actions).all()
    assert list(inside(plain, session).kv.branches) == ["conditional"]
    rows = [row for request in ran if isinstance(request, Forward) for row in request.rows]
    assert {row.context.branch.name for row in rows} == {"conditional"}
    assert len(plain.core.cache.conditioning) == 2, "prompt and image, and no negative prompt"
    spec = guided.core.cache.spec
    saved = spec.blocks_per_branch(128)
    assert plain.capacity().blocks_per_session == guided.capacity().blocks_per_session - saved
    plain.shutdown(), guided.shutdown()


def test_encoders_batch_equal_shapes_and_keep_the_order() -> None:
    engine = make_engine("ti2v")
    torch.manual_seed(0)
    videos = [torch.rand(1, 3, n, 32, 96) * 2 - 1 for n in (1, 9, 1, 9)]
    together = engine.model.encode("video", [(video,) for video in videos])
    alone = [engine.model.encode("video", [(video,)])[0] for video in videos]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    engine.shutdown()


def test_a_prompt_that_comes_back_is_not_encoded_again() -> None:
    engine = make_engine("ti2v", block_size=16)
    calls, encode = [], engine.model.encoders.text.encode

    def counted(*payload: Any) -> Any:
        calls.append(len(payload[0]))
        return encode(*payload)

    engine.model.encoders.text.encode = counted
    results = []
    for _ in range(2):  # between the two nobody holds the prompt's K/V
        session = engine.open_session()
        results.append(engine.submit(session, make_inputs(engine, 0, 1)).result().result)
        engine.close(session, "done")
        rest(engine)
        assert len(engine.core.cache.conditioning) == 0
    assert sum(calls) == 2, "the prompt and the negative one, once each"
    assert np.array_equal(results[0].actions, results[1].actions)
    engine.shutdown()


def test_an_observer_sees_the_texts_that_somebody_had_encoded() -> None:
    ran: list[Request] = []
    engine = make_engine(max_sessions=2, observer=lambda kv, request, result: ran.append(request))
    for _ in range(2):
        engine.submit(engine.open_session(), make_inputs(engine, 0, 1)).result()
    texts = [request for request in ran if isinstance(request, Encode) and request.encoder == "text"]
    assert len(texts) == 2, "the prompt and the negative one, once each"
    assert engine.stats().conditioning_misses == 3
    engine.shutdown()


def test_large_inputs_are_encoded_in_smaller_batches() -> None:
    small, large = (torch.zeros(1, 4),), (torch.zeros(1, 40),)
    payloads = [small, large, small, large, small, large]
    assert batches_of_alike(payloads, 80) == [[0, 2, 4], [1, 3], [5]]
    assert batches_of_alike(payloads, 1) == [[0], [2], [4], [1], [3], [5]]
