"""What is remembered of a session for people who look: its last ticks as numbers, what happened to it, and, while
somebody looks at it, what it saw and answered last. Lives on the event loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worldkv.app import Reply

_MAX_TICKS, _MAX_EVENTS = 120, 100


@dataclass(frozen=True)
class TickRow:
    """One answered tick. `at`: seconds since 1970. `timings`: milliseconds by stage, and `total`. `facts`: the
    app's own, see `Reply`."""

    number: int
    at: float
    timings: Mapping[str, float]
    facts: Mapping[str, str | int | float | None]
    imagined: bool


@dataclass(frozen=True)
class Event:
    at: float
    text: str


@dataclass(frozen=True, eq=False)
class Latest:
    """The newest tick whole."""

    row: TickRow
    reply: Reply


@dataclass(eq=False)
class SessionHistory:
    """Of one session. `parent`: the session it was forked from, or whose snapshot it began with."""

    parent: str | None = None
    opened_at: float = field(default_factory=time.time)
    num_ticks: int = 0
    ticks: deque[TickRow] = field(default_factory=lambda: deque(maxlen=_MAX_TICKS))
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_MAX_EVENTS))
    num_viewers: int = 0
    latest: Latest | None = None  # only while there are viewers

    @property
    def mark(self) -> tuple[object, ...]:
        """Equal as long as a viewer would see the same."""
        return (self.num_ticks, self.events[-1].at if self.events else None, self.latest is None)

    def happened(self, text: str) -> None:
        self.events.append(Event(time.time(), text))

    def ticked(self, reply: Reply) -> TickRow:
        imagined = reply.seen is None
        row = TickRow(self.num_ticks, time.time(), dict(reply.timings), dict(reply.facts), imagined)
        self.num_ticks += 1
        self.ticks.append(row)
        for text in (*reply.events, *reply.warnings):
            self.happened(f"tick {row.number}: {text}")
        if self.num_viewers:
            self.latest = Latest(row, reply)
        return row

    def looked_at(self) -> None:
        self.num_viewers += 1

    def left(self) -> None:
        self.num_viewers -= 1
        if not self.num_viewers:
            self.latest = None
