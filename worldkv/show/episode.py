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
from worldkv.show.pictures import VIDEO_HZ, beside, enlarged
from worldkv.show.plots import DROID_ACTIONS, plot_actions, plot_cache, plot_latency
from worldkv.show.records import TickRecord
from worldkv.show.terminal import Step
from worldkv.show.video import write_video


@dataclass(frozen=True)
class EpisodeTick:
    """One tick. `actions`: [horizon, numbers], from `seconds` on. `predicted`: uint8 [N, H, W, 3], what the model
    imagines to see meanwhile; `seen`: uint8 [N, h, w, 3], what was seen, None where nobody looked."""

    record: TickRecord
    actions: np.ndarray
    seconds: float
    predicted: np.ndarray
    seen: np.ndarray | None


@dataclass
class Episode:
    """Ticks in order. `rate_hz`: actions per second. `window_frames`: of a full window."""

    rate_hz: float
    window_frames: int
    note: str = ""  # put into the titles of the plots
    action_names: Sequence[str] = DROID_ACTIONS
    ticks: list[EpisodeTick] = field(default_factory=list)

    @property
    def records(self) -> list[TickRecord]:
        return [tick.record for tick in self.ticks]

    def save(self, folder: Path, step: Step) -> dict[str, str]:
        """Write everything; returns what each file shows. `step(done, in all)` as it goes."""
        note = f" ({self.note})" if self.note else ""
        chunks = [tick.actions for tick in self.ticks]
        works: list[tuple[str, str, Callable[[Path], None]]] = [
            ("actions.npz", "actions [tick, step, number], and when each tick began", self._write_npz),
            ("actions.csv", "the same as a table", self._write_csv),
            ("actions.png", "each number over time", lambda path: plot_actions(
                path, chunks, rate_hz=self.rate_hz, title=f"Actions{note}", names=self.action_names
            )),
            ("cache.png", "frames and blocks in the cache, and window restarts", lambda path: plot_cache(
                path, self.records, window_frames=self.window_frames
            )),
            ("latency.png", "milliseconds of each tick by stage", lambda path: plot_latency(path, self.records)),
            ("predicted.mp4", "what the model imagined to see", lambda path: write_video(
                path, (enlarged(frame) for tick in self.ticks for frame in tick.predicted), VIDEO_HZ
            )),
        ]  # fmt: skip
        if any(tick.seen is not None for tick in self.ticks):
            works.append(
                ("seen_and_predicted.mp4", "left what was seen, right what had been imagined", self._write_comparison)
            )
        for done, (name, _, write) in enumerate(works, start=1):
            write(folder / name)
            step(done, len(works))
        return {name: what for name, what, _ in works}

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

    def _write_comparison(self, path: Path) -> None:
        write_video(path, self._pairs(), VIDEO_HZ)

    def _pairs(self) -> Iterator[np.ndarray]:
        for tick in self.ticks:
            for seen, predicted in zip(() if tick.seen is None else tick.seen, tick.predicted, strict=False):
                yield beside(seen, predicted)


def tile_cameras(observation: Mapping[str, Any]) -> np.ndarray:
    """The three cameras of an observation as the model sees them, but for the cropping: the wrist's above, twice as
    wide, the exterior ones below; uint8 [T, 2 h, 2 w, 3]."""
    left, right = (np.asarray(observation[f"observation/exterior_image_{index}_left"]) for index in (0, 1))
    return tile_views([left, right, np.asarray(observation["observation/wrist_image_left"])], "wrist_over_exteriors")
