"""The synthetic robot obeys, is the same on every run, and its observations are what a policy takes."""

from __future__ import annotations

import numpy as np
import pytest

from worldkv.demo.synthetic import CONTROL_HZ, HOME, JOINT_HIGH, MAX_SPEED, SyntheticArm, _forward_kinematics
from worldkv.robots.embodiment_file import packaged

CAMERAS = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")


@pytest.fixture(scope="module")
def arm() -> SyntheticArm:
    return SyntheticArm()


def _hold(steps: int, **changes: float) -> np.ndarray:
    actions = np.tile(np.append(HOME, 0.0), (steps, 1))
    for joint, change in changes.items():
        actions[:, int(joint.removeprefix("joint"))] += change
    return actions


def test_an_observation_has_roboarena_names_and_one_frame_after_a_reset(arm: SyntheticArm) -> None:
    arm.reset()
    observation = arm.observe()
    for camera in CAMERAS:
        image = observation[f"observation/{camera}"]
        assert image.shape == (1, 180, 320, 3)
        assert image.dtype == np.uint8
        assert image.std() > 20, f"{camera} shows next to nothing"
    assert np.array_equal(observation["observation/joint_position"], HOME)
    assert observation["observation/gripper_position"].tolist() == [0.0]
    droid = packaged()["oxe_droid"]
    assert set(observation) == {*(entry.field for entry in (*droid.cameras, *droid.state)), "prompt"}


def test_the_joints_follow_the_actions_at_the_speed_they_can(arm: SyntheticArm) -> None:
    arm.reset()
    arm.execute(_hold(1, joint0=0.5))
    assert arm.joint_position[0] == pytest.approx(MAX_SPEED / CONTROL_HZ)
    places = arm.execute(_hold(20, joint0=0.5, joint7=1.0))
    np.testing.assert_allclose(places[:6, 7], [0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert places[-1].tolist() == [*arm.joint_position, arm.gripper_position]
    np.testing.assert_allclose(arm.joint_position, HOME + np.eye(7)[0] * 0.5)
    assert arm.gripper_position == pytest.approx(1.0)
    arm.execute(_hold(40, joint1=9.0))
    assert arm.joint_position[1] == pytest.approx(JOINT_HIGH[1])


@pytest.mark.parametrize("steps", [1, 6, 24])
def test_four_frames_are_seen_of_what_was_executed_and_the_last_is_now(arm: SyntheticArm, steps: int) -> None:
    arm.reset()
    arm.execute(_hold(steps, joint0=0.6, joint3=0.3))
    observation = arm.observe()
    for camera in CAMERAS:
        images = observation[f"observation/{camera}"]
        assert images.shape == (4, 180, 320, 3)
        if steps > 3:
            assert not np.array_equal(images[0], images[3]), f"{camera} does not see the arm move"
    now = arm._look()
    assert np.array_equal(observation["observation/wrist_image_left"][-1], now[2])


def test_two_arms_driven_alike_see_the_same(arm: SyntheticArm) -> None:
    random = np.random.default_rng(3)
    actions = np.concatenate([random.uniform(-3, 3, (6, 7)), random.uniform(-1, 2, (6, 1))], axis=1)
    other = SyntheticArm()
    arm.reset()
    for robot in (arm, other):
        robot.execute(actions)
    for name, value in arm.observe().items():
        assert np.array_equal(value, other.observe()[name]), name


def test_wherever_the_joints_are_sent_the_hand_stays_above_the_table(arm: SyntheticArm) -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        joints = HOME + random.choice([-1, 1], 7) * (JOINT_HIGH - HOME)
        flange = _forward_kinematics(joints)[-1]
        fingertip = flange[:3, 3] + 0.13 * flange[:3, 2]
        assert fingertip[2] > 0.05


@pytest.mark.parametrize("actions", [np.zeros((0, 8)), np.zeros((4, 7)), np.zeros(8), np.full((2, 8), np.nan)])
def test_actions_that_are_none_are_refused(arm: SyntheticArm, actions: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"actions: expected finite numbers \[N, 8\]"):
        arm.execute(actions)
