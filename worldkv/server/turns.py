"""What begins in one turn of the event loop, so that robots wait for little however much others send.

A tick takes a dozen turns: its message, a thread, the engine, each step of its task. A turn serves every socket on
which something came; were all sockets alike, a tick would wait a dozen times for whatever strangers sent meanwhile.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Set

_TURNS_BETWEEN = 16  # at most, before one of those that go last has its turn in any case


class FairSelector(selectors.DefaultSelector):
    """For asyncio. Of the files in `last` it tells of one at a time: of the one that has waited longest, when the loop
    has nothing else to do, or has had for some turns; and of `doors`, where newcomers come in, beside it. The others
    stay ready until they are told of. Files that are in neither set are told of at once.

    The sets hold numbers; whoever owns them may change them at any time."""

    def __init__(self, last: Set[int], doors: Set[int]) -> None:
        super().__init__()
        self._last = last
        self._doors = doors
        self._waiting: dict[int, None] = {}  # the numbers of those that are ready, in the order of coming
        self._turns_left = _TURNS_BETWEEN

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        rest = {event[0].fd: event for event in ready if event[0].fd in self._last}
        doors = {event[0].fd: event for event in ready if event[0].fd in self._doors}
        self._waiting = {fd: None for fd in self._waiting if fd in rest} | dict.fromkeys(rest)
        if not rest and not doors:
            return ready
        first = [event for event in ready if event[0].fd not in rest and event[0].fd not in doors]
        is_busy = bool(first) or (timeout is not None and timeout <= 0)  # it has callbacks to run
        self._turns_left -= 1
        if is_busy and self._turns_left > 0:
            return first
        self._turns_left = _TURNS_BETWEEN
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return [*first, *doors.values()]
        del self._waiting[oldest]
        return [*first, *doors.values(), rest[oldest]]


class Turns:
    """Lets one begin in each turn of the event loop, however many come: others have their turn in between."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def begin(self) -> None:
        """Wait for a turn, in the order of coming."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._is_taken = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        while self._waiting and self._waiting[0].done():  # whose client has gone
            self._waiting.popleft()
        self._is_taken = bool(self._waiting)
        if self._is_taken:
            self._waiting.popleft().set_result(None)
            asyncio.get_running_loop().call_soon(self._next)
