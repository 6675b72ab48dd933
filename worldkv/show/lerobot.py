"""A recording as a LeRobot dataset (format v2.1): one episode, one row a tick, a video a camera.

A row is what the robot showed at a tick: the newest frames, its state, and the whole chunk of actions it was given.
Sessions are sampled at ticks, so the dataset's rate is the ticks'. Needs pyarrow and PyAV.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from worldkv.errors import BadRequest
from worldkv.robots.embodiment import Embodiment
from worldkv.show.recorded import number_names
from worldkv.show.video import write_video

if TYPE_CHECKING:
    from worldkv.robots.recording import RecordedTick, Recording

_PATHS = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}


def check_lerobot(folder: Path) -> None:
    """Raises ValueError without pyarrow, and where the folder holds something: before any work."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError("--lerobot needs pyarrow: pip install pyarrow")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--lerobot: expected an empty folder, {folder} holds something")


def write_lerobot(folder: Path, recording: Recording, robot: Embodiment) -> None:
    """What is before the recording's first cut. Raises like `check_lerobot`, and BadRequest where that is nothing."""
    check_lerobot(folder)
    recording = recording.before_cuts()
    if not recording.num_ticks:
        raise BadRequest(f"{recording.folder}: there is no whole tick to write")
    import pyarrow
    import pyarrow.parquet

    ticks = list(recording.ticks(robot))
    rate = robot.fps / len(ticks[0].actions)
    prompts = list(dict.fromkeys(tick.observation.prompt for tick in ticks))
    for name in ("meta", "data/chunk-000"):
        (folder / name).mkdir(parents=True)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([_row(tick, robot, rate, prompts) for tick in ticks], _schema(pyarrow)),
        folder / "data/chunk-000/episode_000000.parquet",
    )
    for camera in robot.cameras:
        target = folder / f"videos/chunk-000/observation.images.{camera.name}/episode_000000.mp4"
        target.parent.mkdir(parents=True)
        black = np.zeros((1, camera.height, camera.width, 3), np.uint8)
        stacks = (tick.observation.frames[camera.name] for tick in ticks)
        write_video(target, (black[0] if stack is None else stack[-1] for stack in stacks), rate)
    (folder / "meta/info.json").write_text(json.dumps(_info(ticks, robot, rate, len(prompts)), indent=1) + "\n")
    episode = {"episode_index": 0, "tasks": prompts, "length": len(ticks)}
    (folder / "meta/episodes.jsonl").write_text(json.dumps(episode) + "\n")
    tasks = [json.dumps({"task_index": index, "task": prompt}) for index, prompt in enumerate(prompts)]
    (folder / "meta/tasks.jsonl").write_text("\n".join(tasks) + "\n")


def _row(tick: RecordedTick, robot: Embodiment, rate: float, prompts: list[str]) -> dict[str, Any]:
    state = np.concatenate([tick.observation.state[quantity.key] for quantity in robot.state])
    return {
        "observation.state": state.astype(np.float32).tolist(),
        "action": tick.actions[0].tolist(),
        "action_chunk": tick.actions.ravel().tolist(),
        "timestamp": tick.number / rate,
        "frame_index": tick.number,
        "episode_index": 0,
        "index": tick.number,
        "task_index": prompts.index(tick.observation.prompt),
    }


def _schema(pyarrow: Any) -> Any:
    numbers = pyarrow.list_(pyarrow.float32())
    lists = [(name, numbers) for name in ("observation.state", "action", "action_chunk")]
    counts = [(name, pyarrow.int64()) for name in ("frame_index", "episode_index", "index", "task_index")]
    return pyarrow.schema([*lists, ("timestamp", pyarrow.float32()), *counts])


def _info(ticks: list[RecordedTick], robot: Embodiment, rate: float, num_tasks: int) -> dict[str, Any]:
    state, actions, horizon = number_names(robot.state), number_names(robot.actions), len(ticks[0].actions)
    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": [len(state)], "names": state},
        "action": {"dtype": "float32", "shape": [len(actions)], "names": actions},
        "action_chunk": {"dtype": "float32", "shape": [horizon * len(actions)], "names": None},
    }
    for camera in robot.cameras:
        features[f"observation.images.{camera.name}"] = {
            "dtype": "video",
            "shape": [camera.height, camera.width, 3],
            "names": ["height", "width", "channels"],
            "info": {"video.fps": rate, "video.codec": "h264", "video.pix_fmt": "yuv420p", "has_audio": False},
        }
    for name, dtype in (("timestamp", "float32"), *((n, "int64") for n in ("frame_index", "episode_index", "index"))):
        features[name] = {"dtype": dtype, "shape": [1], "names": None}
    features["task_index"] = {"dtype": "int64", "shape": [1], "names": None}
    return {
        "codebase_version": "v2.1",
        "robot_type": robot.tag,
        "total_episodes": 1,
        "total_frames": len(ticks),
        "total_tasks": num_tasks,
        "total_videos": len(robot.cameras),
        "total_chunks": 1,
        "chunks_size": 1000,
        "fps": rate,
        "splits": {"train": "0:1"},
        **_PATHS,
        "features": features,
    }
