"""One tick as displays show it, whether it ran in this process or behind a socket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worldkv.server.tracing import STAGES

__all__ = ["STAGES", "TickRecord", "record_of_answer"]


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

    @classmethod
    def of(cls, tick: int, session: str, timings: Mapping[str, float], facts: Mapping[str, Any]) -> TickRecord:
        """`facts`: of a reply, here or over the wire."""
        names = ("frames_cached", "blocks_used", "blocks_free", "restart_reason")
        return cls(tick, session, timings, *(facts[name] for name in names))

    @property
    def total_ms(self) -> float:
        """The `total` of the timings; the sum of the stages where nobody measured it."""
        return self.timings.get("total", sum(self.timings.get(stage, 0.0) for stage in STAGES))


def record_of_answer(answer: Mapping[str, Any], number: int, session_id: str) -> TickRecord:
    """Of what a server answers to a request with `details`."""
    cache, timing = answer["cache"], answer["server_timing"]
    timings = {name.removesuffix("_ms"): milliseconds for name, milliseconds in timing.items()}
    return TickRecord.of(number, session_id, {**timings, "total": timing["infer_ms"]}, cache)
