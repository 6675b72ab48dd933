"""Small data to the device and back without waiting: a plain copy of pageable memory waits for all work before it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch


def upload(data: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An array, a list of numbers or a CPU tensor, on `device`; pinned and asynchronous on a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(data)) if isinstance(data, np.ndarray) else torch.as_tensor(data)
    if dtype is not None:
        tensor = tensor.to(dtype)
    device = torch.device(device)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """On another device, once all its bytes are there. What a GPU's side stream brings stays until the main one's work
    on it has ended, however early it is dropped."""
    there = tensor.to(device)
    if there.device.type == "cuda" and there is not tensor:
        there.record_stream(torch.cuda.default_stream(there.device))
    return there


def forget_ended_engines(device: torch.device | str) -> None:
    """An engine refers to itself, so that one that was shut down holds a GPU's memory until Python collects it."""
    if torch.device(device).type == "cuda":
        gc.collect()


class HostCopy:
    """A device tensor on its way to the host; `numpy` waits for it, and for nothing that was asked for later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._tensor = tensor
            return
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._tensor.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def numpy(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        array: np.ndarray = self._tensor.numpy()
        return array

    def kept(self) -> torch.Tensor:
        """For who keeps it long: in memory that is not pinned. Waits as `numpy` does."""
        if self._event is None:
            return self._tensor
        self._event.synchronize()
        return self._tensor.clone()
