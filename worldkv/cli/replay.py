"""`worldkv replay`: a recorded three-camera episode through a policy in this process, no server between."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from worldkv.cli.common import OK, describe_model, is_random, load_policy_for, progress
from worldkv.cli.episode import VIDEO_HZ, Episode, EpisodeTick, tile_cameras
from worldkv.cli.live_table import LiveTable
from worldkv.cli.records import TickRecord
from worldkv.cli.video import read_video
from worldkv.policy.policy import Policy, PolicySession

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


def run(arguments: argparse.Namespace) -> int:
    if arguments.max_calls is not None and arguments.max_calls < 1:
        raise ValueError(f"--max-calls: expected at least 1, got {arguments.max_calls}")
    clip = read_clip(arguments.clip)
    schedule = frame_schedule(_num_frames(clip))[: arguments.max_calls]
    arguments.output.mkdir(parents=True, exist_ok=True)
    policy = load_policy_for(arguments, max_sessions=1)
    try:
        for line in describe_model(policy, arguments.checkpoint):
            print(line)
        note = "random weights" if is_random(arguments.checkpoint) else ""
        window_frames = policy.engine.model.config.window_frames
        episode = Episode(policy.embodiment.fps, window_frames, note)
        title = f"{arguments.clip.name}: {len(schedule)} requests"
        with LiveTable(window_frames, title=title) as table:
            _drive(policy, clip, schedule, arguments.prompt or DEFAULT_PROMPT, episode, table)
    finally:
        policy.close()
        policy.engine.shutdown()
    with progress("writing video and plots") as step:
        files = episode.save(arguments.output, step)
    _summarise(episode, arguments.output, files)
    return OK


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


def frame_schedule(num_frames: int) -> list[list[int]]:
    """Which frames each request sends: frame 0 alone, then four that end 24 frames after the last ones.

    The reference's test client sends the same.
    """
    anchors = range(-OFFSETS[0], num_frames, FRAMES_BETWEEN_TICKS)
    return [[0], *([anchor + offset for offset in OFFSETS] for anchor in anchors)]


def _drive(
    policy: Policy, clip: Clip, schedule: list[list[int]], prompt: str, episode: Episode, table: LiveTable
) -> None:
    session = policy.open_session()
    try:
        for number, frames in enumerate(schedule):
            tick = _tick(session, clip, frames, prompt, number)
            episode.ticks.append(tick)
            table.add(tick.record)
    finally:
        session.close("the replay is over")


def _tick(session: PolicySession, clip: Clip, frames: list[int], prompt: str, number: int) -> EpisodeTick:
    observation: dict[str, Any] = {name: video[frames] for name, video in clip.items()}
    observation["observation/joint_position"] = np.zeros(7)
    observation["observation/gripper_position"] = np.zeros(1)
    observation["prompt"] = prompt
    reply = session.infer(observation).result()
    result, predicted = reply.result, reply.decode_video()
    record = TickRecord(
        number,
        session.session_id,
        reply.timings,
        result.frames_cached,
        result.blocks_used,
        result.blocks_free,
        result.restart_reason,
    )
    now = frames[-1]
    later = now + np.arange(1, len(predicted) + 1) * (CLIP_HZ // VIDEO_HZ)  # when the imagined frames would be seen
    later = later[later < _num_frames(clip)]
    seen = tile_cameras({name: video[later] for name, video in clip.items()})
    return EpisodeTick(record, reply.actions, now / CLIP_HZ, predicted, seen)


def _num_frames(clip: Clip) -> int:
    return len(next(iter(clip.values())))


def _summarise(episode: Episode, folder: Path, files: dict[str, str]) -> None:
    totals = [record.total_ms for record in episode.records]
    restarts = sum(record.restart_reason is not None for record in episode.records)
    num_actions = sum(len(tick.actions) for tick in episode.ticks)
    print(
        f"requests: {len(totals)}, windows started: {restarts}, actions: {num_actions}, all finite; "
        f"median {statistics.median(totals):.0f} ms a request"
    )
    if episode.note:
        print(f"{episode.note}: what you see is noise, not a prediction")
    print(f"look into {folder}/")
    for name, what in files.items():
        print(f"  {name:<24} {what}")
