"""A WanDiT's blocks as CUDA graphs: the host launches all kernels of a forward at once.

Graphs are captured ahead, while `preparing`: one for each number of rows, and of tokens per row. A forward takes the
smallest that holds its tokens; those that are left over write to no page and are read by nobody. A filling window, its
wrap, its steady state and any mix of stages differ in tables and lengths only, which are copied into the graph's own
tensors. What fits no graph is launched kernel by kernel. Knows no rows and no sessions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from worldkv.models.graphs import capture
from worldkv.models.wan.dit import BlockInputs, ForwardPlans, RunBlocks, WanDiT
from worldkv.models.wan.fused import FusedBlocks, Precision


def accelerate(dit: WanDiT, precision: Precision = "model") -> None:
    """On a GPU, run the blocks fused and in CUDA graphs; float8 is an option. On a CPU nothing changes, nor for a
    shard: the fused kernels norm the heads that they see, and know of no others."""
    if dit.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # the encoders' convolutions have few shapes: the best kernel for each
    if dit.device.type == "cuda" and dit.shard.size == 1:
        dit.run_blocks = GraphedBlocks(FusedBlocks(dit, precision))
    elif precision != "model":
        where = "without a GPU" if dit.shard.size == 1 else "on tensor-parallel ranks"
        raise ValueError(f"precision: expected 'model' {where}, got {precision!r}")


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: BlockInputs

    def holds(self, inputs: BlockInputs) -> bool:
        own = self.inputs
        return len(own.x) >= len(inputs.x) and len(own.modulation_U6) >= len(inputs.modulation_U6)


class GraphedBlocks:
    """Runs `blocks`, which write their output into their input `x`, through the graphs that were made ahead."""

    def __init__(self, blocks: RunBlocks) -> None:
        self._blocks = blocks
        self._captured: dict[Hashable, list[_Captured]] = {}  # by the plans' shapes, fewest tokens first
        self._num_levels: int | None = None  # of the graphs that are being made
        self.num_captured = 0  # so far

    @contextmanager
    def preparing(self, num_levels: int) -> Iterator[None]:
        """Within, each forward makes the graph for its tokens and plans, and for up to `num_levels` timesteps."""
        self._num_levels = num_levels
        try:
            yield
        finally:
            self._num_levels = None

    def __call__(self, inputs: BlockInputs) -> torch.Tensor:
        """The output stands in the graph's own tensor until its next replay."""
        key = _key(inputs)
        if key is None:
            return self._blocks(inputs)
        if self._num_levels is not None:
            return self._prepare(key, inputs, self._num_levels)
        captured = next((each for each in self._captured.get(key, ()) if each.holds(inputs)), None)
        return self._blocks(inputs) if captured is None else _replay(captured, inputs)

    def _prepare(self, key: Hashable, inputs: BlockInputs, num_levels: int) -> torch.Tensor:
        cos, sin = inputs.phases
        levels = inputs.modulation_U6
        own = BlockInputs(
            inputs.x.clone(),
            torch.cat([levels, levels[:1].expand(num_levels - len(levels), *levels.shape[1:])]),
            inputs.level_T.clone(),
            (cos.clone(), sin.clone()),
            ForwardPlans(**{name: plan.with_own_tensors() for name, plan in _plans(inputs.plans).items()}),
        )
        self._blocks(own)  # compiles, which no capture may do
        graph, _ = capture(lambda: self._blocks(own))
        prepared = self._captured.setdefault(key, [])
        prepared[:] = [each for each in prepared if len(each.inputs.x) != len(own.x)]
        prepared.append(_Captured(graph, own))
        prepared.sort(key=lambda each: len(each.inputs.x))
        self.num_captured += 1
        return own.x


def _key(inputs: BlockInputs) -> Hashable | None:
    """The pages and the shapes of the plans; None where no graph can be made."""
    plans = _plans(inputs.plans).values()
    if not inputs.x.is_cuda or not all(hasattr(plan, "shape_class") for plan in plans):
        return None
    return tuple((type(plan), plan.storage, plan.shape_class) for plan in plans)


def _replay(captured: _Captured, inputs: BlockInputs) -> torch.Tensor:
    num_tokens = len(inputs.x)
    for own, given in zip(_tensors(captured.inputs), _tensors(inputs), strict=True):
        own[: len(given)].copy_(given)
    if num_tokens < len(captured.inputs.x):  # the rest is nobody's: it stays finite, and writes nowhere
        captured.inputs.x[num_tokens:].zero_()
        plans = captured.inputs.plans
        for slots in (plans.history.write_slots, None if plans.kept is None else plans.kept.slots):
            if slots is not None:
                slots[num_tokens:].fill_(-1)
    captured.graph.replay()
    return captured.inputs.x[:num_tokens]


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
