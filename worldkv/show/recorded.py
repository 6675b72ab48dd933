"""A recorded session, run again and compared number by number with what was answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from worldkv.robots.embodiment import Embodiment, Quantity
from worldkv.robots.tiling import tile_views
from worldkv.show.clip import record_of
from worldkv.show.episode import Episode, EpisodeTick
from worldkv.show.live_table import LiveTable
from worldkv.show.pictures import VIDEO_HZ, resized

if TYPE_CHECKING:
    from worldkv.robots.policy import PolicySession
    from worldkv.robots.recording import RecordedTick, Recording


@dataclass
class Difference:
    """Between a recording and its replay. `largest`: ||ours - recorded|| / ||recorded|| of the worst tick."""

    num_ticks: int = 0
    num_equal: int = 0  # bit for bit, actions and latents
    largest: float = 0.0

    def exceeds(self, tolerance: float) -> bool:
        """0 asks for equal bits."""
        return self.largest > tolerance if tolerance else self.num_equal < self.num_ticks

    def add(self, tick: RecordedTick, actions: np.ndarray, latents: Any) -> None:
        pairs = (
            (actions, tick.actions),
            (latents.float().cpu().numpy(), tick.video_latents.float().numpy()),
        )
        self.num_ticks += 1
        self.num_equal += all(np.array_equal(ours, recorded) for ours, recorded in pairs)
        for ours, recorded in pairs:
            scale = float(np.linalg.norm(recorded)) or 1.0
            difference = float(np.linalg.norm(ours - recorded)) / scale
            self.largest = max(self.largest, difference if np.isfinite(difference) else float("inf"))


def drive(
    session: PolicySession, recording: Recording, robot: Embodiment, episode: Episode, table: LiveTable
) -> Difference:
    """The recording's ticks and resets in order."""
    difference = Difference()
    earlier: RecordedTick | None = None
    for event in recording.events:
        if event["event"] == "reset":
            session.reset()
            earlier = None
        elif event["event"] == "tick":
            tick = recording.tick(event, robot)
            if earlier is not None:
                _remember_what_was_seen(episode, tick, robot)
            reply = session.infer(tick.observation).result()
            difference.add(tick, reply.actions, reply.result.video_latents)
            record = record_of(reply, tick.number, session.session_id)
            episode.ticks.append(EpisodeTick(record, reply.actions, tick.seconds, reply.decode_video(), None))
            table.add(record)
            earlier = tick
    return difference


def action_names(robot: Embodiment) -> list[str]:
    """A name for each number of an action."""
    return number_names(robot.actions)


def number_names(quantities: Sequence[Quantity]) -> list[str]:
    """A name for each number of a state or an action."""
    return [f"{q.key}_{n + 1}" if q.dim > 1 else q.key for q in quantities for n in range(q.dim)]


def _remember_what_was_seen(episode: Episode, tick: RecordedTick, robot: Embodiment) -> None:
    """Put this tick's frames beside what the tick before imagined: for each imagined frame the nearest in time."""
    before = episode.ticks[-1]
    tiled = tiled_views(tick.observation.frames, robot)
    span = len(before.actions)  # steps from that tick to this one
    sent = span - np.arange(len(tiled))[::-1] * span / max(len(tiled), 1)
    imagined = np.arange(1, len(before.predicted) + 1) * robot.fps / VIDEO_HZ
    nearest = np.abs(sent[None] - imagined[:, None]).argmin(axis=1)
    episode.ticks[-1] = EpisodeTick(before.record, before.actions, before.seconds, before.predicted, tiled[nearest])


def tiled_views(frames: Mapping[str, np.ndarray | None], robot: Embodiment) -> np.ndarray:
    """The cameras as the model sees them, but for the crop: uint8 [T, H, W, 3], in the first camera's size each."""
    height, width = robot.cameras[0].height, robot.cameras[0].width
    num_frames = next(len(stack) for stack in frames.values() if stack is not None)
    black = np.zeros((num_frames, height, width, 3), np.uint8)
    views = [frames[camera.name] for camera in robot.cameras]
    return tile_views([black if view is None else resized(view, height, width) for view in views], robot.layout)
