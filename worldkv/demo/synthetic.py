"""A made-up robot to drive: a seven-joint arm over a table, two exterior cameras and one on its wrist.

Its joints follow the actions that a policy returns, so that what is seen next depends on what was answered.
Deterministic. Does not know the policy, the wire or the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from worldkv.demo.raycast import Backdrop, Block, Camera, Capsule, Solid, render, shadow_map

CONTROL_HZ = 15
FRAMES_PER_OBSERVATION = 4
HOME = np.array([0.0, -0.35, 0.0, -2.15, 0.0, 1.80, 0.785])  # radians
_REACH = np.array([0.8, 0.4, 0.4, 0.45, 0.6, 0.5, 1.2])  # keeps the hand in view and clear of the table
JOINT_LOW, JOINT_HIGH = HOME - _REACH, HOME + _REACH
MAX_SPEED = 1.5  # radians per second
PROMPT = "Put the red block on the plate"

# Modified Denavit-Hartenberg parameters of a Franka arm: (a, d, alpha) of joints 1 to 7, metres and radians.
_LINKS = (
    (0.0, 0.333, 0.0),
    (0.0, 0.0, -np.pi / 2),
    (0.0, 0.316, np.pi / 2),
    (0.0825, 0.0, np.pi / 2),
    (-0.0825, 0.384, -np.pi / 2),
    (0.0, 0.0, np.pi / 2),
    (0.088, 0.0, np.pi / 2),
)
_FLANGE = 0.107
_FINGER_TRAVEL = 0.038

_WHITE = (0.66, 0.67, 0.68)
_GREY = (0.045, 0.05, 0.06)
_TEAL = (0.02, 0.30, 0.33)
_ORANGE = (0.75, 0.22, 0.03)
_BLOCK = Block(
    centre=np.array([0.50, 0.17, 0.03], np.float32),
    half=np.array([0.03, 0.03, 0.03], np.float32),
    angle=0.45,
    colour=(0.62, 0.04, 0.03),
)


class SyntheticArm:
    """The arm and its cameras.

    `joint_position`: float64 [7], radians. `gripper_position`: 0 open to 1 closed.
    """

    def __init__(self, prompt: str = PROMPT) -> None:
        self.prompt = prompt
        up = np.array([0.0, 0.0, 1.0])
        self._exteriors = tuple(
            Backdrop(Camera(np.array(position), np.array(target), up, fov=40), samples=3)
            for position, target in (
                ((1.32, 0.98, 0.78), (0.27, 0.02, 0.24)),
                ((1.22, -1.06, 0.62), (0.27, -0.02, 0.26)),
            )
        )
        self.reset()

    def reset(self) -> None:
        """Back to the home position, with an open gripper and a single frame to observe."""
        self.joint_position = HOME.copy()
        self.gripper_position = 0.0
        self._frames = [self._look()]

    def observe(self) -> dict[str, Any]:
        """A robot's observation in RoboArena's names; images uint8 [T, 180, 320, 3].

        T is 1 after a reset, and FRAMES_PER_OBSERVATION after `execute`, spread over what was executed.
        """
        exterior_0, exterior_1, wrist = (np.stack(frames) for frames in zip(*self._frames, strict=True))
        return {
            "observation/exterior_image_0_left": exterior_0,
            "observation/exterior_image_1_left": exterior_1,
            "observation/wrist_image_left": wrist,
            "observation/joint_position": self.joint_position.copy(),
            "observation/gripper_position": np.array([self.gripper_position]),
            "prompt": self.prompt,
        }

    def execute(self, actions: np.ndarray) -> np.ndarray:
        """Follow absolute actions [N, 8] (seven joints in radians, gripper in 0..1), one per control step.

        The joints go towards each target as fast as MAX_SPEED and their limits allow, the gripper as far as it opens.
        Returns where they were after each step, float64 [N, 8].
        """
        actions = np.asarray(actions, dtype=np.float64)
        if actions.ndim != 2 or actions.shape[1] != 8 or len(actions) == 0 or not np.isfinite(actions).all():
            raise ValueError(f"actions: expected finite numbers [N, 8], got shape {list(actions.shape)}")
        steps = len(actions)
        seen_at = [max(1, steps * i // (FRAMES_PER_OBSERVATION - 1)) for i in range(FRAMES_PER_OBSERVATION)]
        self._frames = []
        places = np.empty((steps, 8))
        for step, action in enumerate(actions, start=1):
            most = MAX_SPEED / CONTROL_HZ
            target = np.clip(action[:7], JOINT_LOW, JOINT_HIGH)
            self.joint_position = self.joint_position + np.clip(target - self.joint_position, -most, most)
            closing = float(np.clip(action[7], 0, 1)) - self.gripper_position
            self.gripper_position += float(np.clip(closing, -0.2, 0.2))
            places[step - 1] = [*self.joint_position, self.gripper_position]
            if count := seen_at.count(step):
                self._frames += [self._look()] * count
        return places

    def _look(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One frame of each camera (exterior 0, exterior 1, wrist), uint8 [180, 320, 3]."""
        frames = _forward_kinematics(self.joint_position)
        solids = [*_arm_solids(frames), *_hand_solids(frames[-1], self.gripper_position), _BLOCK]
        shadows = shadow_map(solids)
        left, right = (render(exterior, shadows, solids) for exterior in self._exteriors)
        wrist = Backdrop(_wrist_camera(frames[-1]))
        return left, right, render(wrist, shadows, solids)


