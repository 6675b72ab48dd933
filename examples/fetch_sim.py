"""A simulated Fetch arm drives a worldkv server over the wire: three rendered cameras, absolute joint positions.

    pip install -e ./client -e '.[all,sim]'
    python examples/fetch_sim.py [--ticks 6] [--url ws://HOST:PORT] [--output fetch_sim.mp4] [--seed 0]

Without --url a server is started on a tiny checkpoint of random weights, which has learned nothing: the arm's motions
mean nothing, the loop is real. Fetch is not the arm that DROID policies were trained on either: it has seven joints,
too, but others, so a trained policy would not know it. For that arm see robosuite_panda.py.

gymnasium-robotics moves Fetch by a weld to a point in space, which knows no joint targets. It is switched off here; a
computed torque at every physics step (2 ms) holds the arm at the joint positions that the policy asks for.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from simulated_robot import CONTROL_HZ, Mount, MujocoCameras, Views, importing_mujoco, run

JOINTS = ("shoulder_pan", "shoulder_lift", "upperarm_roll", "elbow_flex", "forearm_roll", "wrist_flex", "wrist_roll")
FINGERS = ("r_gripper_finger", "l_gripper_finger")
OPEN_M = 0.05  # how far each finger is from the middle when the gripper is open
STIFFNESS, DAMPING = 600.0, 50.0  # per second squared and per second: settles in a quarter of a second
MOUNTS = (
    Mount("", (2.15, 1.50, 1.20), (1.14, 0.75, 0.64), fov=36),
    Mount("", (2.15, 0.00, 1.10), (1.14, 0.75, 0.64), fov=36),
    Mount("robot0:gripper_link", (-0.10, 0.0, 0.16), (0.10, 0.0, 0.02), up=(0, 0, 1), fov=70),
)


def gripper_of(opening_m: float) -> float:
    """The wire's gripper position, 0 open to 1 closed, of a finger's distance from the middle."""
    return 1 - opening_m / OPEN_M


def opening_of(gripper: float) -> float:
    """The inverse of `gripper_of`, metres."""
    return OPEN_M * (1 - gripper)


class FetchRobot:
    """FetchPickAndPlace in gymnasium-robotics; see `simulated_robot.SimulatedRobot`."""

    prompt = "Pick up the black block"

    def __init__(self, seed: int) -> None:
        self._mujoco, self._env = _make_environment()
        self._env.reset(seed=seed)
        self._model, self._data = self._env.unwrapped.model, self._env.unwrapped.data
        joints = [self._model.joint(f"robot0:{name}_joint") for name in JOINTS]
        self._qpos = np.array([int(joint.qposadr[0]) for joint in joints])
        self._dofs = np.array([int(joint.dofadr[0]) for joint in joints])
        limited = np.array([bool(joint.limited[0]) for joint in joints])
        ranges = np.array([joint.range for joint in joints])
        self.joint_limits = (np.where(limited, ranges[:, 0], -np.inf), np.where(limited, ranges[:, 1], np.inf))
        self._fingers = [int(self._model.joint(f"robot0:{name}_joint").qposadr[0]) for name in FINGERS]
        self._data.eq_active[:] = 0  # the weld to gymnasium's point in space
        _hide_mocap(self._model)
        self._target, self._steps, self._start = self.joint_position, 0, float(self._data.time)
        self._cameras = MujocoCameras(self._model, self._data, MOUNTS)
        self.renderer = self._cameras.name

    @property
    def joint_position(self) -> np.ndarray:
        return np.array(self._data.qpos[self._qpos])

    @property
    def gripper_position(self) -> float:
        return gripper_of(float(np.mean(self._data.qpos[self._fingers])))

    def look(self) -> Views:
        return self._cameras.look()

    def step(self, joint_target: np.ndarray, gripper_target: float) -> None:
        self._steps += 1
        until = self._start + self._steps / CONTROL_HZ  # 33 or 34 physics steps, so that no time is lost
        num_substeps = max(1, round((until - self._data.time) / self._model.opt.timestep))
        self._data.ctrl[:] = opening_of(gripper_target)
        for fraction in np.arange(1, num_substeps + 1) / num_substeps:
            self._push_towards(self._target + fraction * (joint_target - self._target))
            self._mujoco.mj_step(self._model, self._data)
        self._target = joint_target
        self._mujoco.mj_forward(self._model, self._data)

    def close(self) -> None:
        self._cameras.close()
        self._env.close()

    def _push_towards(self, target: np.ndarray) -> None:
        """Computed torque: the arm's own inertia times the wanted acceleration, and what gravity and motion take."""
        data, dofs = self._data, self._dofs
        wanted, torque = np.zeros(self._model.nv), np.zeros(self._model.nv)
        wanted[dofs] = STIFFNESS * (target - data.qpos[self._qpos]) - DAMPING * data.qvel[dofs]
        self._mujoco.mj_mulM(self._model, data, torque, wanted)
        data.qfrc_applied[dofs] = (torque + data.qfrc_bias - data.qfrc_passive)[dofs]


def _make_environment() -> tuple[Any, Any]:
    """(mujoco, the environment). Raises ImportError with what to install."""
    with importing_mujoco("sim"), contextlib.redirect_stderr(io.StringIO()):  # a notice about other environments
        import gymnasium
        import gymnasium_robotics
        import mujoco
    gymnasium.register_envs(gymnasium_robotics)
    return mujoco, gymnasium.make("FetchPickAndPlace-v4", max_episode_steps=-1)


def _hide_mocap(model: Any) -> None:
    """The point in space is drawn as translucent boxes in front of the gripper."""
    is_mocap = model.body_mocapid[model.geom_bodyid] >= 0
    model.geom_rgba[is_mocap, 3] = 0


def main(argv: Sequence[str] | None = None) -> int:
    return run(FetchRobot, "fetch_sim", __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
