"""The core's sessions, their ticks in flight and their snapshots; and the handles and values that callers get.

To the core a model's inputs, states and results are objects; `Engine` gives them their types. No tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic

from worldkv.kv.state import KVSnapshot, KVState
from worldkv.kv.transfer import ParkedKV
from worldkv.models.base import Program, Request, ResultT

QUEUE = "queue"  # the stage of a tick that waits to begin, or between two stages


@dataclass(frozen=True)
class SessionHandle:
    """A caller's reference to a session. `serial` tells it from earlier ones of the same id."""

    session_id: str
    serial: int


@dataclass(frozen=True)
class SnapshotHandle:
    """A caller's reference to a snapshot. `num_chunks`: of history since its window began."""

    serial: int
    num_chunks: int
    num_blocks_charged: int


@dataclass(frozen=True)
class TickInfo:
    """The engine's own facts of a tick. `timings`: milliseconds in the queue and per stage, which add up to `total`;
    a stage's time is that of the batches this tick took part in. `num_chunks`: of history, as committed. Blocks are the
    whole pool's, after the tick."""

    timings: Mapping[str, float]
    num_chunks: int
    blocks_used: int
    blocks_free: int


@dataclass(frozen=True)
class TickReply(Generic[ResultT]):
    """The value of a tick's future: the model's result, and the engine's facts beside it."""

    result: ResultT
    info: TickInfo


@dataclass(frozen=True)
class SessionInfo:
    """A session as the core published it last; counts in chunks, blocks and bytes."""

    num_chunks: int
    num_blocks: int  # of history, those shared with others included
    parked: bool
    bytes_parked: int
    busy: bool
    inexact: str | None = None  # why its history is not, to the bit, what it was before it was brought here


@dataclass(eq=False)
class Session:
    """One episode. Only the engine's thread touches it."""

    handle: SessionHandle
    kv: KVState
    state: object  # the model's own, an immutable value
    num_blocks_charged: int = 0
    num_blocks_extra: int = 0  # to be charged beside a session's: see `Exports.enter`
    tick: Tick | None = None  # in flight: waiting to begin, or running
    ahead: Ahead | None = None  # how its next tick has begun; `state` is still that of the last one
    parked: ParkedKV | None = None  # its history on the host, and its state; then it is charged nothing
    parked_state_bytes: int = 0
    transfer: Transfer | None = None  # its K/V is being copied: nobody may touch it
    closed_for: str | None = None
    last_used: float = field(default_factory=time.monotonic)
    no_parking_before: float = 0.0  # seconds of time.monotonic; a copy failed a moment ago
    inexact: str | None = None  # see SessionInfo
    compact_bytes: tuple[object, int] = (None, 0)  # a state of it, and what that takes: see `States.compact_bytes`

    @property
    def bytes_parked(self) -> int:
        """Of host memory."""
        return 0 if self.parked is None else self.parked.num_bytes + self.parked_state_bytes

    @property
    def on_device(self) -> bool:
        """Whether a tick can begin now."""
        return self.transfer is None and self.parked is None and self.num_blocks_charged > 0

    @property
    def runs(self) -> bool:
        """Whether a tick of it has begun."""
        return self.tick is not None and self.tick.program is not None

    def idles(self, since: float) -> bool:
        """True if it may be parked: it has no running tick, and none submitted before `since` (time.perf_counter)."""
        waits = self.tick is not None and self.tick.program is None and self.tick.submitted > since
        return self.on_device and (self.tick is None or waits)

    def take_back(self) -> None:
        """Undo what was done ahead of a tick, for whoever wants the session as its last tick left it. Safe twice."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            self.kv.restore(ahead.rollback)
            ahead.rollback.release()

    def forget(self) -> None:
        """Give all of its K/V back, on the device and on the host."""
        self.take_back()
        self.parked = None
        self.kv.reset()

    def when_settled(self, change: Callable[[], None]) -> None:
        """Call `change` now, or as soon as the copy of its K/V has ended."""
        if self.transfer is None:
            change()
        else:
            self.transfer.afterwards.append(change)

    def info(self) -> SessionInfo:
        parked = self.parked
        kv = self.kv if parked is None else parked
        num_chunks = max((branch.num_chunks for branch in kv.branches.values()), default=0)
        num_bytes = self.bytes_parked
        busy, is_parked = self.tick is not None, parked is not None
        return SessionInfo(num_chunks, self.kv.num_blocks, is_parked, num_bytes, busy, self.inexact)


@dataclass(frozen=True)
class Ahead:
    """The beginning of a tick that nobody has asked for yet. `state`: what its program is to go on with. `rollback`:
    the session's K/V before it, which it goes back to should that tick fail or be another one."""

    state: object
    rollback: KVSnapshot


@dataclass(eq=False)
class Transfer:
    """A copy of a session's K/V between device and host, under way. `finish` is called on the engine's thread."""

    finish: Callable[[Exception | None], None]
    started: float = field(default_factory=time.monotonic)
    num_blocks_coming: int = 0  # free once the copy has ended
    num_bytes: int = 0  # of host memory it takes
    afterwards: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Snapshot:
    """A session frozen at a commit: history, conditioning, and all else its next tick depends on."""

    handle: SnapshotHandle
    kv: KVSnapshot
    state: object  # the model's own, an immutable value
    num_blocks_extra: int = 0  # of the session


@dataclass(eq=False)
class Tick:
    """A program in flight: its next request, the time it has spent, and the way back should it fail.

    `session` None: a request on its own, of lowest urgency.
    """

    session: Session | None
    future: Future[object]
    inputs: object = None
    deadline: float | None = None  # seconds of time.perf_counter
    submitted: float = field(default_factory=time.perf_counter)
    waits_its_turn: bool = False  # an operator's: it waits for others, and its robot's next one waits for it
    is_ahead: bool = False  # only the beginning of one
    program: Program[object, object] | None = None  # None: it has not begun
    request: Request | None = None  # what it waits for
    on_host: bool = False  # that request is being served by a host thread
    sequence: int = 0  # of the request, over all ticks
    rollback: KVSnapshot | None = None
    ended: bool = False
    _seconds: dict[str, float] = field(default_factory=dict)
    _lap_began: float = 0.0

    def __post_init__(self) -> None:
        self._lap_began = self.submitted

    def hurry(self, deadline: float | None) -> None:
        """Somebody waits for it who is due then."""
        if deadline is not None:
            self.deadline = deadline if self.deadline is None else min(deadline, self.deadline)

    def lap(self, stage: str) -> None:
        """The time since the last lap was spent in `stage`."""
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._lap_began
        self._lap_began = now

    def milliseconds(self) -> dict[str, float]:
        """By stage, and `total`, which is their sum: every moment is some stage's."""
        timings = {stage: 1e3 * seconds for stage, seconds in self._seconds.items()}
        return timings | {"total": sum(timings.values())}
