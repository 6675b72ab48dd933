"""A WanDiT's blocks as CUDA graphs: the host launches all kernels of a forward at once.

A graph is captured when its shape recurs within the last 64 shapes; the first time runs as usual, which also compiles
the kernels. A filling window, its wrap and its steady state differ in tables and lengths only, which are copied into
the graph's own tensors. Knows no rows and no sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

import torch

from worldkv.models.graphs import Recent, capture
from worldkv.models.wan.dit import BlockInputs, ForwardPlans, RunBlocks, WanDiT
from worldkv.models.wan.fused import FusedBlocks, Precision

_MAX_GRAPHS = 64


def accelerate(dit: WanDiT, precision: Precision = "model") -> None:
    """On a GPU, run the blocks fused and in CUDA graphs; float8 is an option. On a CPU nothing changes."""
    if dit.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # the encoders' convolutions have few shapes: the best kernel for each
        dit.run_blocks = GraphedBlocks(FusedBlocks(dit, precision))
    elif precision != "model":
        raise ValueError(f"precision: expected 'model' without a GPU, got {precision!r}")


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]  # x first, which is the output as well


class GraphedBlocks:
    """Runs `blocks` through graphs up to `max_tokens` tokens; larger forwards take the device longer than the host.

    The limit also keeps the number of shapes small: batches of many sessions are composed in many ways. `blocks` must
    write its output into its input `x`.
    """

    def __init__(self, blocks: RunBlocks, max_tokens: int = 4096) -> None:
        self._blocks = blocks
        self._max_tokens = max_tokens
        self._recent = Recent(_MAX_GRAPHS)
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()
        self.num_captured = 0  # so far

    def __call__(self, inputs: BlockInputs) -> torch.Tensor:
        """The output stands in the graph's own tensor until its next replay."""
        key = self._key(inputs)
        if key is None or not self._recent.seen(key):
            return self._blocks(inputs)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(inputs)
            while len(self._captured) > _MAX_GRAPHS:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        for own, given in zip(captured.inputs, _tensors(inputs), strict=True):
            own.copy_(given)
        captured.graph.replay()
        return captured.inputs[0]

    def _key(self, inputs: BlockInputs) -> Hashable | None:
        """The shape; None where no graph can or should be made."""
        classes = [getattr(plan, "shape_class", None) for plan in _plans(inputs.plans).values()]
        if not inputs.x.is_cuda or len(inputs.x) > self._max_tokens or None in classes:
            return None
        return (len(inputs.x), len(inputs.modulation_U6), *classes)

    def _capture(self, inputs: BlockInputs) -> _Captured:
        cos, sin = inputs.phases
        own = BlockInputs(
            inputs.x.clone(),
            inputs.modulation_U6.clone(),
            inputs.level_T.clone(),
            (cos.clone(), sin.clone()),
            ForwardPlans(**{name: plan.with_own_tensors() for name, plan in _plans(inputs.plans).items()}),
        )
        graph, _ = capture(lambda: self._blocks(own))
        self.num_captured += 1
        return _Captured(graph, _tensors(own))


def _plans(plans: ForwardPlans) -> dict[str, Any]:
    """Those that there are, by name."""
    found = {field.name: getattr(plans, field.name) for field in fields(plans)}
    return {name: plan for name, plan in found.items() if plan is not None}


def _tensors(inputs: BlockInputs) -> list[torch.Tensor]:
    """Everything that differs from one forward of a shape to the next."""
    plans = _plans(inputs.plans).values()
    return [
        inputs.x,
        inputs.modulation_U6,
        inputs.level_T,
        *inputs.phases,
        *(tensor for plan in plans for tensor in plan.tensors),
    ]
