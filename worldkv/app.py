"""An app: what the server serves. It says what a client's fields mean to a model, and what a client is answered.

Robots are one, `worldkv.robots.policy.Policy`. The server knows no other side of a family than `App`: it opens
sessions, hands them what `read` made of a request, and sends and shows what `Reply` holds. What a session remembers
lives in the engine, and so does who may do what when.
"""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from worldkv.errors import BadRequest, EngineStopped, SessionEnded, SessionNotFound
from worldkv.models.base import InputsT, ResultT

if TYPE_CHECKING:
    import numpy as np

    from worldkv.engine.engine import Engine, Health, SessionHandle, SnapshotHandle, TickReply
    from worldkv.models.session_file import SessionExport

logger = logging.getLogger(__name__)
_TELL_EVERY_S = 3.0  # how far a warm-up is


@dataclass(frozen=True, kw_only=True)
class Reply(ABC):
    """What one tick answers.

    `timings`: milliseconds by stage, and total, which is their sum. `warnings`: what is probably wrong with the inputs,
    each told once per session. `facts`: what people and programs are shown of the tick beside that; plain values.
    `decode_video`: the imagined frames, uint8 [T, H, W, 3]. Waits for the decoder, which runs when nothing more urgent
    does.
    """

    timings: Mapping[str, float]
    warnings: tuple[str, ...]
    facts: Mapping[str, str | int | float | None]
    decode_video: Callable[[], np.ndarray]

    @property
    @abstractmethod
    def output(self) -> Mapping[str, object]:
        """What its client asked for, by field: arrays and plain values."""

    @property
    @abstractmethod
    def shown(self) -> Mapping[str, object]:
        """What a page shows of the session's newest tick, by field; plain values."""

    @property
    @abstractmethod
    def seen(self) -> Mapping[str, np.ndarray] | None:
        """What the model was shown, by name: uint8 [T, H, W, 3]. None: it imagined that."""

    @property
    def events(self) -> tuple[str, ...]:
        """What belongs into the session's story, beside the warnings."""
        return ()


@dataclass(frozen=True, kw_only=True)
class KeptAhead(Generic[InputsT]):
    """What answers a client that sends a part of its request ahead of it. `num_frames`: that wait for the request now.
    `warnings`: as of a Reply. `begin`: what its tick can begin with; None: it cannot yet."""

    num_frames: int
    warnings: tuple[str, ...]
    begin: InputsT | None


ReplyT = TypeVar("ReplyT", bound=Reply)
ReplyT_contra = TypeVar("ReplyT_contra", bound=Reply, contravariant=True)


class SessionRecord(Protocol[ReplyT_contra]):
    """Where one session is written to as it runs. Calls come in the session's own order, and return at once."""

    @property
    def folder(self) -> Path | None: ...
    def tick(self, reply: ReplyT_contra) -> None: ...
    def event(self, name: str, **details: str) -> None: ...


class Records(Protocol[ReplyT_contra]):
    """Where all sessions of an app are written to."""

    def begin(self, session_id: str, **details: str) -> SessionRecord[ReplyT_contra]: ...
    def close(self) -> None: ...


