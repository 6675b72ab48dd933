"""A clip of three cameras as the requests of the reference's test client: to a policy here, or over the wire."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from worldkv.show.episode import Episode, EpisodeTick, tile_cameras
from worldkv.show.live_table import LiveTable
from worldkv.show.pictures import VIDEO_HZ
from worldkv.show.records import TickRecord, record_of_answer
from worldkv.show.terminal import progress
from worldkv.show.video import read_video

if TYPE_CHECKING:
    from worldkv.robots.policy import PolicyReply, PolicySession
    from worldkv_client.client import PolicyClient

DEFAULT_PROMPT = "Move the pan forward and use the brush in the middle of the plates to brush the inside of the pan"
CLIP_HZ = 15
FRAMES_BETWEEN_TICKS = 24
OFFSETS = (-23, -16, -8, 0)  # of a request's frames from its newest one

# A clip's files have the model's camera names, which RoboArena's observations call by one less.
CAMERAS = {
    "exterior_image_1_left": "observation/exterior_image_0_left",
    "exterior_image_2_left": "observation/exterior_image_1_left",
    "wrist_image_left": "observation/wrist_image_left",
}
Clip = dict[str, np.ndarray]  # observation name -> uint8 [T, H, W, 3]
Answer = Callable[[dict[str, Any], int], tuple[TickRecord, np.ndarray, np.ndarray]]  # record, actions, imagined frames


def read_clip(folder: Path) -> Clip:
    """The three camera files. Raises ValueError where one is missing, broken, or does not fit the others."""
    missing = [f"{name}.mp4" for name in CAMERAS if not (folder / f"{name}.mp4").is_file()]
    if missing:
        raise ValueError(f"--clip: expected a folder with {', '.join(missing)}, got {folder}")
    clip = {}
    for name, field in CAMERAS.items():
        with progress(f"reading {name}.mp4") as step:
            clip[field] = read_video(folder / f"{name}.mp4", step)
    shapes = {name: frames.shape for name, frames in clip.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"--clip: expected three videos of one length and size, got {shapes}")
    return clip


def num_frames(clip: Clip) -> int:
    return len(next(iter(clip.values())))


def frame_schedule(length: int) -> list[list[int]]:
    """The frames of each request: frame 0 alone, then four that end 24 frames after the last ones.

    The reference's test client sends the same.
    """
    anchors = range(-OFFSETS[0], length, FRAMES_BETWEEN_TICKS)
    return [[0], *([anchor + offset for offset in OFFSETS] for anchor in anchors)]


def drive(
    answer: Answer, clip: Clip, schedule: list[list[int]], prompt: str, episode: Episode, table: LiveTable
) -> None:
    """Every request of the schedule, one after the other."""
    for number, frames in enumerate(schedule):
        observation: dict[str, Any] = {name: video[frames] for name, video in clip.items()}
        observation["observation/joint_position"] = np.zeros(7)
        observation["observation/gripper_position"] = np.zeros(1)
        observation["prompt"] = prompt
        record, actions, predicted = answer(observation, number)
        now = frames[-1]
        # when the imagined frames would be seen
        later = now + np.arange(1, len(predicted) + 1) * (CLIP_HZ // VIDEO_HZ)
        later = later[later < num_frames(clip)]
        seen = tile_cameras({name: video[later] for name, video in clip.items()})
        episode.ticks.append(EpisodeTick(record, actions, now / CLIP_HZ, predicted, seen))
        table.add(record)


def answered_here(session: PolicySession) -> Answer:
    def answer(observation: dict[str, Any], number: int) -> tuple[TickRecord, np.ndarray, np.ndarray]:
        reply = session.infer(observation).result()
        return record_of(reply, number, session.session_id), reply.actions, reply.decode_video()

    return answer


def record_of(reply: PolicyReply, number: int, session_id: str) -> TickRecord:
    return TickRecord.of(number, session_id, reply.timings, reply.facts)


def answered_by(client: PolicyClient) -> Answer:
    """Over the wire, in the client's dialect."""

    def answer(observation: dict[str, Any], number: int) -> tuple[TickRecord, np.ndarray, np.ndarray]:
        reply = client.infer(observation, details=True)
        assert isinstance(reply, dict), "details come in a map"
        record = record_of_answer(reply, number, client.session_id)
        return record, np.array(reply["actions"]), np.array(reply["predicted_video"])

    return answer
