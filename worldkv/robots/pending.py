"""Frames that a session has been sent ahead of the request that they are for. Values; nothing here is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from worldkv.errors import BadRequest
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.observation import Frames, Observation

if TYPE_CHECKING:
    from worldkv.robots.preparation import Prompt

Views = tuple[np.ndarray, ...]  # per camera, uint8 [T, h, w, 3], as the model is to see them


@dataclass(frozen=True)
class Pending:
    """`frames`, `num_frames`: as of an Observation. `views`: the same, prepared. `prompt`: what the tick that they are
    for will probably be asked with; None where that is not known. `tiled`: all frames of that tick, once it began."""

    frames: Mapping[str, np.ndarray | None]
    num_frames: int
    views: Views
    prompt: Prompt | None
    tiled: np.ndarray | None = None


@dataclass(frozen=True)
class Kept:
    """The answer to frames: how many of each camera wait for a request, warnings that are news, and whether the tick
    can begin with them."""

    num_frames: int
    warnings: tuple[str, ...]
    is_whole: bool


@dataclass(frozen=True)
class Begin:
    """What a tick is given that begins with what is pending."""


def extended(pending: Pending | None, new: Frames, views: Views, prompt: Prompt | None, robot: Embodiment) -> Pending:
    """`pending` and the new frames, whose `views` these are. Raises BadRequest where a tick takes no more."""
    num_waiting = 0 if pending is None else pending.num_frames
    total, most = num_waiting + new.num_frames, robot.frames_per_tick
    if total > most:
        raise BadRequest(
            f"observe: expected at most {most} frames of each camera between two requests, which is what a tick takes; "
            f"{num_waiting} wait already and {new.num_frames} more came: ask for actions, or send fewer"
        )
    if pending is None:
        return Pending(new.frames, new.num_frames, views, prompt)
    frames = _joined(pending.frames, pending.num_frames, new.frames, new.num_frames, robot)
    return Pending(frames, total, joined_views(pending.views, views), prompt)


def require_as_told(observation: Observation, pending: Pending | None) -> None:
    """Raises BadRequest where its client has sent other frames ahead of it than those that came."""
    num_waiting = 0 if pending is None else pending.num_frames
    if observation.frames_ahead is None or observation.frames_ahead == num_waiting:
        return
    raise BadRequest(
        f"frames_ahead: expected {num_waiting}, as many frames of each camera as this session was sent since its last "
        f"reply, got {observation.frames_ahead}; send this request's frames with it, without frames_ahead"
    )


def completed(observation: Observation, pending: Pending, robot: Embodiment) -> Observation:
    """The observation as it would be had its client sent all of its frames with it."""
    if not observation.num_frames:
        return replace(observation, frames=pending.frames, num_frames=pending.num_frames)
    frames = _joined(pending.frames, pending.num_frames, observation.frames, observation.num_frames, robot)
    most = robot.frames_per_tick
    newest = {name: None if stack is None else stack[-most:] for name, stack in frames.items()}
    num_frames = min(most, pending.num_frames + observation.num_frames)
    return replace(observation, frames=newest, num_frames=num_frames)


def joined_views(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> Views:
    """The frames of each camera, one after the other."""
    return tuple(np.concatenate(both) for both in zip(before, after, strict=True))


def _joined(
    before: Mapping[str, np.ndarray | None],
    num_before: int,
    after: Mapping[str, np.ndarray | None],
    num_after: int,
    robot: Embodiment,
) -> dict[str, np.ndarray | None]:
    """A camera that is in one of both only was black in the other."""
    frames: dict[str, np.ndarray | None] = {}
    for camera in robot.cameras:
        parts = [(before[camera.name], num_before), (after[camera.name], num_after)]
        frames[camera.name] = None
        if any(stack is not None for stack, _ in parts):
            shape = (camera.height, camera.width, 3)
            stacks = [np.zeros((count, *shape), np.uint8) if stack is None else stack for stack, count in parts]
            frames[camera.name] = np.concatenate(stacks)
    return frames
