"""Reading an embodiment from experiment_cfg: exact where it is right, complete complaints where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import policy_fakes as fakes
import pytest

from worldkv.errors import CheckpointError
from worldkv.robots.dataset import read_embodiment


def _step(conf: dict[str, Any], name: str) -> dict[str, Any]:
    steps = conf["transforms"]["oxe_droid"]["transforms"]
    return next(step for step in steps if step["_target_"].endswith(name))


def test_the_golden_checkpoints_describe_a_droid_robot(golden_folder: Path) -> None:
    yaml = pytest.importorskip("yaml")
    folder = golden_folder / "experiment_cfg"
    conf = yaml.safe_load((folder / "conf.yaml").read_text())
    robot = read_embodiment(conf, json.loads((folder / "metadata.json").read_text()))
    assert [camera.name for camera in robot.cameras] == list(fakes.CAMERAS)
    assert {(camera.height, camera.width) for camera in robot.cameras} == {(180, 320)}
    assert [(q.key, q.dim, q.normalisation) for q in robot.state] == [
        ("joint_position", 7, "q99"),
        ("gripper_position", 1, "q99"),
    ]
    assert [q.relative for q in robot.actions] == [True, False]
    assert (robot.max_state_dim, robot.max_action_dim, robot.action_horizon, robot.text_len) == (16, 8, 6, 16)
    assert (robot.action_dim, robot.fps, robot.crop_scale, robot.layout) == (
        8,
        15.0,
        0.95,
        "wrist_over_exteriors",
    )
    assert robot.image_size == (2 * robot.view_height, 2 * robot.view_width)


def test_statistics_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        fakes.embodiment().state[0].statistics["q01"][0] = 3.0


def test_a_camera_size_of_the_model_replaces_the_recorded_one() -> None:
    robot = read_embodiment(fakes.conf(), fakes.metadata(), camera_size=(160, 320))
    camera = robot.cameras[0]
    assert (camera.height, camera.width, camera.recorded_height, camera.recorded_width) == (
        160,
        320,
        180,
        320,
    )


def test_every_fault_is_listed_with_its_path_in_one_error() -> None:
    conf, metadata = fakes.conf(), fakes.metadata()
    del _step(conf, "VideoCrop")["scale"]
    _step(conf, "VideoResize")["height"] = "tall"
    _step(conf, "DreamTransform")["max_action_dim"] = 4
    conf["action_horizon"] = 24
    conf["relative_action_keys"] = ["joint_position", "gripper_position"]
    robot = metadata["oxe_droid"]
    robot["statistics"]["state"]["joint_position"]["q01"] = [0.0] * 6
    robot["statistics"]["action"]["joint_position"]["q99"][3] = float("nan")
    robot["modalities"]["state"]["gripper_position"] = {"shape": [2]}
    robot["modalities"]["video"]["wrist_image_left"]["fps"] = 30.0
    with pytest.raises(CheckpointError) as caught:
        read_embodiment(conf, metadata)
    for fault in (
        "transforms[VideoCrop].scale: expected a number in (0, 1]",
        "transforms[VideoResize].height: expected a positive whole number, got 'tall'",
        "transforms[DreamTransform].max_action_dim is 4, but the action keys have 8 numbers",
        "conf.yaml: action_horizon is 24, but",
        "relative_action_keys: 'gripper_position' has 1 numbers as an action, 2 as a state",
        "metadata.json: oxe_droid.statistics.state.joint_position.q01: expected 7 finite numbers, got [6]",
        "metadata.json: oxe_droid.statistics.action.joint_position.q99: expected 7 finite numbers, got other",
        "modalities.video.*.fps: expected one positive rate for all cameras",
    ):
        assert fault in str(caught.value), f"not reported: {fault}\n{caught.value}"


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        (("transforms", "oxe_droid"), "conf.yaml: transforms.oxe_droid: missing"),
        (("modality_configs", "oxe_droid", "state"), "conf.yaml: modality_configs.oxe_droid.state: missing"),
        (("relative_action_keys",), "conf.yaml: relative_action_keys: missing"),
    ],
)
def test_a_missing_branch_of_the_config_is_named(path: tuple[str, ...], fault: str) -> None:
    conf = fakes.conf()
    parent = conf
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    with pytest.raises(CheckpointError) as caught:
        read_embodiment(conf, fakes.metadata())
    assert fault in str(caught.value)


@pytest.mark.parametrize("name", ["VideoCrop", "VideoResize", "ConcatTransform", "DreamTransform"])
def test_a_missing_transform_is_named(name: str) -> None:
    conf = fakes.conf()
    conf["transforms"]["oxe_droid"]["transforms"].remove(_step(conf, name))
    with pytest.raises(CheckpointError) as caught:
        read_embodiment(conf, fakes.metadata())
    assert f"transforms[{name}]: missing" in str(caught.value)


def test_an_order_that_contradicts_the_modalities_is_refused() -> None:
    conf = fakes.conf()
    conf["modality_configs"]["oxe_droid"]["video"]["modality_keys"].pop()
    with pytest.raises(CheckpointError, match=r"video_concat_order is .* but modality_configs"):
        read_embodiment(conf, fakes.metadata())


def test_empty_files_and_unknown_tags_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"conf\.yaml: transforms: missing"):
        read_embodiment({"action_horizon": 6}, fakes.metadata())
    with pytest.raises(CheckpointError, match=r"conf\.yaml is missing: .* give --embodiment NAME or FILE"):
        read_embodiment({}, fakes.metadata())
    with pytest.raises(CheckpointError, match=r"metadata\.json is missing"):
        read_embodiment(fakes.conf(), {})
    with pytest.raises(CheckpointError, match=r"nothing is known of a robot 'unicycle'"):
        read_embodiment(fakes.conf(), fakes.metadata(), "unicycle")


def test_statistics_per_horizon_step_are_read_and_demanded() -> None:
    conf, metadata = fakes.conf(), fakes.metadata()
    conf["relative_action_per_horizon"] = True
    with pytest.raises(CheckpointError, match="relative_action_per_horizon needs a list per horizon step"):
        read_embodiment(conf, metadata)
    joints = metadata["oxe_droid"]["statistics"]["action"]["joint_position"]
    for name, row in joints.items():
        joints[name] = [[value * (1 + step) for value in row] for step in range(fakes.HORIZON + 2)]
    robot = read_embodiment(conf, metadata)
    assert robot.actions[0].statistics["q99"].shape == (fakes.HORIZON, 7)
    np.testing.assert_allclose(robot.actions[0].statistics["q99"][:, 0], 0.3 * np.arange(1, 7))
    joints["q01"] = joints["q01"][:3]
    with pytest.raises(CheckpointError, match="at least 6 lists of 7"):
        read_embodiment(conf, metadata)


def test_rotations_and_unknown_normalisations_are_refused() -> None:
    conf = fakes.conf()
    step = _step(conf, "StateActionTransform")
    step["target_rotations"] = {"state.joint_position": "rotation_6d"}
    step["normalization_modes"]["state.joint_position"] = "q95"
    with pytest.raises(CheckpointError) as caught:
        read_embodiment(conf, fakes.metadata())
    assert "target_rotations: expected none" in str(caught.value)
    assert "expected one of none, q99, mean_std, min_max, scale, binary, got 'q95'" in str(caught.value)
