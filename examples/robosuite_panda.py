"""robosuite's Panda with a Robotiq gripper, DROID's robot, drives a worldkv server over the wire.

    make example-robosuite
    python examples/robosuite_panda.py [--ticks 6] [--url ws://HOST:PORT] [--output robosuite_panda.mp4] [--seed 0]

Three cameras of 180x320, absolute joint control at 15 Hz (robosuite's JOINT_POSITION controller with absolute input;
a control step is 33 physics steps of 2 ms).
Without --url a server is started on a tiny checkpoint of random weights, which has learned nothing: the arm's motions
mean nothing, the loop is real. With --url and a trained DROID checkpoint behind it, remember that these pictures are a
simulator's: joints, gripper and timing are those of training, the looks and the places of the cameras are not.

Needs robosuite 1.5.2 with mujoco 3.3.7 (the `robosuite` extra) in an environment of its own, since robosuite wants
numpy < 2, and OpenGL. Cameras go through mujoco.Renderer: robosuite's own camera observations returned one picture
three times.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from simulated_robot import CONTROL_HZ, Mount, MujocoCameras, Views, importing_mujoco, run

FINGER_OPEN, FINGER_CLOSED = -0.028, 0.51  # radians of a knuckle, measured: its rest, and where the pads meet
STIFFNESS = 300.0  # the most that the controller takes; per second squared
COLLISION_GROUP = 0  # robosuite's collision shapes, which would hide the meshes
MOUNTS = (
    Mount("robot0_base", (1.35, 0.95, 0.62), (0.35, 0.0, 0.25), fov=38),
    Mount("robot0_base", (1.35, -0.95, 0.62), (0.35, 0.0, 0.25), fov=38),
    Mount("robot0_right_hand", (0.10, 0.0, -0.02), (0.02, 0.0, 0.25), up=(1, 0, 0), fov=75),
)


def gripper_of(knuckle: float) -> float:
    """The wire's gripper position, 0 open to 1 closed, of a Robotiq knuckle's angle."""
    return float(np.clip((knuckle - FINGER_OPEN) / (FINGER_CLOSED - FINGER_OPEN), 0, 1))


def command_of(gripper: float) -> float:
    """What robosuite's gripper command should stand at, -1 open to 1 closed, for a gripper position on the wire."""
    return 2 * gripper - 1


class RobosuitePanda:
    """robosuite's Lift; see `simulated_robot.SimulatedRobot`."""

    prompt = "Pick up the red cube"

    def __init__(self, seed: int) -> None:
        self._env = _make_environment(seed)
        self._robot = self._env.robots[0]
        model, self._data = self._env.sim.model._model, self._env.sim.data._data
        joints = [model.joint(name) for name in self._robot.robot_joints]
        self._qpos = np.array([int(joint.qposadr[0]) for joint in joints])
        ranges = np.array([joint.range for joint in joints])
        self.joint_limits = (ranges[:, 0], ranges[:, 1])
        knuckles = ("gripper0_right_finger_joint", "gripper0_right_right_outer_knuckle_joint")
        self._knuckles = [int(model.joint(name).qposadr[0]) for name in knuckles]
        self._cameras = MujocoCameras(model, self._data, MOUNTS, hidden_groups=[COLLISION_GROUP])
        self.renderer = self._cameras.name

    @property
    def joint_position(self) -> np.ndarray:
        return np.array(self._data.qpos[self._qpos])

    @property
    def gripper_position(self) -> float:
        return gripper_of(float(np.mean(self._data.qpos[self._knuckles])))

    def look(self) -> Views:
        return self._cameras.look()

    def step(self, joint_target: np.ndarray, gripper_target: float) -> None:
        gripper = self._robot.gripper["right"]
        short_of = command_of(gripper_target) - float(np.mean(gripper.current_action))
        # robosuite takes the sign only, and moves the command by `speed`: stay where that would overshoot
        direction = np.sign(short_of) if abs(short_of) > gripper.speed / 2 else 0.0
        parts = {"right": joint_target, "right_gripper": np.array([direction])}
        self._env.step(self._robot.create_action_vector(parts))

    def close(self) -> None:
        self._cameras.close()
        self._env.close()


def _make_environment(seed: int) -> Any:
    """Raises ImportError with what to install."""
    logging.disable(logging.WARNING)  # notices about robots and options that are not used here
    try:
        with importing_mujoco("robosuite"):
            import robosuite
        controllers = robosuite.load_composite_controller_config(controller="BASIC", robot="Panda")
        controllers["body_parts"]["right"] |= {
            "type": "JOINT_POSITION",
            "input_type": "absolute",
            "kp": STIFFNESS,
            "input_min": -1,  # these four scale relative input only, yet must be there
            "input_max": 1,
            "output_min": -1,
            "output_max": 1,
        }
        environment = robosuite.make(
            "Lift",
            robots="Panda",
            gripper_types="Robotiq85Gripper",
            controller_configs=controllers,
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            control_freq=CONTROL_HZ,
            ignore_done=True,
            seed=seed,
        )
        environment.reset()
    finally:
        logging.disable(logging.NOTSET)
    return environment


def main(argv: Sequence[str] | None = None) -> int:
    return run(RobosuitePanda, "robosuite_panda", __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
