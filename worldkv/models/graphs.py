"""Functions of tensors as CUDA graphs: the host launches all kernels of a call at once.

Graphs are captured ahead, for a few sizes; a call takes the next larger one and fills it in part. What was never
prepared runs as usual: nothing is captured while ticks wait. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    output: torch.Tensor

    @property
    def size(self) -> int:
        return len(self.inputs[0])


class GraphedCall:
    """A function of batches that returns one, as graphs by size; on a CPU, and before `prepare`, it is simply called.

    The function must not wait for the device, keep tensors from call to call, nor mix a batch's items.
    """

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function
        self._captured: dict[Hashable, list[_Captured]] = {}  # by the shapes of an item, smallest first
        self.num_captured = 0  # so far

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        prepared = self._captured.get(_item(tensors))
        if prepared is None:
            return self._function(*tensors)
        parts = zip(*(torch.split(tensor, prepared[-1].size) for tensor in tensors), strict=True)
        outputs = [_replay(next(each for each in prepared if each.size >= len(part[0])), part) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def prepare(self, size: int, *tensors: torch.Tensor) -> None:
        """Make a graph for batches of up to `size` items like this one, whose batch axis is 1; nothing on a CPU."""
        if not tensors[0].is_cuda:
            return
        own = [tensor.expand(size, *tensor.shape[1:]).clone() for tensor in tensors]
        self._function(*own)  # compiles and tunes, which no capture may do
        torch.cuda.empty_cache()  # its memory is not the graphs' own, and is not needed again
        prepared = self._captured.setdefault(_item(tensors), [])
        prepared[:] = [each for each in prepared if each.size != size]
        graph, output = capture(lambda: self._function(*own))
        prepared.append(_Captured(graph, own, output))
        prepared.sort(key=lambda each: each.size)
        self.num_captured += 1


def _item(tensors: tuple[torch.Tensor, ...]) -> Hashable:
    return tuple((tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors)


def _replay(captured: _Captured, part: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The part's own outputs; what fills up the batch was left there by others."""
    for mine, given in zip(captured.inputs, part, strict=True):
        mine[: len(given)].copy_(given)
    captured.graph.replay()
    return captured.output[: len(part[0])].clone()
