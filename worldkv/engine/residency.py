"""The sessions that hold blocks, and the claims that wait for some.

A session is charged when it opens or resumes; idle sessions are parked to make room. Claims are looked at between two
batches, in the order in which they came. Copies between device and host are made on host threads, so only the session
that is copied waits. Engine thread only. Does not know what a tick computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from worldkv.engine.admission import Admission
from worldkv.engine.config import EngineConfig
from worldkv.engine.session import Session, Transfer
from worldkv.engine.states import States
from worldkv.errors import AdmissionRefused
from worldkv.kv.cache import KVCache
from worldkv.kv.transfer import ParkedKV, begin_park, begin_resume, finish_park, finish_resume

if TYPE_CHECKING:
    from worldkv.models.saving import Saved

logger = logging.getLogger(__name__)
_PARK_AGAIN_S = 5.0  # after a copy to the host has failed


Done = Callable[[Exception | None], None]


@dataclass(eq=False)
class Claim:
    """Somebody waits for blocks, and perhaps for a session to be on the device.

    `granted` is called with the blocks charged, while no tick of `session` runs. `num_blocks` counts, each time there
    may be room, those wanted beside the session's own: ticks go on meanwhile. `is_tick`: it waits for other ticks to
    end, and newcomers leave room for it. `since`, in seconds of time.perf_counter.
    """

    what: str  # takes `num_blocks`, in words
    granted: Callable[[], None]
    refused: Callable[[Exception], None]
    session: Session | None = None  # to be brought to the device; it is not parked for this claim
    num_blocks: Callable[[], int] = lambda: 0
    bring_back: bool = True  # its parked K/V is copied back; else only its blocks are charged
    is_tick: bool = False
    may_wait: bool = True  # for room beside the session's own; else it is refused where there is none
    since: float = field(default_factory=time.perf_counter)
    afterwards: list[Callable[[], None]] = field(default_factory=list)  # called once it was granted or refused

    def refuse(self, error: Exception) -> None:
        self.refused(error)
        self.end()

    def end(self) -> None:
        for change in self.afterwards:
            change()


@dataclass(frozen=True)
class Leaving:
    """A session's copy on the host, to be exported. `saved`: its state, as its model saves it."""

    parked: ParkedKV
    saved: Saved


