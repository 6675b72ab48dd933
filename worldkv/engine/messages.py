"""The messages that the core takes, and the inbox that takes them from any thread."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from worldkv.engine.session import SessionHandle, SnapshotHandle
from worldkv.models.base import Encode

if TYPE_CHECKING:
    from worldkv.engine.core import EngineCore

T = TypeVar("T")


@dataclass(frozen=True)
class Open:
    session_id: str | None


@dataclass(frozen=True)
class Submit:
    """`waits_its_turn`: an operator's, which waits for the tick in flight instead of being refused. `submitted`: in
    seconds of time.perf_counter."""

    session: SessionHandle
    inputs: object
    deadline: float | None = None
    waits_its_turn: bool = False
    submitted: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class WorkAhead:
    """Begin the session's next tick, which nobody has asked for yet."""

    session: SessionHandle
    inputs: object


@dataclass(frozen=True)
class Reset:
    session: SessionHandle


@dataclass(frozen=True)
class Close:
    session: SessionHandle
    reason: str


@dataclass(frozen=True)
class TakeSnapshot:
    session: SessionHandle


@dataclass(frozen=True)
class Restore:
    session: SessionHandle
    snapshot: SnapshotHandle


@dataclass(frozen=True)
class Fork:
    source: SessionHandle | SnapshotHandle
    session_id: str | None


@dataclass(frozen=True)
class Release:
    snapshot: SnapshotHandle


@dataclass(frozen=True)
class Park:
    session: SessionHandle


@dataclass(frozen=True)
class Resume:
    session: SessionHandle


@dataclass(frozen=True)
class Export:
    session: SessionHandle
    compact: bool = False


@dataclass(frozen=True)
class Import:
    data: bytes | bytearray = field(repr=False)
    session_id: str | None
    trusts: bool = True
    exact: bool = False


@dataclass(frozen=True)
class Compute:
    """A request that belongs to no session."""

    request: Encode


@dataclass(frozen=True)
class Inspect:
    """Call `function` with the core between two batches."""

    function: Callable[[EngineCore], object]


@dataclass(frozen=True)
class HostDone:
    """A function on a host thread has ended."""

    function: Callable[[], None]


@dataclass(frozen=True)
class Stop:
    pass


Message = (
    Open
    | Submit
    | WorkAhead
    | Reset
    | Close
    | TakeSnapshot
    | Restore
    | Fork
    | Release
    | Park
    | Resume
    | Export
    | Import
    | Compute
    | Inspect
    | HostDone
    | Stop
)


@dataclass(frozen=True)
class Letter:
    """A message, and where its answer goes."""

    message: Message
    answer: Future[object] = field(default_factory=Future)


class Inbox:
    """Messages in the order in which they came. `told` is called, on the sender's thread, once another one is there."""

    def __init__(self, told: Callable[[], None] = lambda: None) -> None:
        self._letters: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self._told = told

    @property
    def has_letters(self) -> bool:
        return not self._letters.empty()

    def put(self, message: Message) -> Future[object]:
        letter = Letter(message)
        self._letters.put(letter)
        self._told()
        return letter.answer

    def forward(self, future: Future[T], report: Callable[[Future[T]], None]) -> None:
        """Have `report` called with `future` on the engine's thread once it is done.

        `report` must not hold the future: a future keeps its callbacks, and with them all that they hold (parked K/V,
        say) until the next search for cycles.
        """
        future.add_done_callback(lambda done: self._return(partial(report, done)))

    def _return(self, function: Callable[[], None]) -> None:
        self.put(HostDone(function))

    def take(self, wait_s: float) -> list[Letter]:
        """All messages so far. Waits up to `wait_s` seconds for a first one."""
        letters = []
        try:
            letters.append(self._letters.get(timeout=wait_s) if wait_s > 0 else self._letters.get_nowait())
            while True:
                letters.append(self._letters.get_nowait())
        except queue.Empty:
            return letters
