"""What the displays show of one tick, wherever it ran: in this process or behind a socket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STAGES = ("preprocess", "queue", "encode", "commit", "denoise")
"""The stages of a tick in the order in which they happen; `timings` has these and `total`."""


@dataclass(frozen=True)
class TickRecord:
    """One tick. `timings`: milliseconds by stage; counts are after the tick, blocks the whole pool's."""

    tick: int
    session: str
    timings: Mapping[str, float]
    frames_cached: int
    blocks_used: int
    blocks_free: int
    restart_reason: str | None = None

    @property
    def total_ms(self) -> float:
        """The `total` of the timings; the sum of the stages where nobody measured it."""
        return self.timings.get("total", sum(self.timings.get(stage, 0.0) for stage in STAGES))
