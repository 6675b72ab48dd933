"""The files of an episode: actions as numbers, videos and plots, in one folder.

Knows the order of the three cameras in the model's image. Does not know where its ticks ran.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from worldkv.robots.tiling import tile_views
from worldkv.show.captions import captioned
from worldkv.show.pictures import VIDEO_HZ, beside, enlarged
from worldkv.show.plots import DROID_ACTIONS, plot_actions, plot_cache, plot_latency
from worldkv.show.records import TickRecord
from worldkv.show.terminal import Step
from worldkv.show.video import write_video


@dataclass(frozen=True)
class EpisodeTick:
    """One tick. `actions`: [horizon, numbers], from `seconds` on. `predicted`: uint8 [N, H, W, 3], what the model
    imagines to see meanwhile; `seen`: uint8 [N, h, w, 3], what was seen, None where nobody looked. `followed`:
    [horizon, numbers], where the robot was after each action, None where nobody knows."""

    record: TickRecord
    actions: np.ndarray
    seconds: float
    predicted: np.ndarray
    seen: np.ndarray | None
    followed: np.ndarray | None = None


@dataclass
class Episode:
    """Ticks in order. `rate_hz`: actions per second. `window_frames`: of a full window, 0 where nobody knows."""

    rate_hz: float
    window_frames: int
    note: str = ""  # a word on the weights, for people
    remarks: Mapping[str, str] = field(default_factory=dict)  # by picture, "actions" to "latency": what to look at
    action_names: Sequence[str] = DROID_ACTIONS
    ticks: list[EpisodeTick] = field(default_factory=list)

    @property
    def records(self) -> list[TickRecord]:
        return [tick.record for tick in self.ticks]

    def save(self, folder: Path, step: Step) -> dict[str, str]:
        """Write everything; returns what each file shows. `step(done, in all)` as it goes."""
        works: list[tuple[str, str, Callable[[Path], None]]] = [
            ("actions.npz", "actions [tick, step, number], and when each tick began", self._write_npz),
            ("actions.csv", "the same as a table", self._write_csv),
            ("actions.png", "each number of the actions over time", self._draw_actions),
            ("cache.png", "frames and blocks in the cache, and window restarts", self._draw_cache),
            ("latency.png", "milliseconds of each tick by stage", self._draw_latency),
            ("predicted.mp4", "what the model imagined to see", self._write_predicted),
        ]
        if any(tick.seen is not None for tick in self.ticks):
            works.append(
                ("seen_and_predicted.mp4", "left what was seen, right what had been imagined", self._write_comparison)
            )
        for done, (name, _, write) in enumerate(works, start=1):
            write(folder / name)
            step(done, len(works))
        return {name: what for name, what, _ in works}

    def _draw_actions(self, path: Path) -> None:
        chunks = [tick.actions for tick in self.ticks]
        followed = [tick.followed for tick in self.ticks if tick.followed is not None]
        note = self._remark("nothing was learned, so the motions mean nothing", "actions")
        plot_actions(path, chunks, rate_hz=self.rate_hz, followed=followed, note=note, names=self.action_names)

    def _draw_cache(self, path: Path) -> None:
        plot_cache(path, self.records, window_frames=self.window_frames, note=self.remarks.get("cache", ""))

    def _draw_latency(self, path: Path) -> None:
        chunk_s = max(len(tick.actions) for tick in self.ticks) / self.rate_hz
        plot_latency(path, self.records, chunk_s=chunk_s, note=self.remarks.get("latency", ""))

    def _remark(self, consequence: str, picture: str) -> str:
        """What the note on the weights means for a picture, and what to look at there."""
        about = [f"{self.note[0].upper()}{self.note[1:]}: {consequence}."] if self.note else []
        return " ".join([*about, *([self.remarks[picture]] if picture in self.remarks else [])])

    def _write_npz(self, path: Path) -> None:
        np.savez(
            path,
            actions=np.stack([tick.actions for tick in self.ticks]).astype(np.float32),
            seconds=np.array([tick.seconds for tick in self.ticks]),
            restart_reason=np.array([tick.record.restart_reason or "" for tick in self.ticks]),
        )

    def _write_csv(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("tick", "step", "seconds", *self.action_names))
            for tick in self.ticks:
                for index, action in enumerate(tick.actions):
                    time = tick.seconds + index / self.rate_hz
                    rows.writerow((tick.record.tick, index, f"{time:.3f}", *(f"{value:.6f}" for value in action)))

    def _write_predicted(self, path: Path) -> None:
        imagined = f"imagined by the model{self._beware}"
        frames = (
            captioned(enlarged(frame), f"tick {tick.record.tick}: {imagined}") for tick, frame in self._imagined()
        )
        write_video(path, frames, VIDEO_HZ)

    def _write_comparison(self, path: Path) -> None:
        write_video(path, self._pairs(), VIDEO_HZ)

    @property
    def _beware(self) -> str:
        return f" ({self.note}: noise)" if self.note else ""

    def _imagined(self) -> Iterator[tuple[EpisodeTick, np.ndarray]]:
        return ((tick, frame) for tick in self.ticks for frame in tick.predicted)

    def _pairs(self) -> Iterator[np.ndarray]:
        for tick in self.ticks:
            words = (f"tick {tick.record.tick}: seen by the cameras", f"imagined before{self._beware}")
            for seen, predicted in zip(() if tick.seen is None else tick.seen, tick.predicted, strict=False):
                yield captioned(beside(seen, predicted), *words)


def tile_cameras(observation: Mapping[str, Any]) -> np.ndarray:
    """The three cameras of an observation as the model sees them, but for the cropping: the wrist's above, twice as
    wide, the exterior ones below; uint8 [T, 2 h, 2 w, 3]."""
    left, right = (np.asarray(observation[f"observation/exterior_image_{index}_left"]) for index in (0, 1))
    return tile_views([left, right, np.asarray(observation["observation/wrist_image_left"])], "wrist_over_exteriors")
