"""Pixels, numbers and prompts equal the reference's, and behave where the reference was not recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import policy_fakes as fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldkv.robots.dataset import read_embodiment
from worldkv.robots.embodiment import Normalisation, Quantity
from worldkv.robots.embodiment_file import packaged
from worldkv.robots.tiling import tile_views
from worldkv.robots.transforms import (
    absolute_actions,
    denormalise,
    format_prompt,
    normalise,
    normalise_state,
    prepare_view,
)


@pytest.fixture(scope="module")
def golden(golden_folder: Path):
    yaml = pytest.importorskip("yaml")
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = golden_folder / "experiment_cfg"
    conf = yaml.safe_load((folder / "conf.yaml").read_text())
    robot = read_embodiment(conf, json.loads((folder / "metadata.json").read_text()))
    return robot, safetensors.load_file(golden_folder / "policy.safetensors")


def test_every_pixel_of_the_tiled_frames_equals_the_reference(golden) -> None:
    robot, recorded = golden
    views = [prepare_view(recorded[f"camera.{camera.name}"], robot) for camera in robot.cameras]
    tiled = tile_views(views, robot.layout)
    assert tiled.dtype == np.uint8
    assert tiled.shape[1:3] == robot.image_size
    different = (tiled != recorded["tiled_frames"]).sum()
    assert different == 0, f"{different} of {tiled.size} values differ: crop offset, antialias or rounding"


def test_a_frame_is_prepared_alike_alone_and_in_a_stack(golden) -> None:
    robot, recorded = golden
    frames = np.concatenate([recorded["camera.wrist_image_left"]] * 3)
    together = prepare_view(frames, robot)
    alone = np.concatenate([prepare_view(frame[None], robot) for frame in frames])
    assert np.array_equal(together, alone), "buffered frames would differ from frames sent again"


def test_state_and_actions_equal_the_reference(golden) -> None:
    robot, recorded = golden
    state = {quantity.key: recorded[f"state.{quantity.key}"][0] for quantity in robot.state}
    normalised = normalise_state(state, robot)
    assert normalised.dtype == np.float64
    np.testing.assert_allclose(normalised, recorded["normalised_state"], rtol=0, atol=1e-6)
    absolute = absolute_actions(recorded["normalised_actions"], state, robot)
    assert absolute.shape == (robot.action_horizon, robot.action_dim)
    np.testing.assert_allclose(absolute, recorded["absolute_actions"], rtol=0, atol=1e-6)


def test_the_droid_tile_has_the_wrist_on_top_twice_as_wide() -> None:
    left, right, wrist = (np.full((1, 2, 3, 3), value, np.uint8) for value in (10, 20, 30))
    wrist[0, :, 1] = 31
    tiled = tile_views([left, right, wrist], "wrist_over_exteriors")
    assert tiled[0, 0, :, 0].tolist() == [30, 30, 31, 31, 30, 30]
    assert tiled[0, 2, :, 0].tolist() == [10, 10, 10, 20, 20, 20]
    assert tiled.shape == (1, 4, 6, 3)


def test_other_robots_fill_a_grid_by_columns_and_a_single_view_is_left_alone() -> None:
    views = [np.full((2, 1, 1, 3), value, np.uint8) for value in (1, 2, 3, 4)]
    assert tile_views(views[:3], "grid")[1, :, :, 0].tolist() == [[1, 3], [2, 0]]
    assert tile_views(views, "grid")[1, :, :, 0].tolist() == [[1, 3], [2, 4]]
    assert tile_views(views[:2], "grid")[1, :, :, 0].tolist() == [[1, 0], [2, 0]]
    assert tile_views(views[:1], "single") is views[0]


def _quantity(mode: Normalisation, *, dim: int = 2, **statistics: list) -> Quantity:
    return Quantity("x", dim, mode, {name: np.array(values, float) for name, values in statistics.items()})


def test_q99_clamps_on_the_way_in_and_not_on_the_way_out() -> None:
    quantity = _quantity("q99", q01=[0, -1], q99=[2, 1])
    np.testing.assert_allclose(normalise(np.array([5.0, 0.5]), quantity), [1, 0.5])
    np.testing.assert_allclose(denormalise(np.array([[3.0, 0.5]]), quantity), [[4, 0.5]])


def test_a_constant_of_the_training_data_passes_through() -> None:
    value = np.array([0.25, 0.5])
    np.testing.assert_array_equal(normalise(value, _quantity("q99", q01=[3, 0], q99=[3, 1])), [0.25, 0])
    np.testing.assert_array_equal(normalise(value, _quantity("mean_std", mean=[3, 0], std=[0, 1])), value)
    np.testing.assert_array_equal(normalise(value, _quantity("min_max", min=[3, 0], max=[3, 1])), [0, 0])
    np.testing.assert_array_equal(normalise(value, _quantity("scale", min=[0, -2], max=[0, 1])), [0, 0.25])


def test_binary_and_none_are_what_they_say() -> None:
    value = np.array([0.4, 0.6])
    assert normalise(value, _quantity("binary")).tolist() == [0, 1]
    assert denormalise(value, _quantity("binary")).tolist() == [0, 1]
    assert normalise(value, _quantity("none")) is value


_NUMBER = st.floats(-10, 10, allow_subnormal=False)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(["q99", "mean_std", "min_max", "scale", "none"]),
    fraction=st.floats(0.01, 0.99),
    low=_NUMBER,
    width=st.floats(0.1, 10),
)
def test_denormalise_undoes_normalise_inside_the_training_range(
    mode: Normalisation, fraction: float, low: float, width: float
) -> None:
    ends = {"q01": low, "q99": low + width, "min": low, "max": low + width, "mean": low, "std": width}
    quantity = _quantity(mode, dim=1, **{name: [end] for name, end in ends.items()})
    value = np.array([[low + fraction * width]])
    np.testing.assert_allclose(denormalise(normalise(value, quantity), quantity), value, atol=1e-9)


def test_statistics_per_step_are_applied_step_by_step() -> None:
    robot = fakes.embodiment()
    low, high = np.zeros((fakes.HORIZON, 7)), np.arange(1.0, 7.0)[:, None].repeat(7, axis=1)
    joints = replace(robot.actions[0], statistics={"q01": low, "q99": high})
    robot = replace(robot, actions=(joints, robot.actions[1]))
    state = {"joint_position": np.full(7, 10.0), "gripper_position": np.zeros(1)}
    actions = absolute_actions(np.zeros((fakes.HORIZON, 10), np.float32), state, robot)
    np.testing.assert_allclose(actions[:, 0], 10 + np.arange(1, 7) / 2)


def test_only_relative_keys_start_from_the_last_state() -> None:
    robot = fakes.embodiment()
    state = {"joint_position": np.arange(7.0), "gripper_position": np.array([0.7])}
    actions = absolute_actions(np.zeros((fakes.HORIZON, 10), np.float32), state, robot)
    np.testing.assert_allclose(actions[0], [0, 1, 2, 3, 4, 5, 6, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("prompt", "instruction"),
    [
        ("Pick Up the Cup", "pick up the cup"),
        ("['Open the drawer', 'pull it']", "open the drawer"),
        ("('Open the drawer',)", "open the drawer"),
        ("'Open it'", "open it"),
        ('"Don\'t spill"', "don't spill"),
        ("[]", "[]"),
        ("[1, 2]", "1"),
        ("[unclosed", "[unclosed"),
        ("__import__('os').getpid()", "__import__('os').getpid()"),
        ("[__import__('os')]", "[__import__('os')]"),
        ("(" * 4000, "(" * 4000),
        ("use {p} twice", "use {p} twice"),
    ],
)
def test_an_instruction_is_lower_cased_and_unpacked_but_never_run(prompt: str, instruction: str) -> None:
    assert format_prompt(prompt, "{p}|{p}") == f"{instruction}|{instruction}"


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text_can_be_an_instruction(prompt: str) -> None:
    text = format_prompt(prompt, packaged()["oxe_droid"].prompt)
    assert text.startswith("A multi-view video shows that a robot ")
