"""A world that begins with a picture, over the socket."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")
pytest.importorskip("av")

from causal import TINY
from video_viewers import expected, running_app, same, serving, viewer

from worldkv.server.console.stream import jpeg

FRAMEWISE = replace(TINY, frames_per_block=1, window_frames=6, sink_frames=1)


def picture(side: int) -> str:
    dots = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    return base64.b64encode(jpeg(dots)).decode()


@pytest.mark.parametrize("side", [40, 500])
def test_a_world_begins_with_a_picture_and_no_other_one(side: int) -> None:
    image = picture(side)
    with running_app(FRAMEWISE, batch_invariant=True) as app, serving(app) as server, viewer(server) as one:
        assert one.hello["begins_with_an_image"]
        one.start(prompt="a lake", seed=3, image=image)
        blocks = one.blocks(3)
        assert [block.header["first_frame"] for block in blocks] == [0, 5, 9]
        assert [block.header["num_frames"] for block in blocks] == [5, 4, 4]
        frames = expected(app, {"prompt": "a lake", "seed": 3, "image": image}, {}, {})
        assert all(same(*pair) for pair in zip(blocks, frames, strict=True))
        one.say("start", prompt="a lake", image="no picture")
        error: Any = one.hear_after_blocks("error")
        assert (error["code"], error["field"]) == ("bad_request", "image")
