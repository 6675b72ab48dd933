"""The choice of solver steps that run the network; the others reuse the last velocities. Masks as in the reference."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

FIXED_STEPS: dict[int, frozenset[int]] = {
    5: frozenset({0, 1, 2, 7, 12}),
    6: frozenset({0, 1, 5, 10, 14, 15}),
    7: frozenset({0, 1, 2, 6, 10, 14, 15}),
    8: frozenset({0, 1, 2, 6, 10, 13, 14, 15}),
}
Steps = int | Literal["all", "dynamic"]


class StepChooser:
    """Decides step by step within one tick. "dynamic" watches how much the guided video velocity still turns."""

    def __init__(self, steps: Steps) -> None:
        check_steps(steps)
        self._steps = steps
        self._last_two: list[torch.Tensor] = []
        self._num_to_skip = 0
        self._must_run = False

    def question(self) -> torch.Tensor | None:
        """The similarity [] of the last two velocities, where the next `runs` depends on it. It is on the device: who
        reads it waits."""
        if self._steps != "dynamic" or self._num_to_skip or self._must_run or len(self._last_two) < 2:
            return None
        older, newer = self._last_two
        return F.cosine_similarity(older, newer, dim=0)

    def runs(self, index: int, similarity: float | None = None) -> bool:
        """Whether the network runs at step `index`; asked once per step, in order. `similarity`: the answer to
        `question`."""
        if self._steps == "all":
            return True
        if self._steps != "dynamic":
            return index in FIXED_STEPS[self._steps]
        if self._num_to_skip:
            self._num_to_skip -= 1
            self._must_run = self._num_to_skip == 0
            return False
        if similarity is None:
            self._must_run = False
            return True
        burst = 4 if similarity > 0.95 else 2 if similarity > 0.93 else 0
        self._num_to_skip = max(burst - 1, 0)
        return burst == 0

    def record(self, video_velocity: torch.Tensor) -> None:
        """The guided video velocity of a step that ran."""
        if self._steps == "dynamic":
            self._last_two = [*self._last_two[-1:], video_velocity.flatten().float()]


def check_steps(steps: Steps) -> None:
    """Raises ValueError unless `steps` is 5 to 8, "all" or "dynamic"."""
    if steps not in ("all", "dynamic") and steps not in FIXED_STEPS:
        raise ValueError(f"steps: expected one of {sorted(FIXED_STEPS)}, 'all' or 'dynamic', got {steps!r}")
