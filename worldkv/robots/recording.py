"""Reads what `recorder` wrote: a session's ticks and resets, in order, and what each answered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from worldkv.errors import BadRequest
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.observation import Observation
from worldkv.robots.recorder import EVENTS_FILE, FORMAT, SESSION_FILE, TICKS


@dataclass(frozen=True)
class RecordedTick:
    """One tick: what was observed, and what was answered."""

    number: int
    seconds: float  # since the session began
    observation: Observation
    actions: np.ndarray  # float32 [horizon, action_dim]
    video_latents: torch.Tensor
    about: Mapping[str, Any]  # its line in events.jsonl


@dataclass(frozen=True)
class Recording:
    """A session's folder. `events`: its lines in order; ticks are read when asked for."""

    folder: Path
    about: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...]

    @classmethod
    def open(cls, folder: Path) -> Recording:
        """Raises BadRequest where the folder is none, is damaged, or is of another format."""
        if not (folder / SESSION_FILE).is_file():
            inner = sorted(path.parent.name for path in folder.glob(f"*/{SESSION_FILE}")) if folder.is_dir() else []
            hint = f"; there are {len(inner)} in it, the last one is {inner[-1]}" if inner else ""
            raise BadRequest(f"{folder}: expected a recorded session with {SESSION_FILE} and {EVENTS_FILE}{hint}")
        try:
            about = json.loads((folder / SESSION_FILE).read_text(encoding="utf-8"))
            lines = (folder / EVENTS_FILE).read_text(encoding="utf-8").splitlines()
            events = tuple(json.loads(line) for line in lines)
        except (OSError, ValueError) as error:
            raise BadRequest(f"{folder}: the recording is damaged: {error}") from error
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise BadRequest(f"{folder / SESSION_FILE}: expected format {FORMAT}")
        return cls(folder, about, events)

    @property
    def num_ticks(self) -> int:
        return sum(event["event"] == "tick" for event in self.events)

    def require_self_contained(self) -> None:
        """Raises BadRequest where ticks stand on what was not recorded."""
        origin = self.about.get("forked_from")
        names = {event["event"] for event in self.events}
        if origin is None and names & {"restored", "imagined"}:
            origin = "a snapshot that was restored" if "restored" in names else "what was imagined"
        if origin is not None:
            raise BadRequest(f"{self.folder}: cannot be replayed alone: it goes on from {origin}, which is not in it")
        numbers = [event["tick"] for event in self.events if event["event"] == "tick"]
        if numbers != list(range(len(numbers))) or "gap" in names:
            raise BadRequest(f"{self.folder}: cannot be replayed: ticks are missing (the disk was behind or full)")

    def ticks(self, robot: Embodiment) -> Iterator[RecordedTick]:
        for event in self.events:
            if event["event"] == "tick":
                yield self.tick(event, robot)

    def tick(self, event: Mapping[str, Any], robot: Embodiment) -> RecordedTick:
        """Raises BadRequest for a tick that is damaged or of another robot."""
        path = self.folder / TICKS / str(event["file"])
        try:
            tensors = load_file(path)
            frames = {
                camera.name: tensors.get(f"frames.{camera.name}")
                if camera.optional
                else tensors[f"frames.{camera.name}"]
                for camera in robot.cameras
            }
            state = {quantity.key: tensors[f"state.{quantity.key}"].numpy() for quantity in robot.state}
            actions, latents = tensors["actions"].numpy(), tensors["video_latents"]
        except (OSError, SafetensorError, KeyError) as error:
            raise BadRequest(f"{path}: not a tick of this robot ({robot.tag}): {error}") from error
        observation = Observation(
            {name: None if tensor is None else tensor.numpy() for name, tensor in frames.items()},
            int(event["num_frames"]),
            state,
            str(event["prompt"]),
            {},
        )
        return RecordedTick(int(event["tick"]), float(event["seconds"]), observation, actions, latents, event)
