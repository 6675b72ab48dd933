"""UniPC (order 2, B2(h), data prediction, corrector on) for flow matching, as functions over an explicit state.

Every step is a linear combination of a few tensors whose weights depend on the schedule alone. They are computed once,
in float64, so a step reads no tensor on the host and allocates nothing but its result.
Source: Zhao et al., "UniPC" (2023), with flow-matching alphas (alpha = 1 - sigma) as in Wan's sampler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Combination:
    """Weights of one update: sample, then the data predictions, newest first."""

    sample: float
    predictions: tuple[float, ...]


@dataclass(frozen=True)
class SolverState:
    """A solver's memory from step to step; tensors are replaced, never written to."""

    predictions: tuple[torch.Tensor, ...] = ()  # data predictions of the last two steps, newest first
    last_sample: torch.Tensor | None = None


class UniPCSchedule:
    """Noise levels of `num_steps` steps and the weights of every update.

    `sigmas` has num_steps + 1 values, the last being where the solver ends; `timesteps` are the integers that the
    network is given. `final_sigma` above 0 stops the schedule there (decoupled video noise).
    """

    def __init__(self, num_steps: int, shift: float, final_sigma: float = 0.0) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps: expected at least 1, got {num_steps}")
        base = [0.999 * (1 - i / num_steps) for i in range(num_steps)]
        sigmas = [shift * s / (1 + (shift - 1) * s) for s in base] + [0.0]
        if final_sigma:
            scale = (sigmas[0] - final_sigma) / sigmas[0]
            sigmas = [s * scale + final_sigma for s in sigmas]
        self.sigmas = tuple(sigmas)
        self.timesteps = tuple(int(s * 1000) for s in sigmas[:-1])
        # order 1 at the first step (no history) and at the last; order 2 between
        orders = [min(2, i + 1, num_steps - i) for i in range(num_steps)]
        self._predict = [self._predictor(i, orders[i]) for i in range(num_steps)]
        self._correct = [self._corrector(i, orders[i - 1]) if i else None for i in range(num_steps)]

    def __len__(self) -> int:
        return len(self.timesteps)

    def step(
        self, index: int, velocity: torch.Tensor, sample: torch.Tensor, state: SolverState
    ) -> tuple[torch.Tensor, SolverState]:
        """From noise level `index` to the next: (sample there, state). `velocity` is the network's, at `sample`."""
        prediction = sample - self.sigmas[index] * velocity
        correct = self._correct[index]
        if correct is not None and state.last_sample is not None:
            sample = _combine(correct, state.last_sample, (prediction, *state.predictions))
        state = replace(state, predictions=(prediction, *state.predictions[:1]), last_sample=sample)
        return _combine(self._predict[index], sample, state.predictions), state

    def _predictor(self, index: int, order: int) -> Combination:
        start, end = self.sigmas[index], self.sigmas[index + 1]
        h = _log_snr(end) - _log_snr(start)
        decay = math.expm1(-h)  # h_phi_1 and, for B2(h), B_h: both expm1 of the negative step
        alpha = 1 - end
        newest = -alpha * decay
        if order == 1:
            return Combination(end / start, (newest,))
        ratio = (_log_snr(self.sigmas[index - 1]) - _log_snr(start)) / h
        slope = -alpha * decay * 0.5 / ratio  # weight of (older - newest)
        return Combination(end / start, (newest - slope, slope))

    def _corrector(self, index: int, order: int) -> Combination:
        """Redo the step that led here, from `index - 1`, now that the prediction here is known."""
        start, end = self.sigmas[index - 1], self.sigmas[index]
        h = _log_snr(end) - _log_snr(start)
        decay = math.expm1(-h)
        alpha = 1 - end
        phi = decay / -h - 1
        first = phi / decay
        if order == 1:
            weight = -alpha * decay * 0.5  # weight of (here - previous)
            return Combination(end / start, (weight, -alpha * decay - weight))
        ratio = (_log_snr(self.sigmas[index - 2]) - _log_snr(start)) / h
        second = 2 * (phi / -h - 0.5) / decay
        # solve [[1, 1], [ratio, 1]] (older, here) = (first, second)
        older = (second - first) / (ratio - 1)
        here = first - older
        weight_here = -alpha * decay * here
        weight_older = -alpha * decay * older / ratio
        return Combination(end / start, (weight_here, -alpha * decay - weight_here - weight_older, weight_older))


def _log_snr(sigma: float) -> float:
    return math.inf if sigma == 0 else math.log1p(-sigma) - math.log(sigma)


def _combine(weights: Combination, sample: torch.Tensor, predictions: tuple[torch.Tensor, ...]) -> torch.Tensor:
    result = weights.sample * sample
    for weight, prediction in zip(weights.predictions, predictions, strict=False):
        result = result + weight * prediction
    return result
