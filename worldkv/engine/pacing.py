"""How far the host may run ahead of the device. Imports torch only where there is a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Pacer:
    """Keeps one batch on the device behind the one that runs, and no more.

    The host prepares the next batch meanwhile, so the device never waits; and whoever joins waits for one forward, not
    for all that a host that runs ahead could have queued.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._on_gpu = str(device).startswith("cuda")
        self._newest: torch.cuda.Event | None = None

    def batch_queued(self) -> None:
        """Wait for the batch before the one that was just queued."""
        if not self._on_gpu:
            return
        import torch

        older, self._newest = self._newest, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._newest.record()
        if older is not None:
            older.synchronize()
