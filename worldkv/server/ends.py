"""Which sessions have ended, and whose clients are still to be told: once, and whatever else has ended since.

Every key has a memory of its own, which no other key can fill. The newest ends are remembered with their reasons. Of
older ones only a filter of fixed size knows the ids: it misses none, and after a million of them it takes one new id in
two thousand for an old one, whose client is then told so and may go on.

Lives on the event loop. Does not know open sessions.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

_REMEMBERED = 4096
_SHOWN = 50
_FILTER_BITS = 1 << 24  # 2 MiB, once it is needed
_NUM_HASHES = 11  # the best for 16 bits an id: a million of them
SHUTDOWN_TEXT = "the server is shutting down"
_LONG_AGO = "so long ago that the reason is forgotten"


class EndReason(StrEnum):
    IDLE = "idle"
    GRACE_OVER = "grace_over"
    CONNECTION_CLOSED = "connection_closed"
    DELETED = "deleted"
    MADE_ROOM = "made_room"  # a session without a history; nothing is lost
    FAILED = "failed"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class EndedSession:
    """For people who look: one that is gone. `at`: seconds since 1970."""

    public_id: str
    owner: str
    text: str
    at: float
    num_ticks: int


@dataclass(frozen=True)
class End:
    """`last_used`: on the event loop's clock. `connection`: the only one that can ask for it, where it was private."""

    text: str
    last_used: float
    connection: object | None = None


class IdFilter:
    """A set of ids of fixed size (a Bloom filter): it may take an id for one of its own, and never misses one."""

    def __init__(self, num_bits: int = _FILTER_BITS) -> None:
        self._num_bits = num_bits
        self._bits = bytearray(num_bits // 8)
        self._salt = os.urandom(16)  # nobody can choose ids that look like others

    def add(self, session_id: str) -> None:
        for place in self._places(session_id):
            self._bits[place // 8] |= 1 << place % 8

    def __contains__(self, session_id: str) -> bool:
        return all(self._bits[place // 8] >> place % 8 & 1 for place in self._places(session_id))

    def _places(self, session_id: str) -> Iterator[int]:
        digest = hashlib.blake2b(session_id.encode(), digest_size=16, salt=self._salt).digest()
        first, step = int.from_bytes(digest[:8]), int.from_bytes(digest[8:]) | 1
        return ((first + i * step) % self._num_bits for i in range(_NUM_HASHES))


@dataclass(eq=False)
class _Memory:
    """One key's."""

    limit: int
    ends: OrderedDict[str, End] = field(default_factory=OrderedDict)
    recent: deque[EndedSession] = field(default_factory=lambda: deque(maxlen=_SHOWN))
    forgotten: IdFilter | None = None
    forgotten_last_used: float = 0.0  # of whichever was used last
    told: OrderedDict[str, None] = field(default_factory=OrderedDict)  # forgotten ones with nothing left to be told

    def add(self, session_id: str, end: End) -> None:
        self.told.pop(session_id, None)
        self.ends[session_id] = end
        self.ends.move_to_end(session_id)
        while len(self.ends) > self.limit:
            oldest, its_end = self.ends.popitem(last=False)
            self.forgotten = self.forgotten or IdFilter()
            self.forgotten.add(oldest)
            self.forgotten_last_used = max(self.forgotten_last_used, its_end.last_used)

    def find(self, session_id: str) -> End | None:
        end = self.ends.get(session_id)
        if end is None and session_id not in self.told and self._has_forgotten(session_id):
            return End(_LONG_AGO, self.forgotten_last_used)
        return end

    def settle(self, session_id: str) -> None:
        """There is nothing left to be told."""
        self.ends.pop(session_id, None)
        if self._has_forgotten(session_id):
            self.told[session_id] = None
            self.told.move_to_end(session_id)
            while len(self.told) > self.limit:
                self.told.popitem(last=False)

    def _has_forgotten(self, session_id: str) -> bool:
        return self.forgotten is not None and session_id in self.forgotten


class Ends:
    """All keys'. `limit`: of the ends that one key has remembered with their reasons."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._memories: dict[str, _Memory] = {}  # as many as there are keys

    def add(self, owner: str, session_id: str, end: End) -> None:
        """Its client is to be told."""
        self._of(owner).add(session_id, end)

    def find(self, owner: str, session_id: str) -> End | None:
        """What its client is still to be told."""
        return self._of(owner).find(session_id)

    def settle(self, owner: str, session_id: str) -> None:
        """Its client knows, or has lost nothing."""
        self._of(owner).settle(session_id)

    def names(self, owner: str) -> list[str]:
        """Those that are remembered."""
        return list(self._of(owner).ends)

    def forget_connection(self, owner: str, connection: object) -> None:
        """Nobody can ask any more for what was private to it."""
        ends = self._of(owner).ends
        for session_id in [name for name, end in ends.items() if end.connection is connection]:
            del ends[session_id]

    def show(self, ended: EndedSession) -> None:
        self._of(ended.owner).recent.append(ended)

    def recent(self, owner: str) -> list[EndedSession]:
        """One key's newest ones, for people."""
        return list(self._of(owner).recent)

    def _of(self, owner: str) -> _Memory:
        if owner not in self._memories:
            self._memories[owner] = _Memory(self._limit)
        return self._memories[owner]
