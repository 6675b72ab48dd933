"""Times on a device: CUDA events on a GPU, the clock on a CPU. Medians, since single runs are noisy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Stopwatch:
    """One interval on the device's own time line; `seconds` waits for its end."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def seconds(self) -> float:
        first, last = self._marks[0], self._marks[-1]
        if not self._on_gpu:
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def measure(function: Callable[[], Any], device: torch.device, repeats: int = 20, warm_up: int = 3) -> float:
    """Median seconds of one call."""
    for _ in range(warm_up):
        function()
    watches = [timed(function, device) for _ in range(repeats)]
    return statistics.median(watch.seconds() for watch in watches)


def timed(function: Callable[[], Any], device: torch.device) -> Stopwatch:
    """A stopwatch of one call."""
    watch = Stopwatch(device)
    watch.mark()
    function()
    watch.mark()
    return watch


def measure_in_graph(function: Callable[[], Any], device: torch.device, calls: int = 10) -> float:
    """Median seconds of one of `calls` calls inside one CUDA graph; of plain calls where there is no GPU."""
    if device.type != "cuda":
        return measure(function, device, repeats=5, warm_up=1)
    function()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return measure(graph.replay, device) / calls


def matrix_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a large square matrix product of random numbers."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / measure(lambda: torch.mm(a, b, out=out), device) / 1e12


def copy_ceiling(device: torch.device) -> float:
    """GB/s of a copy on the device, bytes read and written."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure(lambda: target.copy_(source), device) / 1e9
