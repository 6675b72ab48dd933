"""The attention interface, and the registry of its backends.

`plan` once per forward: block tables, lengths and slots go to the device. `run` once per layer: write the rows'
current K/V, attend to slots [0, n) of each row. Rows may differ in queries and in keys. Attention is bidirectional:
history carries its order in its rotary phase, so no mask exists.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from worldkv.kv.forward import AttentionRow
from worldkv.kv.storage import KVStorage

logger = logging.getLogger(__name__)


class AttentionPlan(Protocol):
    """One batch of rows, ready to run in every layer.

    `write_slots`: int64 [T], where in `storage` the current tokens' K and V go, for whoever writes them there itself;
    None where the rows only read.
    """

    storage: KVStorage
    write_slots: torch.Tensor | None

    def run(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor | None = None,
        v_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; [T, heads, head_dim], T the sum of all rows' queries, rows one after the other.

        With k and v, the current tokens' K/V are written first, at the rows' write slots, in the same call. Without,
        the rows only read.
        """
        ...


class AttentionBackend(Protocol):
    """A way to attend over pages. Stateless: everything of a forward is in its plan."""

    name: str

    def why_not(self, storage: KVStorage) -> str | None:
        """One line on why this backend cannot serve this storage, and what would help; None where it can."""
        ...

    def plan(self, storage: KVStorage, rows: Sequence[AttentionRow]) -> AttentionPlan: ...


# name -> (module, class); imported only when chosen
BACKENDS: dict[str, tuple[str, str]] = {
    "reference": ("worldkv.attention.reference", "ReferenceBackend"),
    "cudnn": ("worldkv.attention.cudnn", "CudnnBackend"),
}
_PREFERENCE = ("cudnn", "reference")  # of "auto"


def check_name(name: str) -> None:
    """Raises ValueError, which lists the known ones, for a backend that does not exist."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"attention backend: expected one of {['auto', *sorted(BACKENDS)]}, got {name!r}")


def choose_backend(name: str, storage: KVStorage) -> AttentionBackend:
    """The backend of that name, tried out on `storage`'s kind of cache; "auto" takes the first that works.

    Raises ValueError with the reason where a backend that was asked for by name cannot serve.
    """
    check_name(name)
    if name != "auto":
        backend = load_backend(name)
        if (reason := backend.why_not(storage)) is not None:
            raise ValueError(f"attention: {reason}; or choose `reference`, which runs everywhere")
        return backend
    for candidate in _PREFERENCE:
        backend = load_backend(candidate)
        reason = backend.why_not(storage)
        if reason is None:
            logger.info("attention: %s", candidate)
            return backend
        logger.info("attention: not %s: %s", candidate, reason)
    raise AssertionError("the reference runs everywhere")


def load_backend(name: str) -> AttentionBackend:
    """The backend of that name; ValueError lists the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend: expected one of {sorted(BACKENDS)}, got {name!r}")
    module, attribute = BACKENDS[name]
    backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    return backend