class App(ABC, Generic[InputsT, ResultT, ReplyT]):
    """One app over an engine, which whoever made it shuts down. Thread-safe.

    `speaks`: the server's room for its sockets (see `server.app.WIRES`). `recorder`: set it before the first session;
    `close` closes it. `random_weights`: nobody trained them; displays say so.
    """

    speaks: ClassVar[str]

    def __init__(self, engine: Engine[InputsT, Any, ResultT], *, random_weights: bool = False) -> None:
        self.engine = engine
        self.random_weights = random_weights
        self.recorder: Records[ReplyT] | None = None
        self._warm = False

    # what is an app's own

    @property
    @abstractmethod
    def name(self) -> str:
        """What is served, in a word."""

    @property
    @abstractmethod
    def greeting(self) -> Mapping[str, object]:
        """The first message of every connection."""

    @property
    @abstractmethod
    def period_s(self) -> float:
        """How long a reply lasts its client: later than that is late."""

    @abstractmethod
    def describe(self) -> Mapping[str, object]:
        """What a request has to hold and what is answered, for people and programs; plain values."""

    @abstractmethod
    def read(self, fields: Mapping[str, Any]) -> InputsT:
        """Check what a client sent, before any session is touched for it. Raises BadRequest. Not for an event loop."""

    @abstractmethod
    def imagined(self, noise_seed: int | None) -> InputsT:
        """The inputs of a tick without a client: what the last one predicted is taken for observed."""

    @abstractmethod
    def reply(self, ticked: TickReply[ResultT]) -> ReplyT:
        """What a tick answers. On the engine's thread: it only arranges."""

    def read_ahead(self, fields: Mapping[str, object]) -> InputsT:
        """Check what a client sent ahead of its request, as `read` does."""
        raise BadRequest(f"observe: {self.name} takes whole requests only")

    def kept(self, ticked: TickReply[ResultT]) -> KeptAhead[InputsT]:
        """What answers that. On the engine's thread: it only arranges."""
        raise NotImplementedError

    @property
    def summary(self) -> Mapping[str, str]:
        """What is served, in a line by subject: for people who start it."""
        return {}

    def record(self, folder: Path, about: Mapping[str, object], limit_bytes: float) -> None:
        """Have every session written to `folder` from now on. Raises ValueError where the app cannot, OSError."""
        raise ValueError(f"record: {self.name} is an app whose sessions are not recorded")

    # what all have

    def open_session(self, session_id: str | None = None) -> Session[InputsT, ResultT, ReplyT]:
        """A new session with an empty history. Raises AdmissionRefused if there is no room for it."""
        return self._session(self.engine.open_session(session_id or uuid.uuid4().hex))

    def fork(
        self, source: Session[InputsT, ResultT, ReplyT] | SnapshotHandle, session_id: str | None = None
    ) -> Session[InputsT, ResultT, ReplyT]:
        """A new session that goes on from a session as it is now (after its tick in flight), or from a snapshot; no K/V
        is copied. Raises AdmissionRefused."""
        parent = source.handle if isinstance(source, Session) else source
        return self.forked(self.engine.fork(parent, session_id or uuid.uuid4().hex), source)

    def begin_fork(
        self, source: Session[InputsT, ResultT, ReplyT] | SnapshotHandle, session_id: str | None = None
    ) -> Future[SessionHandle]:
        """For those who cannot wait: `forked` makes a session of what it brings. Cancelling it gives up the wait."""
        parent = source.handle if isinstance(source, Session) else source
        return self.engine.begin_fork(parent, session_id or uuid.uuid4().hex)

    def forked(
        self, handle: SessionHandle, source: Session[InputsT, ResultT, ReplyT] | SnapshotHandle
    ) -> Session[InputsT, ResultT, ReplyT]:
        return self._session(handle, forked_from=source.session_id if isinstance(source, Session) else "a snapshot")

    def begin_import(
        self, data: bytes | bytearray, session_id: str, *, trusts: bool = True, exact: bool = False
    ) -> Future[SessionHandle]:
        """A session that goes on from an export, see `Engine.import_session`; `imported` makes one of its handle."""
        return self.engine.begin_import(data, session_id, trusts=trusts, exact=exact)

    def imported(self, handle: SessionHandle) -> Session[InputsT, ResultT, ReplyT]:
        return self._session(handle, forked_from="an export")

    def release(self, snapshot: SnapshotHandle) -> None:
        self.engine.release(snapshot)

    def warm_up(self) -> None:
        """Make what the model makes by shape, then run the two kinds of tick that clients ask for (first, later) in a
        session that is thrown away. The log says how far it is, and how long it took."""
        began = told = time.monotonic()
        num_steps = 0

        def progress(done: int, steps: int) -> None:
            nonlocal told, num_steps
            num_steps = steps
            if steps and time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                logger.info("warming up: %d of %d shapes are made", done, steps)

        self.engine.warm_up(progress)
        self._warm = True
        logger.info("warm after %.1f s, %d shapes were made", time.monotonic() - began, num_steps)

    def health(self) -> Health:
        """The engine's, and not ready before `warm_up` has ended."""
        health = self.engine.health()
        return health if self._warm or not health.ready else replace(health, ready=False, reason="warming up")

    def close(self) -> None:
        """Write what waits to be recorded. Safe twice."""
        if self.recorder is not None:
            with suppress(EngineStopped):  # what was asked for before is recorded as well
                self.engine.inspect(lambda core: None)
            self.recorder.close()

    def _session(self, handle: SessionHandle, **origin: str) -> Session[InputsT, ResultT, ReplyT]:
        record = None if self.recorder is None else self.recorder.begin(handle.session_id, **origin)
        return Session(self, handle, record)


