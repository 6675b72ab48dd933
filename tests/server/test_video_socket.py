"""The videos' socket: words in, blocks out, words changed on the way, marks, forks, and what it says of mistakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")
pytest.importorskip("av")

from video_viewers import expected, same, serving, video_app, viewer

from worldkv.server.server import PolicyServer
from worldkv.videos.app import VideoApp

LAKE, STORM = "a quiet lake", "a storm over the lake"


@pytest.fixture(scope="module")
def app() -> Iterator[VideoApp]:
    app = video_app()
    yield app
    app.close()
    app.engine.shutdown()


@pytest.fixture
def server(app: VideoApp) -> Iterator[PolicyServer]:
    with serving(app) as server:
        yield server


def test_words_bring_a_world_block_after_block(app: VideoApp, server: PolicyServer) -> None:
    with viewer(server) as one:
        assert one.hello["frames_per_second"] == 16
        started = one.start(prompt=LAKE, seed=3)
        blocks = one.blocks(3)
    assert started["width"], started["height"] == (48, 32)
    assert [block.number for block in blocks] == [0, 1, 2]
    assert [block.header["first_frame"] for block in blocks] == [0, 9, 21]
    assert [block.header["pts"] for block in blocks] == [0.0, 9 / 16, 21 / 16]
    assert [block.header["prompt"] for block in blocks] == [LAKE] * 3
    assert all(block.header["timings"]["denoise"] > 0 for block in blocks)
    frames = expected(app, {"prompt": LAKE, "seed": 3}, {}, {})
    assert all(same(*pair) for pair in zip(blocks, frames, strict=True)), "not what the app makes of the same calls"
