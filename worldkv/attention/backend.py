"""The attention interface, and the registry of its backends.

`plan` once per forward: block tables, lengths and slots go to the device. `run` once per layer: write the rows'
current K/V, attend to slots [0, n) of each row. Rows may differ in queries and in keys. Attention is bidirectional:
history carries its order in its rotary phase, so no mask exists.
"""

from __future__ import annotations

import importlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from worldkv.attention.names import BACKENDS, check_name
from worldkv.device import upload
from worldkv.kv.row import AttentionRow, RowLimits
from worldkv.kv.storage import KVStorage

logger = logging.getLogger(__name__)


class AttentionPlan(ABC):
    """One batch of rows, ready to run in every layer.

    `write_slots`: int64 [T], where in `storage` the current tokens' K and V go, for whoever writes them there itself;
    None where the rows only read.
    """

    def __init__(self, storage: KVStorage, rows: Sequence[AttentionRow]) -> None:
        writes = [row.write_slots for row in rows if row.write_slots is not None]
        assert len(writes) in (0, len(rows)), "rows that write and rows that only read do not share a plan"
        self.storage = storage
        self.write_slots = upload(np.concatenate(writes), storage.device) if writes else None

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
        if k_THD is not None and v_THD is not None:
            assert self.write_slots is not None, "this plan only reads"
            self.storage.write(layer, self.write_slots, k_THD, v_THD)
        return self.attend(layer, q_THD)

    @abstractmethod
    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """`run` without its write."""


class AttentionBackend(Protocol):
    """A way to attend over pages. Stateless: everything of a forward is in its plan."""

    name: str

    def why_not(self, storage: KVStorage) -> str | None:
        """One line on why this backend cannot serve this storage, and what would help; None where it can."""
        ...

    def plan(self, storage: KVStorage, rows: Sequence[AttentionRow], limits: RowLimits | None = None) -> AttentionPlan:
        """`limits`: of all rows that ever come; then the plans of as many rows are alike, whatever these rows are."""
        ...


_FAST = ("flash4", "cudnn")
# "auto" takes flash4 where rows have up to so many queries and keys or more, or for so few short rows; cuDNN otherwise.
# On an H200 each is the faster one there (docs/benchmarks.md).
_MANY_QUERIES, _MANY_KEYS, _FEW_ROWS = 512, 1024, 4
_TOLERANCE = 2e-2  # relative error of half precision against the reference


def choose_backend(name: str, storage: KVStorage) -> AttentionBackend:
    """The backend of that name, checked against the reference on rows of `storage`'s kind.

    "auto" takes what works of flash4 (for long rows) and cudnn, and the reference where neither does. Raises ValueError
    with the reason where a backend that was asked for by name cannot serve.
    """
    check_name(name)
    if name != "auto":
        backend = load_backend(name)
        if (reason := _trouble(backend, storage)) is not None:
            raise ValueError(f"attention: {reason}; or choose `reference`, which runs everywhere")
        return backend
    usable = []
    for candidate in map(load_backend, _FAST):
        reason = _trouble(candidate, storage)
        if reason is None:
            usable.append(candidate)
        else:
            logger.info("attention: not %s: %s", candidate.name, reason)
    chosen = ByShape(*usable) if len(usable) > 1 else usable[0] if usable else load_backend("reference")
    logger.info("attention: %s", chosen.name)
    return chosen


class ByShape:
    """`first` for rows of many queries and keys, and for few rows of few; `second` for all else. See `_FEW_ROWS`."""

    def __init__(self, first: AttentionBackend, second: AttentionBackend) -> None:
        self._first, self._second = first, second
        self.name = f"{first.name}+{second.name}"

    def why_not(self, storage: KVStorage) -> str | None:
        return self._first.why_not(storage) or self._second.why_not(storage)

    def plan(self, storage: KVStorage, rows: Sequence[AttentionRow], limits: RowLimits | None = None) -> AttentionPlan:
        limits = limits or RowLimits(max(r.num_queries for r in rows), max(r.num_visible for r in rows))
        long = limits.num_queries >= _MANY_QUERIES and limits.num_visible >= _MANY_KEYS
        few = limits.num_queries < _MANY_QUERIES and len(rows) <= _FEW_ROWS
        return (self._first if long or few else self._second).plan(storage, rows, limits)


def _trouble(backend: AttentionBackend, storage: KVStorage) -> str | None:
    """Why this backend should not serve: a condition that is not met, or a wrong result; None where it should."""
    reason = backend.why_not(storage)
    if reason is not None or backend.name == "reference":
        return reason
    try:
        error = self_check(backend, storage)
    except Exception as failure:
        logger.warning("attention: %s failed its self-check", backend.name, exc_info=True)
        return f"{backend.name} failed its self-check: {failure}"
    if not error < _TOLERANCE:
        logger.warning("attention: %s is wrong here: relative error %.1e", backend.name, error)
        return f"{backend.name} computes something else than the reference here (relative error {error:.1e})"
    return None


def self_check(backend: AttentionBackend, storage: KVStorage) -> float:
    """Relative error against the reference, of short and long rows; blocks that no row holds are full of NaN."""
    lengths = [(5, 21), (300, 700), (300, 300)]
    num_heads, head_dim = storage.k[0].shape[2:]
    counts = [-(-keys // storage.block_size) for _, keys in lengths]
    trial = storage.like(num_layers=1, num_blocks=sum(counts) + 2)
    ids = np.random.default_rng(0).permutation(sum(counts) + 2).astype(np.int32)
    tables = np.split(ids, np.cumsum(counts))
    for pool in (*trial.k, *trial.v):
        pool.normal_()
        pool[torch.from_numpy(tables[-1]).long().to(pool.device)] = torch.nan
    errors = []
    for some in ((0, 1), (1, 2)):  # ragged, and all alike
        rows = [AttentionRow(tables[i], lengths[i][1], lengths[i][0]) for i in some]
        q = torch.randn(sum(row.num_queries for row in rows), num_heads, head_dim, device=trial.device).to(trial.dtype)
        expected = load_backend("reference").plan(trial, rows).run(0, q).float()
        errors.append(float((backend.plan(trial, rows).run(0, q).float() - expected).norm() / expected.norm()))
    return max(math.inf if math.isnan(error) else error for error in errors)


def load_backend(name: str) -> AttentionBackend:
    """The backend of that name; ValueError lists the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend: expected one of {sorted(BACKENDS)}, got {name!r}")
    module, attribute = BACKENDS[name]
    backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    return backend
