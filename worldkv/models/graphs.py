"""Functions of tensors as CUDA graphs: the host launches all kernels of a call at once.

A graph is captured when its shape recurs; the first time runs as usual, which compiles the kernels. Knows no model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch

_ERROR_MODE = "thread_local"  # other threads decode videos and write recordings meanwhile


@cache
def _memory_pool() -> tuple[Any, torch.cuda.CUDAGraph]:
    """One for all graphs: no two of them ever run at the same time, and what they return is copied out.

    The graph beside it is never dropped: a pool whose last graph went, with its engine, takes no other one.
    """
    pool, keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(keeper, pool=pool, capture_error_mode=_ERROR_MODE):
        torch.zeros(1, device="cuda")
    return pool, keeper


def capture(function: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of what `function` does, and the tensor that it returns, which each replay fills."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_memory_pool()[0], capture_error_mode=_ERROR_MODE):
        output = function()
    return graph, output


class Recent:
    """The shapes that came last, at most `most`."""

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


class GraphedCall:
    """A function of tensors that returns one tensor, as graphs by shape; on a CPU it is simply called.

    It must not wait for the device, nor keep tensors from call to call.
    """

    def __init__(self, function: Callable[..., torch.Tensor], max_graphs: int = 8) -> None:
        self._function = function
        self._max_graphs = max_graphs
        self._recent = Recent(max_graphs)
        self._captured: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, list[torch.Tensor], torch.Tensor]]
        self._captured = OrderedDict()

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        if not tensors[0].is_cuda or not self._recent.seen(key):
            return self._function(*tensors)
        if key not in self._captured:
            own = [tensor.clone() for tensor in tensors]
            graph, output = capture(lambda: self._function(*own))
            self._captured[key] = (graph, own, output)
            while len(self._captured) > self._max_graphs:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        graph, own, output = self._captured[key]
        for mine, given in zip(own, tensors, strict=True):
            mine.copy_(given)
        graph.replay()
        return output.clone()
