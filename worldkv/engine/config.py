"""The options of an engine."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldkv.models.base import BatchLimits

if TYPE_CHECKING:
    from worldkv.kv.spec import KVSpec


@dataclass(frozen=True)
class EngineConfig:
    """`max_sessions` None: as many as fit, see `engine.room`. `num_blocks` None: what those sessions can ever hold.

    `max_rows` and `max_tokens` bound one forward (a tick's own rows always fit; each counts as the model's largest),
    `max_encodes` what an encoder takes in one batch: a GPU gains nothing by more at once, and what is due first would
    wait for it. `batch_invariant` runs each row's products at its own fixed shape, so a session's output is bit-equal
    whoever shares its batches. `park_when_full` moves the longest idle sessions to host memory where another needs
    their room; `park_after_s` those idle for longer. Parked sessions take at most `max_parked_bytes` of host memory;
    None is half of what the machine has. A batch, a message or a copy that takes longer than `stuck_after_s` makes the
    engine unready.
    """

    block_size: int = 128
    max_sessions: int | None = None
    num_blocks: int | None = None
    attention: str = "auto"
    max_rows: int = 64
    max_tokens: int = 2048
    max_encodes: int = 8
    batch_invariant: bool = False
    park_when_full: bool = True
    park_after_s: float | None = None
    max_parked_bytes: int | None = None
    stuck_after_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_rows", "max_tokens", "max_encodes", "stuck_after_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: expected more than 0, got {value}")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size: expected a power of two, got {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"num_blocks: expected at least 1, got {self.num_blocks}")
        if self.park_after_s is not None and not 0 <= self.park_after_s < math.inf:
            raise ValueError(f"park_after_s: expected seconds >= 0, got {self.park_after_s}")
        if self.max_parked_bytes is not None and self.max_parked_bytes < 0:
            raise ValueError(f"max_parked_bytes: expected 0 (nothing is parked) or more, got {self.max_parked_bytes}")

    def limits(self, spec: KVSpec) -> BatchLimits:
        """Of a batch of a model like this."""
        rows_of_a_tick = len(spec.branches)
        max_rows = min(self.max_rows, self.max_tokens // spec.row_limits.num_queries)
        return BatchLimits(max(rows_of_a_tick, max_rows), self.max_encodes)

    @property
    def parked_bytes_limit(self) -> int:
        if self.max_parked_bytes is not None:
            return self.max_parked_bytes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