class Session(Generic[InputsT, ResultT, ReplyT]):
    """One client's episode: a handle of the engine's, and its record. Thread-safe; one tick at a time.

    A tick that fails, for whatever reason, leaves the session as it was: send the same inputs again.
    """

    def __init__(
        self, app: App[InputsT, ResultT, ReplyT], handle: SessionHandle, record: SessionRecord[ReplyT] | None
    ) -> None:
        self.handle = handle
        self.record = record
        self._app = app
        self._engine = app.engine

    @property
    def session_id(self) -> str:
        return self.handle.session_id

    def infer(self, inputs: InputsT, deadline: float | None = None) -> Future[ReplyT]:
        """Start a tick and return at once. The arrays of `inputs` must not change until it is done.

        `inputs`: what `App.read` made, or else what the app takes in its place. `deadline`: see `Engine.submit`; None
        is `App.period_s` from now. Raises EngineStopped. The rest arrives in the future: BadRequest, SessionBusy,
        SessionNotFound, SessionEnded (reset or closed meanwhile), the engine's errors.
        """
        return self._submit(inputs, time.perf_counter() + self._app.period_s if deadline is None else deadline)

    def _submit(
        self, inputs: InputsT, deadline: float | None = None, *, waits_its_turn: bool = False
    ) -> Future[ReplyT]:
        answer: Future[ReplyT] = Future()
        answer.set_running_or_notify_cancel()  # a caller cannot cancel; reset and close do
        submitted = self._engine.submit(self.handle, inputs, deadline, waits_its_turn=waits_its_turn)
        submitted.add_done_callback(lambda done: self._answer(done, answer))
        return answer

    def observe(self, inputs: InputsT) -> Future[KeptAhead[InputsT]]:
        """Keep a part of the next request, and begin its tick as soon as that can be done; `infer` then takes the rest,
        and its reply waits for the rest only.

        `inputs`: what `App.read_ahead` made. It waits for a tick in flight, and the next `infer` waits for it. Raises
        like `infer`; a beginning that fails is made up for by `infer`, and nobody is told but the log.
        """
        answer: Future[KeptAhead[InputsT]] = Future()
        answer.set_running_or_notify_cancel()
        submitted = self._engine.submit(self.handle, inputs, waits_its_turn=True)
        submitted.add_done_callback(lambda done: self._answer_kept(done, answer))
        return answer

    def imagine(self, noise_seed: int | None = None) -> Future[ReplyT]:
        """A tick without a client: the future that the last one predicted is taken for observed, and the next one
        imagined. It waits for a tick in flight, and a client's next one waits for it. Raises like `infer`; BadRequest
        where nothing was observed yet."""
        return self._submit(self._app.imagined(noise_seed), waits_its_turn=True)

    def reset(self) -> Future[None]:
        """Forget the history; the next tick starts a new window. A tick in flight ends with SessionEnded. Whatever is
        asked for later comes after it."""
        done = self._engine.reset(self.handle)
        done.add_done_callback(lambda _: self._happened("reset"))
        return done

    def close(self, reason: str) -> Future[None]:
        """End the session and give its cache back; safe twice, the first reason stands. Nobody needs to wait."""
        done = self._engine.close(self.handle, reason)
        done.add_done_callback(lambda _: self._happened("closed", reason=reason))
        return done

    def snapshot(self) -> SnapshotHandle:
        """Freeze the session between two ticks. Waits for the one in flight. Raises AdmissionRefused."""
        return self._engine.snapshot(self.handle)

    def begin_snapshot(self) -> Future[SnapshotHandle]:
        """The same, as a future; cancelling it gives up the wait. So do those of `begin_restore`, `begin_park`
        and `begin_resume`."""
        return self._engine.begin_snapshot(self.handle)

    def restore(self, snapshot: SnapshotHandle) -> None:
        """Go back to a snapshot, of any session. Raises like `snapshot`."""
        self._engine.restore(self.handle, snapshot)
        self._happened("restored")

    def begin_restore(self, snapshot: SnapshotHandle) -> Future[None]:
        restored = self._engine.begin_restore(self.handle, snapshot)
        restored.add_done_callback(self._note_restored)
        return restored

    def park(self) -> None:
        """Move the session's K/V to host memory until its next tick. Waits for the one in flight."""
        self._engine.park(self.handle)

    def begin_park(self) -> Future[None]:
        return self._engine.begin_park(self.handle)

    def begin_export(self, *, compact: bool = False) -> Future[SessionExport]:
        return self._engine.begin_export(self.handle, compact=compact)

    def resume(self) -> None:
        """Bring a parked session's K/V back before its next tick does. Raises AdmissionRefused."""
        self._engine.resume(self.handle)

    def begin_resume(self) -> Future[None]:
        return self._engine.begin_resume(self.handle)

    def describe(self) -> dict[str, Any]:
        """What people and programs are shown of a session; plain values."""
        info = self._engine.describe(self.handle)
        return {
            "state": "parked" if info.parked else "live",
            "busy": info.busy,
            "frames_seen": info.num_chunks,
            "blocks": info.num_blocks,
            "bytes_parked": info.bytes_parked,
            "inexact": info.inexact,
        }

    def _answer(self, done: Future[TickReply[ResultT]], answer: Future[ReplyT]) -> None:
        """The engine's thread: only pass the result on."""
        error = done.exception()
        if error is not None:
            answer.set_exception(error)
            return
        reply = self._app.reply(done.result())
        if reply.seen is None:
            self._happened("imagined")
        elif self.record is not None:
            self.record.tick(reply)
        self._warn(reply.warnings)
        answer.set_result(reply)

    def _answer_kept(self, done: Future[TickReply[ResultT]], answer: Future[KeptAhead[InputsT]]) -> None:
        """The engine's thread. The beginning is asked for before its client can ask for anything."""
        error = done.exception()
        if error is not None:
            answer.set_exception(error)
            return
        kept = self._app.kept(done.result())
        self._warn(kept.warnings)
        if kept.begin is not None:
            with suppress(EngineStopped):
                self._engine.work_ahead(self.handle, kept.begin).add_done_callback(self._note_begun)
        answer.set_result(kept)

    def _note_begun(self, done: Future[object]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, SessionEnded | SessionNotFound | EngineStopped):
            logger.warning("session %s: its next tick could not begin ahead: %s", self.session_id, error)

    def _warn(self, warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            fields = {"event": "warning", "session": self.session_id}
            logger.warning("session %s: %s", self.session_id, warning, extra=fields)

    def _note_restored(self, done: Future[None]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._happened("restored")

    def _happened(self, event: str, **details: str) -> None:
        if self.record is not None:
            self.record.event(event, **details)


AnyApp: TypeAlias = App[Any, Any, Any]
AnySession: TypeAlias = Session[Any, Any, Any]
