"""The videos' app: what a viewer asks for, and what comes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from causal import SIZE, random_folder  # noqa: E402

from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.errors import BadRequest  # noqa: E402
from worldkv.load import load_app  # noqa: E402
from worldkv.models.causal_wan.folder import Choices  # noqa: E402
from worldkv.models.causal_wan.random import TINY  # noqa: E402
from worldkv.server.console.stream import jpeg  # noqa: E402
from worldkv.videos.app import VideoApp, VideoSession  # noqa: E402


@pytest.fixture
def app() -> Iterator[VideoApp]:
    app = load_app(random_folder(), EngineConfig(block_size=16, max_sessions=4), choices=Choices(**SIZE))
    assert isinstance(app, VideoApp)
    yield app
    app.close()
    app.engine.shutdown()


def ask(app: VideoApp, session: VideoSession, **fields: Any) -> Any:
    return session.infer(app.read(fields)).result(60)


def test_words_become_pictures_block_after_block_and_other_words_other_pictures(app: VideoApp) -> None:
    session, other = app.open_session(), app.open_session()
    replies = [ask(app, session, prompt="a quiet lake", seed=3), ask(app, session), ask(app, session)]
    assert [reply.block.frames.shape for reply in replies] == [(9, 32, 48, 3), (12, 32, 48, 3), (12, 32, 48, 3)]
    assert [reply.block.first_frame for reply in replies] == [0, 9, 21]
    assert [reply.block.number for reply in replies] == [0, 1, 2]
    assert all(reply.block.frames.dtype == np.uint8 for reply in replies)
    assert {"denoise", "commit", "decode", "total"} <= replies[0].timings.keys()
    same, different = ask(app, other, prompt="a quiet  lake", seed=3), ask(app, other, prompt="a storm")
    assert np.array_equal(same.block.frames, replies[0].block.frames), "white space is no other prompt"
    assert different.block.is_new_prompt
    assert different.block.model.num_recached == 3
    assert not np.array_equal(different.block.frames, replies[1].block.frames)
    assert different.events == ("prompt: a storm",)


def test_pictures_are_those_of_the_decoder(app: VideoApp) -> None:
    block = ask(app, app.open_session(), prompt="a quiet lake").block
    expected = (block.model.video.permute(1, 2, 3, 0).numpy() + 1) * 127.5
    assert np.abs(block.frames - expected).max() <= 0.5


def test_words_are_part_of_the_session_that_is_forked_restored_and_reset(app: VideoApp) -> None:
    session = app.open_session()
    ask(app, session, prompt="a quiet lake")
    mark, fork = session.snapshot(), app.fork(session)
    expected = ask(app, session).block.frames
    ask(app, session, prompt="a storm")
    session.restore(mark)
    assert np.array_equal(ask(app, session).block.frames, expected)
    fork.park()
    assert np.array_equal(ask(app, fork).block.frames, expected)
    session.reset().result(10)
    with pytest.raises(BadRequest, match="prompt: the first block of a session needs one"):
        ask(app, session)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"promt": "a"}, "'promt' is not known; a block is asked for with prompt, switch, blend_blocks, seed, image"),
        ({"prompt": "  "}, "prompt: expected words"),
        ({"prompt": 7}, "prompt: expected words, got '7'"),
        ({"prompt": "a" * 30_000}, "prompt: expected at most 20000 characters, got 30000"),
        ({"switch": "fade"}, "switch: expected one of 'recache'"),
        ({"seed": -1}, "seed: expected a whole number from 0"),
        ({"switch": "blend", "blend_blocks": 0}, "blend_blocks: expected a whole number from 1 to 1000, got 0"),
        ({"image": "no base64!"}, "image: expected a picture's bytes as base64"),
        ({"image": b"no picture at all"}, "image: expected a picture, as PNG, JPEG or WebP"),
        ({"image": 7}, "image: expected a picture's bytes, as base64 in a message, got int"),
        ({"seed": True}, "seed: expected a whole number from 0"),
    ],
)
def test_what_cannot_be_is_refused_before_a_session_is_touched(
    app: VideoApp, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        app.read(fields)


def test_a_world_may_begin_with_a_picture_where_the_model_can(app: VideoApp) -> None:
    picture = np.zeros((40, 60, 3), dtype=np.uint8)
    picture[:, :30] = 255
    data = jpeg(picture)
    with pytest.raises(BadRequest, match="a single picture starts models of one frame a block"):
        ask(app, app.open_session(), prompt="a lake", image=data)
    settings = replace(TINY, frames_per_block=1, window_frames=6, sink_frames=1)
    framewise = load_app(random_folder(settings), EngineConfig(block_size=16, max_sessions=4), choices=Choices(**SIZE))
    assert framewise.describe()["begins_with_an_image"]
    first, other = framewise.open_session(), framewise.open_session()
    begun = ask(framewise, first, prompt="a lake", image=base64.b64encode(data).decode()).block
    assert begun.frames.shape[0] == 5, "the picture, and a block"
    assert (begun.first_frame, begun.number) == (0, 0)
    following = ask(framewise, first).block
    assert (following.first_frame, len(following.frames)) == (5, 4)
    alone = ask(framewise, other, prompt="a lake").block
    assert (alone.first_frame, len(alone.frames)) == (0, 1)
    assert ask(framewise, other).block.first_frame == 1
    with pytest.raises(BadRequest, match="before its first frame"):
        ask(framewise, first, image=data)
    framewise.close()
    framewise.engine.shutdown()


def test_a_world_goes_on_in_another_server_with_its_words_and_its_decoder(app: VideoApp) -> None:
    session = app.open_session()
    for fields in ({"prompt": "a lake", "seed": 5}, {}, {"prompt": "a storm", "switch": "blend"}):
        ask(app, session, **fields)
    other = load_app(random_folder(), EngineConfig(block_size=64, max_sessions=4), choices=Choices(**SIZE))
    assert isinstance(other, VideoApp)
    data = b"".join(session.begin_export().result(30).parts())
    moved = other.imported(other.begin_import(data, "moved").result(30))
    for _ in range(3):
        there, here = ask(other, moved).block, ask(app, session).block
        assert np.array_equal(there.frames, here.frames)
        assert (there.prompt, there.number, there.first_frame) == (here.prompt, here.number, here.first_frame)
    other.close()
    other.engine.shutdown()
