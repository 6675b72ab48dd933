"""A WanDiT's blocks, and encoders, as CUDA graphs: what the host would launch kernel by kernel is one launch.

A graph is captured when its shape comes for the second time; the first time runs as usual, which also compiles what
has to be compiled. A shape so rare that many others come in between is not captured. A filling window, its wrap and its
steady state differ in tables and lengths only, which are copied into the graph's own tensors. Knows no rows and no
sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch

from worldkv.models.wan.dit import ForwardPlans, RunBlocks
from worldkv.models.wan.rotary import Phases

_MAX_GRAPHS = 64
_ERROR_MODE = "thread_local"  # other threads decode videos and write recordings meanwhile


@cache
def _memory_pool() -> Any:
    """One for all graphs: no two of them ever run at the same time, and what they return is copied out."""
    return torch.cuda.graph_pool_handle()


class _Recent:
    """The shapes that came last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._shapes: OrderedDict[Hashable, None] = OrderedDict()

    def seen(self, shape: Hashable) -> bool:
        """Whether it is among them; now it is."""
        known = shape in self._shapes
        self._shapes[shape] = None
        self._shapes.move_to_end(shape)
        if len(self._shapes) > self._most:
            self._shapes.popitem(last=False)
        return known


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]  # x first, which is the output as well


class GraphedBlocks:
    """Runs `blocks` through graphs up to `max_tokens` tokens; larger forwards take the device longer than the host.

    The limit also keeps the number of shapes small: batches of many sessions are composed in many ways.
    """

    def __init__(self, blocks: RunBlocks, max_tokens: int = 4096) -> None:
        self._blocks = blocks
        self._max_tokens = max_tokens
        self._recent = _Recent(_MAX_GRAPHS)
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()
        self.num_captured = 0  # so far

    def __call__(
        self,
        x: torch.Tensor,
        modulation_U6: torch.Tensor,
        level_T: torch.Tensor,
        phases: Phases,
        plans: ForwardPlans,
    ) -> torch.Tensor:
        """What comes back stands in the graph's own tensor until its next replay."""
        key = self._key(x, modulation_U6, plans)
        if key is None or not self._recent.seen(key):
            return self._blocks(x, modulation_U6, level_T, phases, plans)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(x, modulation_U6, level_T, phases, plans)
            while len(self._captured) > _MAX_GRAPHS:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        for own, given in zip(captured.inputs, _inputs(x, modulation_U6, level_T, phases, plans), strict=True):
            own.copy_(given)
        captured.graph.replay()
        return captured.inputs[0]

    def _key(self, x: torch.Tensor, modulation_U6: torch.Tensor, plans: ForwardPlans) -> Hashable | None:
        """The shape; None where no graph can or should be made."""
        classes = [getattr(plan, "shape_class", None) for plan in _plans(plans)]
        if not x.is_cuda or len(x) > self._max_tokens or None in classes:
            return None
        return (len(x), len(modulation_U6), *classes)

    def _capture(
        self,
        x: torch.Tensor,
        modulation_U6: torch.Tensor,
        level_T: torch.Tensor,
        phases: Phases,
        plans: ForwardPlans,
    ) -> _Captured:
        own_plans = ForwardPlans(*(plan.with_own_tensors() for plan in _plans(plans)))
        own = [tensor.clone() for tensor in (x, modulation_U6, level_T, *phases)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_memory_pool(), capture_error_mode=_ERROR_MODE):
            self._blocks(own[0], own[1], own[2], (own[3], own[4]), own_plans)
        self.num_captured += 1
        return _Captured(graph, _inputs(own[0], own[1], own[2], (own[3], own[4]), own_plans))


class GraphedCall:
    """A function of tensors that returns one tensor, as graphs by shape; on a CPU it is simply called.

    It must not wait for the device, nor keep tensors from call to call.
    """

    def __init__(self, function: Callable[..., torch.Tensor], max_graphs: int = 8) -> None:
        self._function = function
        self._max_graphs = max_graphs
        self._recent = _Recent(max_graphs)
        self._captured: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, list[torch.Tensor], torch.Tensor]]
        self._captured = OrderedDict()

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        if not tensors[0].is_cuda or not self._recent.seen(key):
            return self._function(*tensors)
        if key not in self._captured:
            own, graph = [tensor.clone() for tensor in tensors], torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=_memory_pool(), capture_error_mode=_ERROR_MODE):
                output = self._function(*own)
            self._captured[key] = (graph, own, output)
            while len(self._captured) > self._max_graphs:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        graph, own, output = self._captured[key]
        for mine, given in zip(own, tensors, strict=True):
            mine.copy_(given)
        graph.replay()
        return output.clone()


def _plans(plans: ForwardPlans) -> list[Any]:
    return [getattr(plans, field.name) for field in fields(plans)]


def _inputs(
    x: torch.Tensor, modulation_U6: torch.Tensor, level_T: torch.Tensor, phases: Phases, plans: ForwardPlans
) -> list[torch.Tensor]:
    """Everything that differs from one forward of a shape to the next."""
    return [x, modulation_U6, level_T, *phases, *(tensor for plan in _plans(plans) for tensor in plan.tensors)]
