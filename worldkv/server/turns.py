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
    """For asyncio. Of the files in `last`, numbers that whoever owns the set may change at any time, it tells of one at
    a time: of the one that has waited longest, when the loop has nothing else to do, or has had for some turns. The
    others stay ready until they are told of. Files that are not in the set are told of at once."""

    def __init__(self, last: Set[int]) -> None:
        super().__init__()
        self._last = last
        self._waiting: dict[int, None] = {}  # the numbers of those that are ready, in the order of coming
        self._turns_left = _TURNS_BETWEEN

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        rest = {event[0].fd: event for event in ready if event[0].fd in self._last}
        if not rest:
            self._waiting.clear()
            return ready
        self._waiting = {fd: None for fd in self._waiting if fd in rest} | dict.fromkeys(rest)
        first = [event for event in ready if event[0].fd not in rest]
        is_busy = bool(first) or (timeout is not None and timeout <= 0)  # it has callbacks to run
        self._turns_left -= 1
        if is_busy and self._turns_left > 0:
            return first
        self._turns_left = _TURNS_BETWEEN
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        return [*first, rest[oldest]]


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
