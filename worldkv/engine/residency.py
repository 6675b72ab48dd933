"""Which sessions hold blocks: a session is charged when it comes or comes back, and what idles is parked to make room.

On the engine's thread, but for `has_room` and an `admit` that found it true. Does not know what a tick computes.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection, Mapping

from worldkv.engine.admission import Admission
from worldkv.engine.session import Job, Session
from worldkv.errors import AdmissionRefused
from worldkv.kv.cache import KVCache
from worldkv.kv.transfer import park, resume

logger = logging.getLogger(__name__)


class Residency:
    """`sessions`: all open ones, by id, as the engine keeps them. `condition` guards the books."""

    def __init__(
        self,
        cache: KVCache,
        admission: Admission,
        sessions: Mapping[str, Session],
        condition: threading.Condition,
        park_when_full: bool,
    ) -> None:
        self._cache = cache
        self._admission = admission
        self._sessions = sessions
        self._condition = condition
        self._park_when_full = park_when_full

    def has_room(self) -> bool:
        """For one more session, without parking any, and with the parked ones come back that have a tick waiting."""
        return self._admission.has_room(1 + self._num_waiting())

    def admit(self, session: Session, keep: Session | None = None) -> None:
        """Charge a session that comes. Nobody's waiting tick loses its room to it, and `keep` is not parked for it."""
        with self._condition:
            num_waiting = self._num_waiting()
            self.park_others((1 + num_waiting) * self._admission.blocks_per_session, {keep})
            session.num_blocks_charged = self._admission.charge_session(num_waiting)

    def charge(self, session: Session, since: float = math.inf) -> None:
        """Promise a session its blocks, unless it has that promise; what idles makes room. Raises AdmissionRefused."""
        with self._condition:
            if not session.num_blocks_charged:
                self.park_others(self._admission.blocks_per_session, {session}, since)
                session.num_blocks_charged = self._admission.charge_session()

    def bring_back(self, session: Session, since: float = math.inf) -> None:
        """To the device, if it is parked. Raises AdmissionRefused; whatever fails, the session stays parked."""
        self.charge(session, since)
        if session.parked is not None:
            resume(self._cache, session.kv, session.parked)
            session.parked = None

    def bring_back_for(self, job: Job) -> bool:
        """False: not now, but ticks are running whose sessions will make room. Raises where none will."""
        try:
            self.bring_back(job.session, job.submitted)
        except AdmissionRefused:
            somebody_runs = any(s.job is not None and s.num_blocks_charged for s in self._sessions.values())
            if not (self._park_when_full and somebody_runs):
                raise
            return False
        return True

    def park_others(self, num_blocks: int, keep: Collection[Session | None], since: float = math.inf) -> None:
        """Park what has idled longest until so many blocks can be promised.

        A session with a tick that has not begun idles too, for a tick that came before that one, at `since`.
        """
        while self._park_when_full and num_blocks > self._admission.num_free:
            idle = [s for s in self._sessions.values() if s.num_blocks_charged and s not in keep and s.idles(since)]
            if not idle:
                return
            self.park(min(idle, key=lambda session: session.last_used), since)

    def park(self, session: Session, since: float = math.inf) -> None:
        """Move a session's K/V to the host, unless a tick came meanwhile."""
        with self._condition:
            if not session.idles(since) or session.closed_for is not None:
                return
            if session.parked is None:
                session.parked = park(self._cache, session.kv)
                fields = {"event": "session_parked", "session": session.session_id, "bytes": session.parked.num_bytes}
                logger.info("session %s parked: %d bytes", fields["session"], fields["bytes"], extra=fields)
            self._admission.refund(session.num_blocks_charged)
            session.num_blocks_charged = 0

    def _num_waiting(self) -> int:
        """Parked sessions with a tick that has not begun."""
        return sum(s.job is not None and not s.num_blocks_charged for s in self._sessions.values())
