"""What is probably wrong on the robot's side: told once, clearly, and never where nothing can be known."""

from __future__ import annotations

from typing import Any

import numpy as np
import policy_fakes as fakes
import pytest

from worldkv.errors import BadRequest
from worldkv.robots.preparation import Memory, Preparation

FIELDS = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")


def warnings_of(*observations: dict[str, Any]) -> list[tuple[str, ...]]:
    preparation, memory, told = Preparation(fakes.embodiment(), fakes.FakeTokenizer()), Memory(), []
    for raw in observations:
        prepared = preparation.prepare(preparation.read(raw), memory)
        memory = prepared.memory
        told.append(prepared.warnings)
    return told


def tick(seed: int, num_frames: int = 4, **frozen: np.ndarray) -> dict[str, Any]:
    raw = fakes.observation(seed=seed, num_frames=num_frames)
    return raw | {f"observation/{name}": np.repeat(image[None], num_frames, 0) for name, image in frozen.items()}


def test_a_camera_that_stands_still_while_others_move_is_named_once() -> None:
    image = np.random.default_rng(5).integers(0, 256, (180, 320, 3), dtype=np.uint8)
    told = warnings_of(*(tick(n, 1 if n == 0 else 4, wrist_image_left=image) for n in range(4)))
    assert told[0] == ()
    assert told[1] == (
        "observation/wrist_image_left has not changed since the last tick while another camera has: is it frozen?",
    )
    assert told[2:] == [(), ()]


def test_nothing_is_said_where_nothing_moves_or_a_camera_is_missing() -> None:
    images = {name: np.full((180, 320, 3), 9, np.uint8) for name in FIELDS}
    assert warnings_of(*(tick(n, 1 if n == 0 else 4, **images) for n in range(3)))[1:] == [(), ()]
    without = [tick(n, 1 if n == 0 else 4) for n in range(3)]
    for raw in without:
        del raw["observation/exterior_image_1_left"]
    told = warnings_of(*without)
    assert "is missing" in told[0][0]
    assert told[1:] == [(), ()]


def test_a_client_that_executes_less_than_a_chunk_is_told_what_that_does() -> None:
    told = warnings_of(tick(0, 1), tick(1) | {"executed_steps": 2}, tick(2) | {"executed_steps": np.int64(6)})
    assert told[1] == (
        "2 of 6 actions were executed since the last tick: the model's clock moves by 6 steps a tick, so it goes 3 "
        "times too fast; execute whole chunks for what the model was trained on",
    )
    assert told[2] == ()
    with pytest.raises(BadRequest, match="executed_steps: expected how many actions"):
        warnings_of(tick(0, 1) | {"executed_steps": "some"})


def test_each_field_that_nothing_reads_is_told_once_whenever_it_first_comes() -> None:
    told = warnings_of(
        tick(0, 1) | {"tactile": 1}, tick(1) | {"tactile": 2, "gaze": 3}, tick(2) | {"tactile": 4, "gaze": 5}
    )
    assert ["; ".join(texts).partition(";")[0] for texts in told] == [
        "nothing reads the field tactile",
        "nothing reads the field gaze",
        "",
    ]


def test_a_client_that_makes_up_new_fields_for_ever_is_not_told_for_ever() -> None:
    told = warnings_of(*(tick(n, 1) | {f"step {n} {i}": 0 for i in range(30)} for n in range(5)))
    assert [any("nothing reads the fields" in text for text in texts) for texts in told] == [True] * 3 + [False] * 2
