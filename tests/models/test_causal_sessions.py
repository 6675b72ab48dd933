"""What must hold for a block of causal Wan video whatever happens around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from causal import make_engine, make_request, relative_error, run, same  # noqa: E402
from engines import inside  # noqa: E402

from worldkv.errors import BadRequest  # noqa: E402
from worldkv.models.base import Forward  # noqa: E402
from worldkv.models.causal_wan.config import BRANCH, PRESETS  # noqa: E402
from worldkv.models.causal_wan.inputs import State, pixels_of  # noqa: E402
from worldkv.models.causal_wan.random import TINY  # noqa: E402
from worldkv.models.causal_wan.schedule import Schedule  # noqa: E402

ROPES = {rope: replace(TINY, rope=rope) for rope in ("absolute", "relative")}
each_rope = pytest.mark.parametrize("rope", ROPES)


def bits(engine: Any, session: Any) -> list[bytes]:
    kv = inside(engine, session).kv
    return [t.numpy().tobytes() for layer in range(2) for t in kv.layer_kv(BRANCH, layer)]


def rollout(num_blocks: int, seed: int, prompts: tuple[int, ...] = (0,)) -> list[Any]:
    """Requests of a session; with several prompts another one from every third block on."""
    return [make_request(prompts[number // 3 % len(prompts)], seed=seed) for number in range(num_blocks)]


@each_rope
@pytest.mark.parametrize("block_size", [16])
def test_sessions_side_by_side_compute_what_each_computes_alone(block_size: int, rope: str) -> None:
    plans = (rollout(6, 1, (0, 1)), rollout(6, 2, (2,)))
    alone = []
    for plan in plans:
        engine = make_engine(ROPES[rope], block_size)
        session = engine.open_session()
        alone.append([run(engine, session, request) for request in plan])
        engine.shutdown()
    engine = make_engine(ROPES[rope], block_size, batch_invariant=True)
    sessions = [engine.open_session() for _ in plans]
    for number, requests in enumerate(zip(*plans, strict=True)):
        futures = [engine.submit(*pair) for pair in zip(sessions, requests, strict=True)]
        for mine, future in zip(alone, futures, strict=True):
            assert same(future.result().result, mine[number]), f"block {number} saw another session"
    engine.shutdown()


def test_sessions_in_shared_forwards_compute_the_same_up_to_rounding() -> None:
    engine = make_engine(decodes=False)
    sessions = [engine.open_session() for _ in range(3)]
    for number in range(5):
        request = make_request(seed=5)
        futures = [engine.submit(session, request) for session in sessions]
        blocks = [future.result().result for future in futures]
        assert all(relative_error(block.latents, blocks[0].latents) < 1e-5 for block in blocks), number
    assert max(engine.stats().rows_per_forward) > 1, "forwards were not shared"
    engine.shutdown()


@each_rope
@pytest.mark.parametrize("block_size", [16])
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_forked_restored_and_parked_sessions_make_the_same_next_block(
    num_blocks: int, block_size: int, rope: str
) -> None:
    engine = make_engine(ROPES[rope], block_size)
    session = engine.open_session()
    for request in rollout(num_blocks, 3):
        run(engine, session, request)
    snapshot, fork = engine.snapshot(session), engine.fork(session)
    following = [make_request(0), make_request(1), make_request(1, seed=8)]
    expected = [run(engine, session, request) for request in following]
    engine.park(fork)
    parked = [run(engine, fork, request) for request in following]
    engine.restore(session, snapshot)
    restored = [run(engine, session, request) for request in following]
    for number, block in enumerate(expected):
        assert same(parked[number], block), f"block {number} after a fork and parking"
        assert same(restored[number], block), f"block {number} after a restore"
    engine.shutdown()


class Flaky:
    """Calls through, but for the one call that is to fail."""

    def __init__(self, model: Any) -> None:
        self._forward, self._encode = model.forward, model.encode
        self.fails_at, self.num_calls = -1, 0
        model.forward, model.encode = self.forward, self.encode

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls - 1 == self.fails_at:
            raise RuntimeError("fails once")

    def forward(self, cache: Any, rows: Any) -> Any:
        result = self._forward(cache, rows)  # K/V are written before it fails
        self._count()
        return result

    def encode(self, encoder: str, payloads: Any) -> Any:
        self._count()
        return self._encode(encoder, payloads)


@each_rope
@pytest.mark.parametrize("switches", [False, True])
@pytest.mark.parametrize("num_blocks", [0, 2, 5])
def test_a_block_that_fails_anywhere_has_changed_nothing_and_comes_out_the_same_afterwards(
    num_blocks: int, switches: bool, rope: str
) -> None:
    engine = make_engine(ROPES[rope])
    flaky, session = Flaky(engine.model), engine.open_session()
    for request in rollout(num_blocks, 4):
        run(engine, session, request)
    request = make_request(1 if switches else 0, seed=4)
    whole = engine.fork(session)
    flaky.num_calls = 0
    expected = run(engine, whole, request)
    num_calls, engine.model.texts._embeddings = flaky.num_calls, {}  # the text is encoded again
    assert num_calls == 6 + (num_blocks == 0 or switches) + (num_blocks > 0 and switches)
    engine.close(whole, "done").result()
    before, used = bits(engine, session) if num_blocks else [], engine.stats().blocks_used
    for fails_at in range(num_calls):
        flaky.num_calls, flaky.fails_at = 0, fails_at
        engine.model.texts._embeddings.clear()
        with pytest.raises(RuntimeError, match="fails once"):
            run(engine, session, request)
        flaky.fails_at = -1
        assert (bits(engine, session) if num_blocks else []) == before, f"call {fails_at} has changed history"
        assert engine.stats().blocks_used == used, f"call {fails_at} keeps blocks"
        again = engine.fork(session)
        assert same(run(engine, again, request), expected), f"another block after call {fails_at} has failed"
        engine.close(again, "done").result()
    engine.shutdown()


def test_a_roll_happens_at_the_commit_and_not_at_the_first_draft() -> None:
    seen: list[tuple[str, list[bytes]]] = []

    def observe(kv: Any, request: Any, result: Any) -> None:
        if isinstance(request, Forward):
            seen.append((request.stage, [t.numpy().tobytes() for t in kv.layer_kv(BRANCH, 0)]))

    engine = make_engine(decodes=False, observer=observe)
    session = engine.open_session()
    for request in rollout(4, 0):
        before = seen[-1][1] if seen else None
        run(engine, session, request)
        drafts = [history for stage, history in seen[-5:] if stage == "denoise"]
        assert len(drafts) == 4
        assert before is None or all(history == before for history in drafts), "a draft has changed history"
        assert seen[-1][1] != before
    engine.shutdown()


# prompts


def test_keep_leaves_history_as_it_is_and_recache_does_not() -> None:
    engine = make_engine()
    session = engine.open_session()
    for request in rollout(2, 0):
        run(engine, session, request)
    history = {"before": torch.stack(inside(engine, session).kv.layer_kv(BRANCH, 1))}
    blocks = {}
    for switch in ("keep", "recache"):
        fork = engine.fork(session)
        blocks[switch] = run(engine, fork, make_request(1, switch=switch))
        history[switch] = torch.stack(inside(engine, fork).kv.layer_kv(BRANCH, 1))[:, : 6 * 6]
    assert torch.equal(history["keep"], history["before"])
    assert relative_error(history["recache"], history["before"]) > 1e-3
    assert relative_error(blocks["recache"].latents, blocks["keep"].latents) > 1e-4
    assert (blocks["keep"].num_recached, blocks["recache"].num_recached) == (0, 6)
    engine.shutdown()


@pytest.mark.parametrize("num_blocks", [2, 3, 4])
def test_the_sink_is_never_empty_after_another_prompt_and_stays_once_frames_have_left(num_blocks: int) -> None:
    engine = make_engine()
    session = engine.open_session()
    for request in rollout(num_blocks, 0):
        run(engine, session, request)
    before = torch.stack(inside(engine, session).kv.layer_kv(BRANCH, 1))[:, : 3 * 6]
    run(engine, session, make_request(1))
    after = torch.stack(inside(engine, session).kv.layer_kv(BRANCH, 1))[:, : 3 * 6]
    assert after.abs().amin(dim=(0, 2, 3)).gt(0).all()
    assert torch.equal(after, before) == (num_blocks == 4), "9 frames fit the window: until then the sink is new"
    engine.shutdown()


def test_a_reset_session_begins_anew_with_the_prompt_that_comes() -> None:
    engine = make_engine()
    used, fresh = engine.open_session(), engine.open_session()
    for request in rollout(4, 0):
        run(engine, used, request)
    engine.reset(used)
    for request in rollout(2, 6, (1,)):
        assert same(run(engine, used, request), run(engine, fresh, request))
    engine.shutdown()


def test_without_room_for_it_a_recache_is_refused_and_keep_goes_on() -> None:
    large, small = (make_engine(recache=recache) for recache in (True, False))
    assert small.model.spec.blocks_per_session(16) < large.model.spec.blocks_per_session(16)
    session = small.open_session()
    run(small, session, make_request(0))
    with pytest.raises(BadRequest, match="'keep' is possible"):
        run(small, session, make_request(1))
    assert run(small, session, make_request(1, switch="keep")).first_frame == 3
    for engine in (large, small):
        engine.shutdown()


@each_rope
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_pool_for_one_session_is_enough_for_another_prompt_at_every_block(block_size: int, rope: str) -> None:
    spec = make_engine(ROPES[rope], block_size).model.spec
    engine = make_engine(ROPES[rope], block_size, num_blocks=spec.blocks_per_session(block_size), max_sessions=1)
    session = engine.open_session()
    for number in range(7):
        run(engine, session, make_request(number))
    engine.shutdown()


# time, noise, beginnings


def test_a_window_that_nothing_leaves_ends_with_words_and_another_one_goes_on() -> None:
    settings = replace(PRESETS["self-forcing"], steps=(1000,))
    engine, longer = make_engine(settings, decodes=False), make_engine(settings, decodes=False, window_frames=21)
    ends, goes_on = engine.open_session(), longer.open_session()
    for request in rollout(7, 0):
        assert same(run(engine, ends, request), run(longer, goes_on, request))
    before = bits(engine, ends)
    with pytest.raises(BadRequest, match=r"window full: 21 frames are there, 3 more exceed the 21.*window_frames"):
        run(engine, ends, make_request())
    assert bits(engine, ends) == before
    assert run(longer, goes_on, make_request()).first_frame == 21
    engine.reset(ends)
    assert run(engine, ends, make_request()).first_frame == 0
    for each in (engine, longer):
        each.shutdown()


def test_frames_have_no_end() -> None:
    settings = replace(TINY, frames_per_block=1, steps=(1000,), window_frames=4, sink_frames=1)
    engine = make_engine(settings, decodes=False)
    session, generator = engine.open_session(), torch.Generator().manual_seed(0)
    latents = torch.randn((1, 16, 1022, 4, 6), generator=generator)
    assert run(engine, session, make_request(given=latents)).first_frame == 1022
    for first_frame in range(1023, 1028):  # the reference's table of positions ends at 1024
        block = run(engine, session, make_request())
        assert block.first_frame == first_frame
        assert torch.isfinite(block.latents).all()
    engine.shutdown()


def test_noise_is_the_seed_s_and_the_block_s() -> None:
    engine = make_engine()
    sessions = [engine.open_session() for _ in range(3)]
    first, alike, other = (run(engine, s, make_request(seed=seed)) for s, seed in zip(sessions, (1, 1, 2), strict=True))
    assert same(first, alike)
    assert not torch.equal(first.latents, other.latents)
    later, kept = run(engine, sessions[0], make_request(seed=1)), run(engine, sessions[1], make_request())
    assert same(later, kept), "a session keeps its seed"
    noise, drawn = (engine.model._noise(frame, State(seed=1), make_request(), 4)[0] for frame in (0, 3))
    assert not torch.equal(noise, drawn), "each block has noise of its own"
    engine.shutdown()


def test_a_session_that_starts_from_given_latents_goes_on_as_the_one_that_made_them() -> None:
    engine = make_engine()
    made, starts = engine.open_session(), engine.open_session()
    blocks = [run(engine, made, request) for request in rollout(3, 9)]
    given = torch.cat([block.latents for block in blocks[:2]], dim=1)[None]
    block = run(engine, starts, make_request(seed=9, given=given))
    assert torch.equal(block.latents, blocks[2].latents)
    assert bits(engine, starts) == bits(engine, made)
    assert torch.equal(block.video, torch.cat([each.video for each in blocks], dim=1))
    with pytest.raises(BadRequest, match="given: a session starts from latents before its first frame"):
        run(engine, starts, make_request(given=given))
    engine.shutdown()


def clip_of(num_pictures: int, height: int = 32, width: int = 48) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (num_pictures, height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(("per_block", "num_pictures", "num_frames"), [(1, 1, 1), (1, 5, 2), (3, 9, 3), (3, 21, 6)])
def test_a_session_starts_from_pictures(per_block: int, num_pictures: int, num_frames: int) -> None:
    engine = make_engine(replace(TINY, frames_per_block=per_block))
    pictures, latents = engine.open_session(), engine.open_session()
    clip = clip_of(num_pictures)
    block = run(engine, pictures, make_request(clip=clip))
    video = torch.from_numpy(clip).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    given = engine.model.encoders.vae.encode(video)
    assert given.shape[2] == num_frames
    assert same(block, run(engine, latents, make_request(given=given)))
    assert block.first_frame == num_frames
    assert block.video.shape[1] == num_pictures + 4 * per_block, "the pictures come first"
    with pytest.raises(BadRequest, match="clip: a session starts from pictures before its first frame"):
        run(engine, pictures, make_request(clip=clip))
    engine.shutdown()


@pytest.mark.parametrize("size", [(64, 96), (45, 31), (480, 720)])
def test_pictures_of_another_size_are_resized_as_pillow_does(size: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    clip = clip_of(1, *size)
    ours = pixels_of(clip, 32, 48)
    theirs = np.asarray(image.fromarray(clip[0]).resize((48, 32), image.Resampling.BILINEAR))
    expected = torch.from_numpy(theirs.copy()).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
    assert ours.shape == (1, 3, 1, 32, 48)
    assert (ours - expected).abs().max() <= 1.01 / 127.5, "more than a rounding"


def test_the_first_denoised_block_may_have_steps_of_its_own() -> None:
    stages: list[str] = []

    def observe(kv: Any, request: Any, result: Any) -> None:
        stages.append(getattr(request, "stage", ""))

    settings = replace(PRESETS["causal-forcing-framewise-2step"], window_frames=4)
    engine = make_engine(settings, decodes=False, observer=observe)
    session = engine.open_session()
    counts = []
    for given in (torch.zeros(1, 16, 1, 4, 6), None, None):
        stages.clear()
        run(engine, session, make_request(given=given))
        counts.append((stages.count("commit"), stages.count("denoise")))
    assert counts == [(2, 4), (1, 2), (1, 2)], "given latents are no denoised block"
    engine.shutdown()


def test_the_schedule_is_the_warped_one() -> None:
    expected = {
        (1000, 750, 500, 250): ([1000, 937.5, 833.3333, 625], [1, 0.9375, 0.8333333, 0.625]),
        (1000, 666, 333): ([1000, 908.8427, 713.9794], [1, 0.9088427, 0.7139794]),
    }
    for steps, (timesteps, sigmas) in expected.items():
        schedule = Schedule.of(steps, TINY)
        assert schedule.timesteps == pytest.approx(timesteps, abs=1e-3)
        assert schedule.sigmas == pytest.approx(sigmas, abs=1e-6)
    plain = Schedule.of((1000, 937, 833, 625), replace(TINY, warp_steps=False))
    assert plain.timesteps == (1000, 937, 833, 625)
    assert plain.sigmas == pytest.approx([1, 0.937, 0.833, 0.625], abs=5e-4), "the nearest of the table"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"noise": torch.zeros(1, 16, 2, 4, 6)}, "noise: expected shape"),
        ({"epsilons": ()}, "epsilons: expected 3, one less than steps, got 0"),
        ({"epsilons": (torch.zeros(1),) * 3}, r"epsilons\[0\]: expected shape"),
        ({"switch": "fade"}, "switch: expected 'recache', 'keep' or 'blend', got 'fade'"),
        ({"blend_blocks": 0}, "blend_blocks: expected 1 to 1000, got 0"),
        ({"blend_blocks": 2.5}, r"blend_blocks: expected 1 to 1000, got 2\.5"),
        ({"seed": -1}, "seed: expected 0 to"),
        ({"given": torch.zeros(1, 16, 4, 4, 6)}, "given: expected whole blocks of 3 frames, got 4 frames"),
        ({"given": torch.zeros(1, 16, 3, 4, 8)}, "given: expected shape"),
        ({"clip": np.zeros((1, 32, 48, 3), np.uint8)}, "clip: expected 9 pictures, .*got 1: a block has 3 .*a single"),
        ({"clip": np.zeros((13, 32, 48, 3), np.uint8)}, "clip: expected 9 pictures, or 12 more any number .*got 13"),
        ({"clip": np.zeros((9, 32, 48), np.uint8)}, "clip: expected uint8 of shape"),
        ({"clip": np.zeros((9, 32, 48, 3), np.float32)}, "clip: expected uint8 of shape .*, got float32"),
        ({"clip": np.zeros((9, 0, 48, 3), np.uint8)}, "clip: expected uint8 of shape"),
        ({"clip": np.zeros((9, 1, 8193, 3), np.uint8)}, "clip: expected up to 8192"),
        ({"clip": np.zeros((9, 4, 4, 3), np.uint8), "given": torch.zeros(1, 16, 3, 4, 6)}, "clip: .* and both came"),
    ],
)
def test_what_cannot_be_is_named(more: dict[str, Any], words: str) -> None:
    engine = make_engine()
    session = engine.open_session()
    with pytest.raises(BadRequest, match=words):
        run(engine, session, make_request(**more))
    assert run(engine, session, make_request()).first_frame == 0
    engine.shutdown()
