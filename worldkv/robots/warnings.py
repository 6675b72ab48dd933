"""What a tick's frames and counts say about a robot's client, beside the tick before: probable mistakes, as texts.

Swapped cameras cannot be told: nothing in a checkpoint says what a camera's pictures look like. `worldkv doctor` draws
the picture that the model sees instead, for eyes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worldkv.robots.embodiment import Embodiment
from worldkv.robots.observation import Observation


def contract_warnings(
    observation: Observation, before: Sequence[np.ndarray], now: Sequence[np.ndarray], robot: Embodiment
) -> dict[str, str]:
    """Subject -> text. `before`, `now`: what the session remembers of each camera, uint8 [T, h, w, 3], before and after
    this tick; empty before the first one."""
    warnings: dict[str, str] = {}
    if before:
        warnings |= _clock_warnings(observation, robot)
        warnings |= _frozen_cameras(observation, before, now, robot)
    return warnings


def _clock_warnings(observation: Observation, robot: Embodiment) -> dict[str, str]:
    warnings: dict[str, str] = {}
    horizon, steps = robot.action_horizon, observation.executed_steps
    if observation.num_frames == 1 and robot.frames_per_tick > 1:
        warnings["one frame"] = (
            f"one new frame in a tick: the model expects {robot.frames_per_tick}, spread over the {horizon} steps "
            "since the last tick; its clock may run ahead"
        )
    if steps is not None and steps != horizon:
        how = f"{horizon / steps:.2g} times too fast" if 0 < steps < horizon else "wrong"
        warnings["executed steps"] = (
            f"{steps} of {horizon} actions were executed since the last tick: the model's clock moves by {horizon} "
            f"steps a tick, so it goes {how}; execute whole chunks for what the model was trained on"
        )
    return warnings


def _frozen_cameras(
    observation: Observation, before: Sequence[np.ndarray], now: Sequence[np.ndarray], robot: Embodiment
) -> dict[str, str]:
    """A camera whose new frames are all its last one, while another camera's differ."""
    sent = [observation.frames[camera.name] is not None for camera in robot.cameras]
    still = [bool((new[-observation.num_frames :] == old[-1:]).all()) for old, new in zip(before, now, strict=True)]
    if all(same or not here for same, here in zip(still, sent, strict=True)):
        return {}
    frozen = [camera.field for camera, same, here in zip(robot.cameras, still, sent, strict=True) if same and here]
    return {
        f"{field} frozen": f"{field} has not changed since the last tick while another camera has: is it frozen?"
        for field in frozen
    }
