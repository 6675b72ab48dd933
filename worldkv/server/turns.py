"""What begins in one turn of the event loop, so that robots wait for little however much others send.

A tick takes a dozen turns: its message, a thread, the engine, each step of its task. A turn serves every socket on
which something came; were all sockets alike, a tick would wait a dozen times for whatever strangers sent meanwhile.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import deque
from collections.abc import Set
from itertools import islice

_TURNS_BETWEEN = 16  # at most, before those that go last have theirs in any case
_MOST = 8  # of them in one turn
_PAUSE = 8  # turns from the beginning of one HTTP request to the next one's
_TURN_S = 0.001  # that a turn of theirs may take: how many they are follows from it


class FairSelector(selectors.DefaultSelector):
    """For asyncio. Of the files in `last` it tells of a few at a time, as many as are served within `turn_s`: of
    those that have waited longest, when the loop has nothing else to do, or has had for some turns; and of `doors`,
    where newcomers come in, beside them. The others stay ready until they are told of. Files that are in neither set
    are told of at once.

    The sets hold numbers; whoever owns them may change them at any time."""

    def __init__(self, last: Set[int], doors: Set[int], turn_s: float = _TURN_S) -> None:
        super().__init__()
        self._turn_s = turn_s
        self._last = last
        self._doors = doors
        self._waiting: dict[int, None] = {}  # the numbers of those that are ready, in the order of coming
        self._turns_left = _TURNS_BETWEEN
        self._at_once = 1
        self._turn: tuple[float, int] | None = None  # the last one of them: when, by time.perf_counter, and how many

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._learn()
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
        chosen = list(islice(self._waiting, self._at_once))
        for fd in chosen:
            del self._waiting[fd]
        if chosen and not doors:
            self._turn = time.perf_counter(), len(chosen)
        return [*first, *doors.values(), *(rest[fd] for fd in chosen)]

    def _learn(self) -> None:
        """How many fit into a turn, from how long the last one took."""
        if self._turn is None:
            return
        (began, num), self._turn = self._turn, None
        took_s = time.perf_counter() - began
        if took_s > self._turn_s:
            self._at_once = max(1, num // 2)
        elif took_s < self._turn_s / 2 and num == self._at_once:
            self._at_once = min(2 * num, _MOST)


class Turns:
    """Lets one begin in every few turns of the event loop, however many come: others have theirs in between, and of
    those that have begun a few are under way together."""

    def __init__(self, pause: int = _PAUSE) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pause = pause
        self._turns_left = 0  # 0: the next one need not wait

    async def begin(self) -> None:
        """Wait for a turn, in the order of coming."""
        loop = asyncio.get_running_loop()
        if self._turns_left:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._turns_left = self._pause
            loop.call_soon(self._next)

    def _next(self) -> None:
        self._turns_left -= 1
        if not self._turns_left:
            while self._waiting and self._waiting[0].done():  # whose client has gone
                self._waiting.popleft()
            if not self._waiting:
                return
            self._waiting.popleft().set_result(None)
            self._turns_left = self._pause
        asyncio.get_running_loop().call_soon(self._next)
