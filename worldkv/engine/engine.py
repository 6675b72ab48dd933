"""The engine: the face of the core for every other thread.

Every call is a message to the core's thread. It returns a future or, where a caller may wait, the result.
Sessions and snapshots are handles. Reading statistics stops nothing and waits for nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from worldkv.engine import messages as m
from worldkv.engine.admission import Capacity
from worldkv.engine.config import EngineConfig
from worldkv.engine.core import EngineCore, Model, Observer
from worldkv.engine.executor import Executor, LocalExecutor
from worldkv.engine.session import SessionHandle, SessionInfo, SnapshotHandle, TickInfo, TickReply
from worldkv.engine.sharing import SharedDevice
from worldkv.engine.stats import BlockMap, CacheCard, Stats, map_blocks
from worldkv.errors import EngineStopped, SessionNotFound
from worldkv.kv.cache import KVCache
from worldkv.models.base import Encode, InputsT, MakesReady, ModelCard, ResultT, StateT, WorldModel

if TYPE_CHECKING:
    from worldkv.models.session_file import SessionExport

__all__ = [
    "Engine",
    "EngineConfig",
    "Health",
    "SessionHandle",
    "SessionInfo",
    "SnapshotHandle",
    "TickInfo",
    "TickReply",
]

_CHECK_S = 0.5  # how often a caller that waits looks whether the engine is still well
T = TypeVar("T")


@dataclass(frozen=True)
class Health:
    ready: bool
    reason: str


class Engine(Generic[InputsT, StateT, ResultT]):
    """Sessions of `model` over `cache`. Its thread starts at once; `shutdown` ends it. On a GPU call `make_ready` (or
    `warm_up`) before the first session: what is not made then is never made, and ticks are slower.

    `observer` is called on the engine's thread with (the session's K/V, a request, its result) after each request of a
    tick has run: for verifying and measuring. `executor`: where requests are computed; None is this process.
    `shared`: of all engines that use one device; whoever is due first goes first.
    """

    def __init__(
        self,
        model: WorldModel[InputsT, StateT, ResultT],
        cache: KVCache,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        executor: Executor | None = None,
        shared: SharedDevice | None = None,
    ) -> None:
        self.model = model
        self.config = config or EngineConfig()
        untyped = cast("Model", model)  # to the core, inputs, states and results are objects
        executor = executor or LocalExecutor(untyped, cache, alone=self.config.batch_invariant)
        self.core = EngineCore(untyped, cache, executor, self.config, observer, shared)
        self._stopping = False
        self._thread = threading.Thread(target=self.core.run, name="worldkv-engine", daemon=True)
        self._thread.start()

    # sessions

    def open_session(self, session_id: str | None = None) -> SessionHandle:
        """A new, empty session. Waits for the batch under way, and where others have to be parked for that.

        Raises AdmissionRefused, before any work, when its worst case does not fit; BadRequest for an id that is open.
        """
        return cast("SessionHandle", self._wait(self.ask(m.Open(session_id))))

    def submit(
        self,
        session: SessionHandle,
        inputs: InputsT,
        deadline: float | None = None,
        *,
        waits_its_turn: bool = False,
    ) -> Future[TickReply[ResultT]]:
        """Start a tick; the future brings its reply, or the error after which the session is as it was before.

        `deadline`, in seconds of time.perf_counter, moves the tick ahead of those with later ones. A parked session
        comes back first, as soon as ticks that came earlier leave room. `waits_its_turn`: an operator's tick, which
        waits for the one in flight where others bring SessionBusy, and which the session's own next one waits for. The
        future brings SessionBusy, SessionNotFound, SessionEnded (reset or closed meanwhile), AdmissionRefused where no
        tick will leave room, ModelError, or what the model raised.
        """
        submit = m.Submit(session, inputs, deadline, waits_its_turn)
        return cast("Future[TickReply[ResultT]]", self.ask(submit))

    def work_ahead(self, session: SessionHandle, inputs: InputsT) -> Future[object]:
        """Begin the session's next tick before it is asked for, once the one in flight has ended; urgent once the
        session's next one waits for it. The tick that is submitted with such inputs goes on from there; any other
        one, and whoever wants the session as it is (a snapshot, a fork, parking), finds it as its last tick left it.

        Nobody needs to wait for the future. It brings SessionNotFound, SessionEnded, ModelError where the model cannot
        do that (see `WorksAhead`), or what the model raised: then nothing has changed.
        """
        return self.ask(m.WorkAhead(session, inputs))

    def reset(self, session: SessionHandle) -> Future[None]:
        """Drop the session's history; a tick in flight ends with SessionEnded. Whatever is asked for later comes after
        it, so nobody needs to wait for the future."""
        return cast("Future[None]", self.ask(m.Reset(session)))

    def close(self, session: SessionHandle, reason: str) -> Future[None]:
        """End the session and give its blocks back; safe twice. A tick in flight ends with SessionEnded. Nobody needs
        to wait for the future."""
        return cast("Future[None]", self._post(m.Close(session, reason)))

    def describe(self, session: SessionHandle) -> SessionInfo:
        """As it was after the latest turn. Raises SessionNotFound."""
        info = self.core.published.sessions.get(session)
        if info is None:
            raise SessionNotFound(f"session {session.session_id} is closed")
        return info

    # Histories. These wait until the session's tick in flight has ended, and are done in the order in which they came,
    # before its next tick begins. `begin_...`: as a future, for those who cannot wait; cancelling it gives up the wait.

    def snapshot(self, session: SessionHandle) -> SnapshotHandle:
        """Freeze the session at its last commit; no K/V is copied. `release` it when it is no longer needed.

        Raises AdmissionRefused where the blocks it may come to hold alone do not fit.
        """
        return self._wait(self.begin_snapshot(session))

    def begin_snapshot(self, session: SessionHandle) -> Future[SnapshotHandle]:
        return cast("Future[SnapshotHandle]", self.ask(m.TakeSnapshot(session)))

    def restore(self, session: SessionHandle, snapshot: SnapshotHandle) -> None:
        """Rewind the session to a snapshot, which stays valid. Raises SnapshotNotFound, AdmissionRefused; then the
        session is as it was."""
        self._wait(self.begin_restore(session, snapshot))

    def begin_restore(self, session: SessionHandle, snapshot: SnapshotHandle) -> Future[None]:
        return cast("Future[None]", self.ask(m.Restore(session, snapshot)))

    def fork(self, source: SessionHandle | SnapshotHandle, session_id: str | None = None) -> SessionHandle:
        """A new session that continues from a session's last commit, or from a snapshot; no K/V is copied.

        It is charged like any other, since it may come to need a full window of its own.
        """
        return self._wait(self.begin_fork(source, session_id))

    def begin_fork(
        self, source: SessionHandle | SnapshotHandle, session_id: str | None = None
    ) -> Future[SessionHandle]:
        return cast("Future[SessionHandle]", self.ask(m.Fork(source, session_id)))

    def release(self, snapshot: SnapshotHandle) -> Future[None]:
        """Give a snapshot's references back; safe twice. Nobody needs to wait for the future."""
        return cast("Future[None]", self._post(m.Release(snapshot)))

    def park(self, session: SessionHandle) -> None:
        """Move a session's K/V to host memory; its next tick brings it back, bit for bit. Safe twice.

        Raises AdmissionRefused where host memory for parked sessions is full.
        """
        self._wait(self.begin_park(session))

    def begin_park(self, session: SessionHandle) -> Future[None]:
        return cast("Future[None]", self.ask(m.Park(session)))

    def resume(self, session: SessionHandle) -> None:
        """Bring a parked session's K/V back before its next tick does. Safe twice.

        Raises AdmissionRefused where its blocks do not fit; then it stays parked.
        """
        self._wait(self.begin_resume(session))

    def begin_resume(self, session: SessionHandle) -> Future[None]:
        return cast("Future[None]", self.ask(m.Resume(session)))

    def export(self, session: SessionHandle, *, compact: bool = False) -> SessionExport:
        """The session in bytes, as its last tick left it, for `import_session` of this or another process: its K/V,
        conditioning and state. On the same device and settings the next tick is bit-identical. It goes on, or stays
        parked. `compact`: its state only, of which the K/V is computed anew; see `SessionExport.inexact`.

        Raises AdmissionRefused where host memory for parked sessions is full, BadRequest where the model cannot do
        that (see `SavesState`, `RebuildsHistory`).
        """
        return self._wait(self.begin_export(session, compact=compact))

    def begin_export(self, session: SessionHandle, *, compact: bool = False) -> Future[SessionExport]:
        return cast("Future[SessionExport]", self.ask(m.Export(session, compact)))

    def import_session(
        self, data: bytes | bytearray, session_id: str | None = None, *, trusts: bool = True, exact: bool = False
    ) -> SessionHandle:
        """A new session that goes on from an export; no other one is touched. The size of blocks may be another one. A
        `bytearray` must not change before it is done. `trusts`: other sessions of the same prompt may read the
        conditioning that comes with it; without, it is charged beside a session's own blocks. The history of a compact
        export is computed anew first. Where that cannot be exact to the bit, `describe(...).inexact` says why and the
        log warns; with `exact` it is refused.

        Raises BadRequest that says what is damaged, or of another model, robot or format; AdmissionRefused.
        """
        return self._wait(self.begin_import(data, session_id, trusts=trusts, exact=exact))

    def begin_import(
        self, data: bytes | bytearray, session_id: str | None = None, *, trusts: bool = True, exact: bool = False
    ) -> Future[SessionHandle]:
        return cast("Future[SessionHandle]", self.ask(m.Import(data, session_id, trusts, exact)))

    # the whole

    def compute(self, request: Encode) -> Future[object]:
        """Run an encoder or decoder for no session, when nothing more urgent waits."""
        return self.ask(m.Compute(request))

    def inspect(self, look: Callable[[EngineCore], T]) -> T:
        """Call `look` on the engine's thread between two batches: it sees everything at rest."""
        return cast("T", self._wait(self.ask(m.Inspect(look))))

    def make_ready(self, progress: Callable[[int, int], None] = lambda done, steps: None) -> None:
        """Make whatever the model makes by shape, so that no tick waits for it. Before the first session.

        `progress`: told how many steps are done, of how many.
        """
        steps = self._ready_steps()
        for done, step in enumerate(steps):
            progress(done, len(steps))
            self.inspect(partial(_call, step))
        progress(len(steps), len(steps))

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, steps: None) -> None:
        """`make_ready`, then the model's two kinds of tick, a first and a later one, in a session that is thrown away.
        Nothing is made afterwards."""
        self.make_ready(progress)
        session = self.open_session()
        try:
            for first in (True, False):
                self.submit(session, self.model.fake_inputs(first)).result()
        finally:
            self._wait(self.close(session, "warm-up done"))

    def _ready_steps(self) -> Sequence[Callable[[], object]]:
        if not isinstance(self.model, MakesReady):
            return ()
        cache, limits = self.core.cache, self.core.scheduler.limits
        of_all_sessions = len(cache.spec.branches) * max(1, self.capacity().num_more_sessions)
        max_rows = 1 if self.config.batch_invariant else min(limits.max_rows, of_all_sessions)
        return self.model.ready_steps(cache, replace(limits, max_rows=max_rows))

    @property
    def card(self) -> ModelCard:
        return self.model.card

    @property
    def cache_card(self) -> CacheCard:
        cache = self.core.cache
        storage = cache.storage
        return CacheCard(
            str(storage.device),
            str(storage.dtype).removeprefix("torch."),
            storage.block_size,
            cache.spec.branches,
            cache.backend.name,
            storage.num_bytes,
        )

    def health(self) -> Health:
        trouble = self._trouble()
        return Health(trouble is None, trouble or "ready")

    def capacity(self) -> Capacity:
        """The cost of a session, in blocks and bytes, and how many more fit."""
        return self.core.published.capacity

    def stats(self) -> Stats:
        """Counters for metrics."""
        return self.core.published.stats

    def block_map(self) -> BlockMap:
        """Who holds which block. Waits for the batch under way; takes as long as the blocks in use are many."""
        return self.inspect(map_blocks)

    def ask(self, message: m.Message) -> Future[object]:
        """Put a message into the core's inbox. Raises EngineStopped."""
        trouble = self._trouble()
        if trouble is not None:
            raise EngineStopped(trouble)
        return self._post(message)

    def shutdown(self) -> None:
        """End all ticks with EngineStopped, close all sessions and snapshots, stop the thread; safe twice."""
        self._stopping = True
        self._post(m.Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, message: m.Message) -> Future[object]:
        """As `ask`, but raises nothing: an engine that is gone has given everything back."""
        answer = self.core.inbox.put(message)
        if self.core.ended:  # then nobody else may look into the inbox again
            self.core.operations.turn_away_rest()
        return answer

    def _wait(self, answer: Future[T]) -> T:
        """Wait for the core's answer. Raises EngineStopped once the engine is stuck and cannot give one."""
        if threading.current_thread() is self._thread and not answer.done():
            raise RuntimeError(
                "called on the engine's own thread (by a future's callback, or an observer), which would wait for "
                "itself for ever: call it on another thread, or use what returns a future (submit, begin_snapshot, ...)"
            )
        was_ended = False  # a whole check ago
        while not wait({answer}, _CHECK_S).done:
            trouble = self._trouble()
            if trouble is not None and (answer.cancel() or was_ended):  # it may have died in the middle of an answer
                raise EngineStopped(trouble)
            was_ended = self.core.ended
        return answer.result()

    def _trouble(self) -> str | None:
        """Why no work can be taken now: shut down, failed, or stuck in one thing; None when all is well."""
        core = self.core
        if core.fault is not None or core.ended or self._stopping:
            return core.why_ended
        limit = time.monotonic() - self.config.stuck_after_s
        for since, what in ((core.busy_since, "one turn"), (core.residency.oldest_copy, "one copy")):
            if since is not None and since < limit:
                return f"engine is stuck: {what} has run for {time.monotonic() - since:.0f} s"
        return None


def _call(step: Callable[[], object], core: EngineCore) -> None:
    step()
