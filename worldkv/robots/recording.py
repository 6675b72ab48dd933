"""Reads what `recorder` wrote: a session's ticks and resets, in order, and what each answered.

A recording may have been cut: by a full disk, a killed server, a download while the session ran. Some cuts are told by
a line "gap"; all others follow from what is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from worldkv.errors import BadRequest
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.observation import Observation
from worldkv.robots.recorder import END, EVENTS_FILE, FORMAT, SESSION_FILE, TICKS

Event: TypeAlias = Mapping[str, Any]  # a line of events.jsonl, or session.json


@dataclass(frozen=True)
class RecordedTick:
    """One tick: what was observed, and what was answered."""

    number: int
    seconds: float  # since the session began
    observation: Observation
    actions: np.ndarray  # float32 [horizon, action_dim]
    video_latents: torch.Tensor
    about: Event  # its line in events.jsonl


@dataclass(frozen=True)
class Cut:
    """Something is missing. `place`: of the event in `Recording.events` before which it is."""

    place: int
    text: str


@dataclass(frozen=True)
class Recording:
    """A session's folder. `events`: its lines in order; ticks are read when asked for. A line that is no event, half of
    one for example, stands there as {"event": "unreadable"}.
    """

    folder: Path
    about: Event
    events: tuple[Event, ...]

    @classmethod
    def open(cls, folder: Path) -> Recording:
        """Raises BadRequest where the folder is none, is damaged, or is of another format."""
        if not (folder / SESSION_FILE).is_file():
            inner = sorted(path.parent.name for path in folder.glob(f"*/{SESSION_FILE}")) if folder.is_dir() else []
            hint = f"; there are {len(inner)} in it, the last one is {inner[-1]}" if inner else ""
            raise BadRequest(f"{folder}: expected a recorded session with {SESSION_FILE} and {EVENTS_FILE}{hint}")
        try:
            about = json.loads((folder / SESSION_FILE).read_text(encoding="utf-8"))
            text = (folder / EVENTS_FILE).read_bytes() if (folder / EVENTS_FILE).exists() else b""
        except (OSError, ValueError) as error:
            raise BadRequest(f"{folder}: the recording is damaged: {error}") from error
        events = tuple(_event(line) for line in text.splitlines())
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise BadRequest(f"{folder / SESSION_FILE}: expected format {FORMAT}")
        return cls(folder, about, events)

    @property
    def num_ticks(self) -> int:
        return sum(event["event"] == "tick" for event in self.events)

    @property
    def num_before(self) -> int:
        """Ticks before the first cut."""
        return self.before_cuts().num_ticks

    def cuts(self) -> list[Cut]:
        """Where something is missing, in order; reads no tick, but looks whether its file is whole."""
        found, expected, told = [], 0, False
        for place, event in enumerate(self.events):
            if event["event"] in ("gap", "unreadable"):
                found.append(Cut(place, _what_is_missing(event, expected)))
                told = True
            elif event["event"] == "tick":
                number = event["tick"]
                if number != expected and not told:
                    found.append(
                        Cut(place, f"expected tick {expected}, got tick {number}: what lies between is missing")
                    )
                trouble = _trouble_with(self.folder / TICKS / event["file"])
                if trouble:
                    found.append(Cut(place, f"tick {number}: {trouble}"))
                expected, told = number + 1, False
        if not any(event["event"] == END for event in self.events):
            what = "the server was killed, the disk was full, or the session was still running"
            found.append(Cut(len(self.events), f"after {_named(expected)} there is no end: {what}"))
        return found

    def before_cuts(self) -> Recording:
        """The part that is whole from its beginning on."""
        cuts = self.cuts()
        return replace(self, events=self.events[: cuts[0].place]) if cuts else self

    def require_self_contained(self) -> None:
        """Raises BadRequest where ticks stand on what was not recorded, or on what was cut out."""
        origin = self.about.get("forked_from")
        names = {event["event"] for event in self.events}
        if origin is None and names & {"restored", "imagined"}:
            origin = "a snapshot that was restored" if "restored" in names else "what was imagined"
        if origin is not None:
            raise BadRequest(f"{self.folder}: cannot be replayed alone: it goes on from {origin}, which is not in it")
        cuts = self.cuts()
        last = max((place for place, event in enumerate(self.events) if event["event"] == "tick"), default=-1)
        inner = [cut.text for cut in cuts if cut.place < last or (cut.place == last and self.num_before == 0)]
        if inner:
            raise BadRequest(
                f"{self.folder}: cannot be replayed: ticks are missing that later ones stand on: {'; '.join(inner)}"
            )
        if not self.num_before:
            raise BadRequest(f"{self.folder}: there is no whole tick in it: {'; '.join(cut.text for cut in cuts)}")

    def ticks(self, robot: Embodiment) -> Iterator[RecordedTick]:
        for event in self.events:
            if event["event"] == "tick":
                yield self.tick(event, robot)

    def tick(self, event: Event, robot: Embodiment) -> RecordedTick:
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


def _event(line: bytes) -> Event:
    try:
        event = json.loads(line)
        is_one = isinstance(event, dict) and isinstance(event.get("event"), str)
        if is_one and event["event"] == "tick":
            is_one = isinstance(event.get("tick"), int) and isinstance(event.get("file"), str)
    except ValueError:  # UnicodeDecodeError is one
        is_one = False
    return event if is_one else {"event": "unreadable"}


def _what_is_missing(event: Event, expected: int) -> str:
    if event["event"] == "unreadable":
        return f"after {_named(expected)} a line of {EVENTS_FILE} is cut off or damaged"
    count = event.get("missing")
    what = f"{count} ticks or events are" if count else "something is"
    return f"after {_named(expected)} {what} missing: the disk was behind or full"


def _named(num_ticks: int) -> str:
    return f"tick {num_ticks - 1}" if num_ticks else "its beginning"


def _trouble_with(path: Path) -> str | None:
    """What keeps a tick's file from being read; its header and length are looked at."""
    try:
        with safe_open(path, "np"):
            return None
    except FileNotFoundError:
        return f"{path.name} is missing"
    except (OSError, SafetensorError) as error:
        return f"{path.name} is cut off or damaged ({error})"
