"""A policy: robot observations in, absolute robot actions out. The robots' app.

Does not know the wire nor the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import numpy as np

from worldkv.app import App, KeptAhead, Reply, Session
from worldkv.models.world_action import TickResult
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.observation import Frames, Observation
from worldkv.robots.pending import Begin, Kept
from worldkv.robots.preparation import Imagined, Preparation, Seen
from worldkv.robots.program import RobotPolicy, RobotResult
from worldkv.robots.recorder import Recorder
from worldkv.robots.schema import robot_contract
from worldkv.words import count

if TYPE_CHECKING:
    import torch

    from worldkv.engine.engine import Engine, TickReply

__all__ = ["Imagined", "Policy", "PolicyReply", "PolicySession"]

_SHOWN_DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class PolicyReply(Reply):
    """What one tick answers.

    `actions`: float32 [horizon, action_dim], absolute joint positions in radians, then the gripper in 0..1. `result`:
    the model's own. `observation`: as it was read; None for an imagined tick. `timings`: queue, preprocess, encode,
    commit, denoise, postprocess, and total.
    """

    actions: np.ndarray
    result: TickResult
    observation: Observation | None

    @property
    def output(self) -> Mapping[str, object]:
        return {"actions": self.actions}

    @property
    def shown(self) -> Mapping[str, object]:
        said: dict[str, object] = {"actions": [_rounded(row) for row in self.actions]}
        if self.observation is not None:
            said["prompt"] = self.observation.prompt
            said["state"] = {key: _rounded(value) for key, value in self.observation.state.items()}
        return said

    @property
    def seen(self) -> Mapping[str, np.ndarray] | None:
        if self.observation is None:
            return None
        return {name: frames for name, frames in self.observation.frames.items() if frames is not None}

    @property
    def events(self) -> tuple[str, ...]:
        reason = self.result.restart_reason
        return () if reason is None else (f"the window restarted ({reason})",)


class Policy(App[Seen, "RobotResult | Kept", PolicyReply]):
    """Serves one embodiment of one checkpoint. Thread-safe; whoever made the engine shuts it down.

    Its sessions take what `read` made, or a map by the embodiment's fields, which are RoboArena's for DROID: images
    uint8 [H, W, 3] or [T, H, W, 3], joints [7] in radians, the gripper [1] in 0..1, `prompt`.
    """

    speaks: ClassVar[str] = "robots"

    def __init__(
        self, engine: Engine[Seen, Any, RobotResult | Kept], preparation: Preparation, *, random_weights: bool = False
    ) -> None:
        super().__init__(engine, random_weights=random_weights)
        self._preparation = preparation

    @property
    def embodiment(self) -> Embodiment:
        return self._preparation.embodiment

    @property
    def name(self) -> str:
        return self.embodiment.tag

    @property
    def greeting(self) -> dict[str, object]:
        """The six keys that RoboArena clients configure themselves from."""
        sizes = {(camera.height, camera.width) for camera in self.embodiment.cameras}
        return {
            "image_resolution": list(sizes.pop()) if len(sizes) == 1 else None,
            "needs_stereo_camera": False,
            "needs_session_id": True,
            **asdict(self.embodiment.roboarena),
        }

    @property
    def period_s(self) -> float:
        return self.embodiment.action_horizon / self.embodiment.fps

    def describe(self) -> dict[str, object]:
        robot = self.embodiment
        return {
            **robot_contract(robot).model_dump(),
            "layout": robot.layout,
            "camera_size": [robot.cameras[0].height, robot.cameras[0].width],
            "actions": [{"key": quantity.key, "dim": quantity.dim} for quantity in robot.actions],
            "axes": {  # of a state, and of the action with its key, which is answered in the same unit
                quantity.key: {"meaning": quantity.meaning, "range": quantity.allowed} for quantity in robot.state
            },
        }

    @property
    def summary(self) -> dict[str, str]:
        robot, camera = self.embodiment, self.embodiment.cameras[0]
        return {
            "robot": f"{robot.tag}: {count(len(robot.cameras), 'camera')} of {camera.width} x {camera.height}, "
            f"{count(robot.action_horizon, 'action')} of {count(robot.action_dim, 'number')} at {robot.fps:g} Hz"
        }

    def record(self, folder: Path, about: Mapping[str, object], limit_bytes: float) -> None:
        robot = {"embodiment": self.embodiment.tag, "rate_hz": self.embodiment.fps}
        self.recorder = Recorder(folder, {**about, **robot}, limit_bytes)

    def read(self, fields: Mapping[str, Any]) -> Observation:
        """Check what a robot sent, before any session is touched for it; `infer` takes the result as well.

        Raises BadRequest. Takes milliseconds: not for an event loop.
        """
        return self._preparation.read(fields)

    def imagined(self, noise_seed: int | None) -> Imagined:
        return Imagined(noise_seed)

    def read_ahead(self, fields: Mapping[str, object]) -> Frames:
        """Check frames that a robot sent ahead of its request. Raises like `read`."""
        return self._preparation.read_frames(fields)

    def kept(self, ticked: TickReply[RobotResult | Kept]) -> KeptAhead[Seen]:
        assert isinstance(ticked.result, Kept), ticked.result
        begin = Begin() if ticked.result.is_whole else None
        return KeptAhead(num_frames=ticked.result.num_frames, warnings=ticked.result.warnings, begin=begin)

    def reply(self, ticked: TickReply[RobotResult | Kept]) -> PolicyReply:
        assert isinstance(ticked.result, RobotResult), ticked.result
        result, info = ticked.result.model, ticked.info
        facts = {
            "restart_reason": result.restart_reason,
            "frames_cached": result.start_frame,
            "start_frame": result.start_frame,
            "blocks_used": info.blocks_used,
            "blocks_free": info.blocks_free,
        }
        return PolicyReply(
            timings=info.timings,
            warnings=ticked.result.warnings,
            facts=facts,
            decode_video=lambda: self._imagined_video(result),
            actions=ticked.result.actions,
            result=result,
            observation=ticked.result.observation,
        )

    def _imagined_video(self, result: TickResult) -> np.ndarray:
        model = cast("RobotPolicy[Any]", self.engine.model).model
        video = self.engine.compute(model.imagined_video(result)).result()
        return model.frames(cast("torch.Tensor", video), result.video_latents.shape[1])


PolicySession: TypeAlias = Session[Seen, "RobotResult | Kept", PolicyReply]


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), _SHOWN_DIGITS) for value in values]
