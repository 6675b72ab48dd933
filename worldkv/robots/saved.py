"""What a session remembers of its robot, in an export; another robot's is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worldkv.errors import BadRequest
from worldkv.models.saving import Saved, check_same, check_tensor, load, save
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.pending import Pending
from worldkv.robots.preparation import Memory, Prompt

_UINT8, _INT64, _FLOAT64 = (np.dtype(kind) for kind in (np.uint8, np.int64, np.float64))


def save_memory(memory: Memory, robot: Embodiment) -> Saved:
    """For an export."""
    saved = save(memory, "memory")
    return Saved({"contract": _contract(robot), "memory": saved.values}, saved.tensors)


def load_memory(saved: Saved, robot: Embodiment) -> Memory:
    """Raises BadRequest, naming the place, for what no session of this robot remembers."""
    values = check_same(saved.values, {"contract": _contract(robot)}, "robot")
    known = {"Prompt": Prompt, "Pending": Pending}
    memory = load(Saved(values.get("memory"), saved.tensors), Memory, known, "memory")
    if memory.views:
        _check_views(memory.views, "memory.views", robot)
    _check_prompt(memory.prompt, "memory.prompt", robot)
    if memory.state is not None:
        _check_names(memory.state, "memory.state", [quantity.key for quantity in robot.state])
        for quantity in robot.state:
            check_tensor(memory.state[quantity.key], f"memory.state.{quantity.key}", _FLOAT64, (quantity.dim,))
    if memory.views and (memory.prompt is None or memory.state is None):
        raise BadRequest("import: memory: expected a prompt and a state beside views")
    if memory.pending is not None:
        _check_pending(memory.pending, robot)
    return memory


def _contract(robot: Embodiment) -> dict[str, object]:
    """What of a robot its sessions depend on."""
    return {
        "tag": robot.tag,
        "cameras": [[camera.name, camera.height, camera.width] for camera in robot.cameras],
        "state": [[quantity.key, quantity.dim] for quantity in robot.state],
        "actions": [[quantity.key, quantity.dim] for quantity in robot.actions],
        "view_size": [robot.view_height, robot.view_width],
        "frames_per_tick": robot.frames_per_tick,
        "text_len": robot.text_len,
    }


def _check_views(views: Sequence[np.ndarray], where: str, robot: Embodiment) -> None:
    """Alike many of each camera, as many as a tick takes at most."""
    counts = {len(view) for view in views if view.ndim}
    if len(views) != len(robot.cameras) or len(counts) != 1 or max(counts) > robot.frames_per_tick:
        expected = f"1 to {robot.frames_per_tick} frames of each of {len(robot.cameras)} cameras"
        raise BadRequest(f"import: {where}: expected {expected}, got {[view.shape for view in views][:9]}")
    for index, view in enumerate(views):
        check_tensor(view, f"{where}.{index}", _UINT8, (None, robot.view_height, robot.view_width, 3))


def _check_prompt(prompt: Prompt | None, where: str, robot: Embodiment) -> None:
    if prompt is not None:
        check_tensor(prompt.token_ids, f"{where}.token_ids", _INT64, (1, robot.text_len))
        check_tensor(prompt.attention_mask, f"{where}.attention_mask", _INT64, (1, robot.text_len))


def _check_names(named: object, where: str, expected: Sequence[str]) -> None:
    assert isinstance(named, dict), where
    if set(named) != set(expected):
        raise BadRequest(f"import: {where}: expected {list(expected)}, got {sorted(named)[:9]}")


def _check_pending(pending: Pending, robot: Embodiment) -> None:
    where = "memory.pending"
    if pending.tiled is not None:
        raise BadRequest(f"import: {where}.tiled: expected a session between two ticks")
    _check_views(pending.views, f"{where}.views", robot)
    _check_prompt(pending.prompt, f"{where}.prompt", robot)
    _check_names(pending.frames, f"{where}.frames", [camera.name for camera in robot.cameras])
    if pending.num_frames != len(pending.views[0]):
        raise BadRequest(f"import: {where}.num_frames: expected {len(pending.views[0])}, got {pending.num_frames}")
    for camera in robot.cameras:
        shape = (pending.num_frames, None, None, 3)
        check_tensor(pending.frames[camera.name], f"{where}.frames.{camera.name}", _UINT8, shape)