class Residency:
    """`sessions`: all open ones, as the core keeps them. `on_host` calls a function on a host thread, then its second
    argument on the engine's. `touch` is told whose K/V has moved."""

    def __init__(
        self,
        cache: KVCache,
        admission: Admission,
        states: States,
        sessions: Iterable[Session],
        on_host: Callable[[Callable[[], None], Done], None],
        touch: Callable[[Session], None],
        config: EngineConfig,
    ) -> None:
        self._cache = cache
        self._admission = admission
        self._states = states
        self._sessions = sessions
        self._on_host = on_host
        self._touch = touch
        self._config = config
        self._transfers: set[Transfer] = set()
        self._is_pinned_ahead = False
        self._bytes_lent = 0
        self.claims: list[Claim] = []

    @property
    def oldest_copy(self) -> float | None:
        """When the oldest copy under way began, in seconds of time.monotonic."""
        return min((transfer.started for transfer in self._transfers), default=None)

    @property
    def bytes_parked(self) -> int:
        """On the host, or on the way there; with what all sessions remember to be computed anew."""
        held = sum(s.bytes_parked + self.compact_bytes(s) for s in self._sessions)
        return held + self._bytes_lent + sum(transfer.num_bytes for transfer in self._transfers)

    def compact_bytes(self, session: Session) -> int:
        """See `States.compact_bytes`; counted once a state."""
        if session.compact_bytes[0] is not session.state:
            session.compact_bytes = session.state, self._states.compact_bytes(session.state)
        return session.compact_bytes[1]

    def lend(self, num_bytes: int) -> None:
        """Host memory, until it is given back by as many bytes less. Raises AdmissionRefused where that is full."""
        if num_bytes > 0:
            self._expect_room_on_host(num_bytes)
        self._bytes_lent += num_bytes

    def settle(self) -> None:
        """Grant or refuse the claims that can be; begin the copies that make room for the rest."""
        looked_at: list[Claim] = []
        while self.claims != looked_at:  # a granted claim may stake another
            looked_at = list(self.claims)
            self._look_at_claims()
        self._pin_ahead()

    def _look_at_claims(self) -> None:
        for claim in list(self.claims):
            if claim in self.claims and self._is_ready(claim):  # else it has ended meanwhile, or waits
                num_blocks = claim.num_blocks()
                if self._has_room_for(claim, num_blocks, claim.what, may_wait=claim.may_wait):
                    self._admission.num_charged += num_blocks
                    self.claims.remove(claim)
                    claim.granted()
                    claim.end()

    def _is_ready(self, claim: Claim) -> bool:
        """True if its session is charged, is where it has to be and rests. Otherwise it will be, or it was refused."""
        session = claim.session
        if session is None:
            return True
        if session.transfer is not None or session.runs or self._waits_behind_another(claim):
            return False
        if not session.num_blocks_charged:
            if not self._has_room_for(claim, self.cost_of(session), "another session"):
                return False
            self._admission.num_charged += self.cost_of(session)
            session.num_blocks_charged = self.cost_of(session)
        if claim.bring_back and session.parked is not None:
            self._bring_back(session)
            return False
        if not claim.is_tick:
            session.take_back()  # it is wanted as its last tick left it
        return True

    def _waits_behind_another(self, claim: Claim) -> bool:
        """What operators ask of one session is done in order. Its robot's ticks do not wait for what wants room."""
        if claim.is_tick:
            return False
        before = self.claims[: self.claims.index(claim)]
        return any(other.session is claim.session and not other.is_tick for other in before)

    def park(self, session: Session, done: Done = lambda _: None) -> None:
        """Begin to move an idle session to the host. Raises AdmissionRefused where host memory is full."""
        session.take_back()
        num_bytes = self._num_bytes(session)
        self._expect_room_on_host(num_bytes)
        job, moved = begin_park(self._cache, session.kv), [(session.state, 0)]

        def copy() -> None:
            job.copy()
            with self._cache.storage.aside(job.mark):
                state = self._states.to_host(session.state)
            moved[0] = state, self._states.num_bytes(state)  # the model's code: here it fails this session's copy only

        def finish(error: Exception | None) -> None:
            if error is None:
                session.parked = finish_park(self._cache, session.kv, job)
                session.state, session.parked_state_bytes = moved[0]
                self._is_pinned_ahead = False
                fields = {"event": "session_parked", "session": session.handle.session_id, "bytes": num_bytes}
                logger.info("session %s parked: %d bytes", fields["session"], num_bytes, extra=fields)
                self.refund(session)
            else:  # no host memory, say: nothing has changed
                job.abandon()
                session.no_parking_before = time.monotonic() + _PARK_AGAIN_S
                logger.warning("session %s is not parked: %s", session.handle.session_id, error)
            done(error)

        transfer = Transfer(finish, num_blocks_coming=session.num_blocks_charged, num_bytes=num_bytes)
        self._begin(session, transfer, copy)

    def copy_out(
        self, session: Session, save: Callable[[object], Saved], then: Callable[[Leaving | Exception], None]
    ) -> None:
        """Begin to copy a session that rests to the host; it stays where it is. Raises AdmissionRefused where host
        memory is full."""
        session.take_back()
        state, mark, leaving = session.state, self._cache.storage.mark(), []
        parked = session.parked
        num_bytes = 0 if parked is not None else self._num_bytes(session)
        self._expect_room_on_host(num_bytes)
        job = None if parked is not None else begin_park(self._cache, session.kv)

        def copy() -> None:
            if job is not None:
                job.copy()
            found = parked if job is None else job.parked
            assert found is not None
            with self._cache.storage.aside(mark):
                leaving.append(Leaving(found, save(state)))

        def finish(error: Exception | None) -> None:
            if job is not None:
                job.abandon()
            then(leaving[0] if error is None else error)

        self._begin(session, Transfer(finish, num_bytes=num_bytes), copy)

    def cost_of(self, session: Session) -> int:
        """Blocks that it is charged on the device."""
        return self._admission.blocks_per_session + session.num_blocks_extra

    def refund(self, session: Session) -> None:
        """Give back the promise of its blocks."""
        self._admission.refund(session.num_blocks_charged)
        session.num_blocks_charged = 0

    def after_claims(self, session: Session, change: Callable[[], None]) -> None:
        """Call `change` once those who have a claim on this session have had it, and no copy of it is under way. They
        wait no more for room that others have."""
        claims = [claim for claim in self.claims if claim.session is session]
        for claim in claims:
            claim.may_wait = False
        self.settle()
        claims = [claim for claim in claims if claim in self.claims]
        if claims:
            claims[-1].afterwards.append(partial(session.when_settled, change))
        else:
            session.when_settled(change)

    def drop(self, session: Session) -> None:
        """Forget the claim of this session's tick, without an answer: it has ended."""
        self.claims = [claim for claim in self.claims if claim.session is not session or not claim.is_tick]

    def refuse_all(self, session: Session, error: Exception) -> None:
        """Turn away all who have a claim on this session."""
        for claim in [claim for claim in self.claims if claim.session is session]:
            self.claims.remove(claim)
            claim.refuse(error)

    def _has_room_for(self, claim: Claim, needed: int, what: str, *, may_wait: bool = True) -> bool:
        """True if its blocks can be promised now. Otherwise others are being parked, or the claim waits for running
        ticks, or it was refused."""
        if needed == 0:
            return True
        wanted = needed + self._kept_from(claim)
        if wanted <= self._admission.num_free:
            return True
        trouble = self._make_room(claim, wanted)
        if may_wait and wanted <= self._admission.num_free + self._num_coming():
            return False
        if claim.is_tick and (self._transfers or (self._config.park_when_full and self._somebody_runs())):
            return False
        self.claims.remove(claim)
        claim.refuse(self._admission.refusal(needed, what, self._kept_from(claim), trouble))
        return False

    def _kept_from(self, claim: Claim) -> int:
        """Blocks that others get first: a tick leaves room for the ticks before it, any other claim for all ticks of
        other sessions."""
        waiting = 0
        for other in self.claims:
            if other is claim:
                if claim.is_tick:
                    break
                continue
            session = other.session if other.is_tick and other.session is not claim.session else None
            if session is not None and session.parked is not None and not session.num_blocks_charged:
                waiting += self.cost_of(session)
        return waiting

    def _make_room(self, claim: Claim, wanted: int) -> str:
        """Park the longest idle sessions until `wanted` blocks are free or coming. Returns the obstacle, or ""."""
        trouble = ""
        while self._config.park_when_full and wanted > self._admission.num_free + self._num_coming():
            now = time.monotonic()
            idle = [s for s in self._sessions if s.idles(claim.since) and s.no_parking_before < now]
            idle = [s for s in idle if s is not claim.session]
            if not idle:
                break
            try:
                self.park(min(idle, key=lambda session: session.last_used))
            except AdmissionRefused as full:
                trouble = str(full)
                break
        return trouble

    def _bring_back(self, session: Session) -> None:
        """Begin to move a parked session's K/V to the device; the claims on it are granted once it is there."""
        assert session.parked is not None
        try:
            job = begin_resume(self._cache, session.kv, session.parked)
        except Exception as error:
            self._not_back(session, error)
            return
        moved = [session.state]

        def copy() -> None:
            job.copy()
            with self._cache.storage.aside(job.mark):
                moved[0] = self._states.to_device(session.state)

        def finish(error: Exception | None) -> None:
            if error is None:
                try:
                    finish_resume(self._cache, session.kv, job)
                    session.state = moved[0]
                except Exception as failure:
                    error = failure
            if error is not None:
                job.abandon()
                self._not_back(session, error)
                return
            session.parked = None

        self._begin(session, Transfer(finish), copy)

    def _not_back(self, session: Session, error: Exception) -> None:
        """Leave it parked, and refuse the claims on it."""
        self.refund(session)
        self.refuse_all(session, error)

    def _begin(self, session: Session, transfer: Transfer, copy: Callable[[], None]) -> None:
        session.transfer = transfer
        self._transfers.add(transfer)
        self._on_host(copy, partial(self._ended, session, transfer))

    def _ended(self, session: Session, transfer: Transfer, error: Exception | None) -> None:
        self._transfers.discard(transfer)
        session.transfer = None
        transfer.finish(error)
        self._touch(session)
        for change in transfer.afterwards:
            session.when_settled(change)  # one of them may have begun another copy

    def _num_coming(self) -> int:
        return sum(transfer.num_blocks_coming for transfer in self._transfers)

    def _somebody_runs(self) -> bool:
        return any(s.tick is not None and s.num_blocks_charged for s in self._sessions)

    def _num_bytes(self, session: Session) -> int:
        """Host memory that its copy takes."""
        host_bytes, branches = self._cache.storage.host_bytes, session.kv.branches.values()
        entries = {e.key: len(e.blocks) for b in branches for e in b.conditioning.values()}
        kv = sum(host_bytes(len(b.table.blocks)) for b in branches) + sum(map(host_bytes, entries.values()))
        return kv + self._states.expected_bytes(session.state)

    def _pin_ahead(self) -> None:
        """Pin host memory for the next session to be parked, where one may be soon: no other one has room, or idle ones
        are parked in any case."""
        is_full = self._config.park_when_full and self._admission.num_free < self._admission.blocks_per_session
        if self._is_pinned_ahead or not (is_full or self._config.park_after_s is not None):
            return
        self._is_pinned_ahead = True
        storage, num_blocks = self._cache.storage, self._admission.blocks_per_session
        if self.bytes_parked + storage.host_bytes(num_blocks) > self._config.parked_bytes_limit:
            return

        def told(error: Exception | None) -> None:
            if error is not None:  # then it is pinned when it is needed
                logger.warning("no host memory could be pinned ahead for parking: %s", error)

        self._on_host(partial(storage.pin_ahead, num_blocks), told)

    def _expect_room_on_host(self, num_bytes: int) -> None:
        """Raises AdmissionRefused."""
        held, most = self.bytes_parked, self._config.parked_bytes_limit
        if held + num_bytes > most:
            raise AdmissionRefused(
                f"no room on the host for a parked session of {num_bytes / 2**20:.3g} MiB: {held / 2**20:.3g} of "
                f"{most / 2**20:.3g} MiB are taken; close a session, or start with a larger max_parked_bytes"
            )