def _forward_kinematics(joints: np.ndarray) -> list[np.ndarray]:
    """Poses [4, 4] of the seven joint frames and the flange, in the world."""
    pose = np.eye(4)
    poses = []
    for (a, d, alpha), theta in zip(_LINKS, joints, strict=True):
        ca, sa, ct, st = np.cos(alpha), np.sin(alpha), np.cos(theta), np.sin(theta)
        pose = pose @ np.array(
            [
                [ct, -st, 0, a],
                [st * ca, ct * ca, -sa, -d * sa],
                [st * sa, ct * sa, ca, d * ca],
                [0, 0, 0, 1],
            ]
        )
        poses.append(pose)
    flange = pose.copy()
    flange[:3, 3] += _FLANGE * pose[:3, 2]
    return [*poses, flange]


def _arm_solids(frames: list[np.ndarray]) -> list[Solid]:
    def at(joint: int, x: float = 0, y: float = 0, z: float = 0) -> np.ndarray:
        """A point in the frame of joint 1..7 (8: flange)."""
        return np.asarray(frames[joint - 1] @ np.array([x, y, z, 1.0]))[:3]

    return [
        Capsule(np.array([-0.03, 0, 0.01]), np.array([0.03, 0, 0.01]), 0.095, _GREY, 0.2),
        Capsule(np.zeros(3), at(1, z=-0.10), 0.068, _WHITE),
        Capsule(at(2, z=-0.065), at(2, z=0.065), 0.064, _GREY, 0.5),
        Capsule(at(2), at(3, z=-0.06), 0.058, _WHITE),
        Capsule(at(3, z=-0.06), at(3, z=-0.02), 0.0595, _TEAL, 0.5),
        Capsule(at(3), at(4), 0.054, _WHITE),
        Capsule(at(4, z=-0.055), at(4, z=0.055), 0.056, _GREY, 0.5),
        Capsule(at(4), at(4, x=-0.0825, y=0.06), 0.052, _WHITE),
        Capsule(at(4, x=-0.0825, y=0.06), at(5, z=-0.09), 0.050, _WHITE),
        Capsule(at(5, z=-0.10), at(5, z=-0.07), 0.0515, _TEAL, 0.5),
        Capsule(at(5, z=-0.06), at(6), 0.047, _WHITE),
        Capsule(at(6, z=-0.05), at(6, z=0.05), 0.050, _GREY, 0.5),
        Capsule(at(6), at(7), 0.043, _WHITE),
        Capsule(at(7, z=-0.01), at(8, z=-0.02), 0.042, _WHITE),
    ]


def _hand_solids(flange: np.ndarray, closed: float) -> list[Solid]:
    """Palm and fingers; the fingers slide along an axis at 45 degrees to the flange's x."""
    slide = (flange[:3, 1] - flange[:3, 0]) / np.sqrt(2)
    ahead = flange[:3, 2]
    palm = flange[:3, 3] + 0.028 * ahead
    gap = 0.012 + (1 - closed) * _FINGER_TRAVEL
    solids: list[Solid] = [Capsule(palm - 0.068 * slide, palm + 0.068 * slide, 0.031, _GREY, 0.5)]
    for side in (-1, 1):
        root = palm + side * gap * slide
        solids.append(Capsule(root + 0.02 * ahead, root + 0.062 * ahead, 0.0125, _GREY, 0.5))
        solids.append(Capsule(root + 0.065 * ahead, root + 0.092 * ahead, 0.0100, _ORANGE, 0.3))
    return solids


def _wrist_camera(flange: np.ndarray) -> Camera:
    """Beside the palm, looking past the fingers; the image's up points away from the fingers' plane."""
    beside = (flange[:3, 0] + flange[:3, 1]) / np.sqrt(2)
    position = flange[:3, 3] + 0.085 * beside - 0.03 * flange[:3, 2]
    target = flange[:3, 3] + 0.22 * flange[:3, 2] + 0.01 * beside
    return Camera(position, target, up=beside, fov=62)
