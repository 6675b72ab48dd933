"""Measuring a running engine: an executor that times batches, an observer that keeps tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from worldkv.bench.timing import Stopwatch
from worldkv.engine.engine import Engine, SessionHandle
from worldkv.engine.executor import LocalExecutor
from worldkv.kv.state import KVState
from worldkv.models.base import Encode, Forward, Request
from worldkv.models.dreamzero.model import DreamZero, State
from worldkv.models.world_action import TickInputs, TickResult


class TimedExecutor(LocalExecutor):
    """Stopwatches of all batches: "forward", or the encoder's name."""

    watches: dict[str, list[Stopwatch]] | None = None  # None: nobody measures

    def run(self, requests: Sequence[Forward | Encode]) -> list[object]:
        if self.watches is None:
            return super().run(requests)
        first = requests[0]
        watch = Stopwatch(self.device)
        watch.mark()
        results = super().run(requests)
        watch.mark()
        self.watches["forward" if isinstance(first, Forward) else first.encoder].append(watch)
        return results

    @contextmanager
    def watched(self) -> Iterator[dict[str, list[Stopwatch]]]:
        """Stopwatches of all forwards ("forward") and encoders (by name) while the `with` lasts."""
        watches: dict[str, list[Stopwatch]] = defaultdict(list)
        self.watches = watches
        try:
            yield watches
        finally:
            self.watches = None


class Seen:
    """An observer: the velocities of a tick's drafts by step, and the cache's last layer after its clean pass."""

    tensors: dict[str, torch.Tensor] | None = None  # None: nobody looks
    _step = 0

    def __call__(self, kv: KVState, request: Request, result: object) -> None:
        if self.tensors is None or not isinstance(request, Forward) or isinstance(result, Exception):
            return
        if request.stage == "commit":
            self._step, layer = 0, kv.cache.spec.num_layers - 1
            for branch in kv.branches:
                self.tensors[f"cache.{branch}"] = torch.stack(kv.layer_kv(branch, layer)).float()
            return
        outputs: Any = result
        for row, output in zip(request.rows, outputs, strict=True):
            self.tensors[f"step{self._step}.video.{row.context.branch.name}"] = output.video_velocity.float().clone()
        self.tensors[f"step{self._step}.action"] = outputs[0].action_velocity.float().clone()
        self._step += 1


@dataclass(frozen=True)
class Bench:
    """An engine over random weights, and what watches it."""

    engine: Engine[TickInputs, State, TickResult]
    model: DreamZero
    executor: TimedExecutor
    seen: Seen

    def tick(self, session: SessionHandle, inputs: TickInputs) -> TickResult:
        return self.engine.submit(session, inputs).result().result
