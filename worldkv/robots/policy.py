"""A policy: robot observations in, absolute robot actions out, through an engine that it does not own.

`Policy` holds what all sessions share; everything of a session lives on its `PolicySession`. Knows threads
and futures; does not know the wire, the network or the cache.

A tick's way: `infer` (caller's thread) -> `_prepare` (policy thread) -> `Engine.submit` -> engine thread
-> `_finish` (policy thread) -> the future. No thread waits for the engine, and the engine's only hand over.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from worldkv.errors import EngineStopped, SessionBusy, SessionEnded, SessionNotFound
from worldkv.models.dreamzero.inputs import TickResult
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.observation import Observation
from worldkv.robots.preparation import Memory, Preparation, Prepared, Tokenizer
from worldkv.robots.recorder import Recorder, SessionRecorder

if TYPE_CHECKING:
    from worldkv.engine.engine import Engine, Health
    from worldkv.engine.session import Session, Snapshot

_PREPROCESS_THREADS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyReply:
    """What one tick answers.

    `actions`: float32 [horizon, action_dim], absolute joint positions in radians, then the gripper in 0..1.
    `timings`: milliseconds: preprocess, queue, encode, commit, denoise, total (from `infer` to the reply).
    `warnings`: what is probably wrong with the observation, each told once per session.
    `decode_video`: the imagined frames, uint8 [T, H, W, 3]; the VAE runs when it is called, in the caller's thread.
    """

    actions: np.ndarray
    timings: dict[str, float]
    result: TickResult
    warnings: tuple[str, ...]
    decode_video: Callable[[], np.ndarray]


class Policy:
    """Serves one embodiment of one checkpoint. Thread-safe; `close` stops its threads, not the engine."""

    def __init__(
        self, engine: Engine, embodiment: Embodiment, tokenizer: Tokenizer, *, random_weights: bool = False
    ) -> None:
        self.embodiment = embodiment
        self.engine = engine
        self.random_weights = random_weights  # nobody trained them; displays say so
        self._preparation = Preparation(embodiment, tokenizer)
        self.recorder: Recorder | None = None  # set it before the first session; `close` closes it
        self._pool = ThreadPoolExecutor(_PREPROCESS_THREADS, thread_name_prefix="worldkv-policy")
        self._warm = False

    @property
    def metadata(self) -> dict[str, Any]:
        """The six keys that RoboArena clients configure themselves from."""
        sizes = {(camera.height, camera.width) for camera in self.embodiment.cameras}
        return {
            "image_resolution": list(sizes.pop()) if len(sizes) == 1 else None,
            "needs_stereo_camera": False,
            "needs_session_id": True,
            **asdict(self.embodiment.roboarena),
        }

    def read(self, observation: Mapping[str, Any]) -> Future[Observation]:
        """Check what a robot sent, before any session is touched for it; `infer` takes the result as well.

        The future brings BadRequest. Raises EngineStopped after `close`.
        """
        try:
            return self._pool.submit(self._preparation.read, observation)
        except RuntimeError:  # the pool's way to say that it is shut down
            raise EngineStopped("the policy is closed") from None

    def open_session(self, session_id: str | None = None) -> PolicySession:
        """A new session with an empty history. Raises AdmissionRefused if there is no room for it."""
        return self._open(session_id or uuid.uuid4().hex, recorded=True)

    def _open(self, session_id: str, *, recorded: bool) -> PolicySession:
        engine_session = self.engine.open_session(session_id)
        session = PolicySession(session_id, engine_session, self.engine, self._preparation, self._pool)
        if recorded and self.recorder is not None:
            session.recorder = self.recorder.begin(session_id)
        return session

    def fork(self, source: PolicySession | PolicySnapshot, session_id: str | None = None) -> PolicySession:
        """A new session that goes on from a session as it is now, or from a snapshot; no K/V is copied.

        Waits for the forward under way. Raises SessionBusy during the source's tick, AdmissionRefused.
        """
        session_id = session_id or uuid.uuid4().hex
        if isinstance(source, PolicySnapshot):
            forked, memory = self.engine.fork(source.engine_snapshot, session_id), source.memory
        else:
            with source.between_ticks() as memory:
                forked = self.engine.fork(source.engine_session, session_id)
        session = PolicySession(session_id, forked, self.engine, self._preparation, self._pool)
        session.remember(memory)
        if self.recorder is not None:
            origin = "a snapshot" if isinstance(source, PolicySnapshot) else source.session_id
            session.recorder = self.recorder.begin(session_id, forked_from=origin)
        return session

    def release(self, snapshot: PolicySnapshot) -> None:
        """Give a snapshot's references back; safe twice."""
        self.engine.release(snapshot.engine_snapshot)

    def warm_up(self) -> None:
        """Run the two kinds of tick that robots ask for (first, later) in a session that is thrown away."""
        self.engine.warm_up()
        session = self._open(uuid.uuid4().hex, recorded=False)
        try:
            for num_frames in (1, self.embodiment.frames_per_tick):
                session.infer(self._preparation.synthetic_observation(num_frames)).result()
        finally:
            session.close("warm-up done")
        self._warm = True

    def health(self) -> Health:
        """The engine's, and not ready before `warm_up` has ended."""
        health = self.engine.health()
        return health if self._warm or not health.ready else replace(health, ready=False, reason="warming up")

    def close(self) -> None:
        """Stop the policy's threads; ticks still in the engine end with EngineStopped. Safe twice."""
        self._pool.shutdown(wait=True)
        if self.recorder is not None:
            self.recorder.close()


@dataclass(frozen=True, eq=False)
class PolicySnapshot:
    """A session frozen between two ticks: its history in the engine, and what it remembers of the robot."""

    engine_snapshot: Snapshot
    memory: Memory


@dataclass(frozen=True)
class Imagined:
    """In place of an observation: what the last tick predicted is taken for observed. `noise_seed`: None is the
    model's own."""

    noise_seed: int | None = None


@dataclass(eq=False)
class _Tick:
    """One call of `infer`: its session's `_tick` until it is settled, by its own outcome or by a reset."""

    observation: Observation | Imagined | Mapping[str, Any]
    future: Future[PolicyReply] = field(default_factory=Future)
    started: float = field(default_factory=time.perf_counter)

    def milliseconds(self) -> float:
        return (time.perf_counter() - self.started) * 1e3

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # at shutdown two may want to end it
            self.future.set_exception(error)


class PolicySession:
    """One robot's episode. Thread-safe; one tick at a time.

    A tick that fails, for whatever reason, leaves the session as it was: send the same observation again.
    """

    def __init__(
        self,
        session_id: str,
        engine_session: Session,
        engine: Engine,
        preparation: Preparation,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.session_id = session_id
        self.engine_session = engine_session
        self._engine = engine
        self._preparation = preparation
        self._pool = pool
        self._control = threading.Lock()  # one reset, close, snapshot, restore, fork or park at a time; taken first
        self._lock = threading.Lock()  # may be held when the engine's is taken, never the other way round
        self._memory = Memory()
        self._tick: _Tick | None = None
        self._closed_for: str | None = None
        self.recorder: SessionRecorder | None = None

    def infer(self, observation: Observation | Mapping[str, Any]) -> Future[PolicyReply]:
        """Start a tick and return at once. The arrays of `observation` must not change until it is done.

        `observation`: what `Policy.read` made, or a map by the embodiment's fields, which are RoboArena's for DROID:
        images uint8 [H, W, 3] or [T, H, W, 3], joints [7] in radians, the gripper [1] in 0..1, `prompt`. Raises
        SessionBusy, SessionNotFound after `close`, EngineStopped. The rest arrives in the future: BadRequest,
        SessionEnded (reset or closed meanwhile), the
        engine's errors.
        """
        return self._start(_Tick(observation if isinstance(observation, Observation) else dict(observation)))

    def imagine(self, noise_seed: int | None = None) -> Future[PolicyReply]:
        """A tick without a robot: the future that the last one predicted is taken for observed, and the next one
        imagined. Raises like `infer`; BadRequest where nothing was observed yet."""
        return self._start(_Tick(Imagined(noise_seed)))

    def _start(self, tick: _Tick) -> Future[PolicyReply]:
        tick.future.set_running_or_notify_cancel()  # a caller cannot cancel; reset and close do
        with self._lock:
            self._require_open()
            if self._tick is not None:
                raise SessionBusy(f"session {self.session_id} has a tick in flight; wait for its reply")
            try:
                self._pool.submit(self._prepare, tick, self._memory)
            except RuntimeError:  # the pool's way to say that it is shut down
                raise EngineStopped("the policy is closed") from None
            self._tick = tick
        return tick.future

    def reset(self) -> None:
        """Forget all frames; the next tick starts a new window. A tick in flight ends with SessionEnded."""
        with self._control, self._ending_tick("was reset"):
            self._require_open()
            self._memory = replace(self._memory, views=())
            self._record("reset")
            self._engine.reset(self.engine_session)

    def close(self, reason: str) -> None:
        """End the session and give its cache back. Safe to call twice; the first reason stands."""
        with self._control, self._ending_tick(f"was closed: {reason}"):
            if self._closed_for is None:
                self._closed_for = reason
                self._memory = Memory()
                self._record("closed", reason=reason)
                self._engine.close(self.engine_session, reason)

    def snapshot(self) -> PolicySnapshot:
        """Freeze the session between two ticks. Waits for the forward under way.

        Raises SessionBusy during a tick, AdmissionRefused.
        """
        with self.between_ticks() as memory:
            return PolicySnapshot(self._engine.snapshot(self.engine_session), memory)

    def restore(self, snapshot: PolicySnapshot) -> None:
        """Go back to a snapshot of this or another session. Raises like `snapshot`."""
        with self.between_ticks():
            self._engine.restore(self.engine_session, snapshot.engine_snapshot)
            self.remember(snapshot.memory)
            self._record("restored")

    def park(self) -> None:
        """Move the session's K/V to host memory until its next tick. Raises SessionBusy during a tick."""
        with self.between_ticks():
            self._engine.park(self.engine_session)

    def describe(self) -> dict[str, Any]:
        """What people and programs are shown of a session; plain values."""
        session, parked = self.engine_session, self.engine_session.parked
        return {
            "state": "live" if parked is None else "parked",
            "busy": self._tick is not None,
            "frames_seen": session.num_chunks,
            "blocks": session.kv.num_blocks,
            "bytes_parked": 0 if parked is None else parked.num_bytes,
        }

    def remember(self, memory: Memory) -> None:
        """Take over what another session remembers."""
        with self._lock:
            self._memory = memory

    @contextmanager
    def between_ticks(self) -> Iterator[Memory]:
        """Gives the session's memory; in the `with` no tick can start, and a reset or close waits for its end."""
        with self._control:
            with self._lock:
                self._require_open()
                if self._tick is not None:
                    raise SessionBusy(f"session {self.session_id} has a tick in flight; wait for its reply")
                self._tick = _Tick({})
            try:
                yield self._memory
            finally:
                with self._lock:
                    self._tick = None

    @contextmanager
    def _ending_tick(self, how: str) -> Iterator[None]:
        """The lock, held without a tick in flight; the future of one that was fails once the lock is free.

        The engine is told inside the lock, so that it cannot take a later tick for the one to cancel.
        """
        tick = None
        try:
            with self._lock:
                tick, self._tick = self._tick, None
                yield
        finally:
            if tick is not None:
                tick.fail(SessionEnded(f"session {self.session_id} {how}, during this tick"))

    def _record(self, event: str, **details: str) -> None:
        if self.recorder is not None:
            self.recorder.event(event, **details)

    def _require_open(self) -> None:
        if self._closed_for is not None:
            raise SessionNotFound(f"session {self.session_id} is closed ({self._closed_for}); open a new one")

    def _prepare(self, tick: _Tick, memory: Memory) -> None:
        """Policy thread: observation to inputs, then over to the engine."""
        try:
            read = tick.observation
            if isinstance(read, Imagined):
                prepared = self._preparation.imagine(memory, read.noise_seed)
            else:
                if not isinstance(read, Observation):
                    read = tick.observation = self._preparation.read(read)
                prepared = self._preparation.prepare(read, memory)
            with self._lock:
                if self._tick is not tick:  # reset or closed meanwhile
                    return
                preprocess = tick.milliseconds()
                engine_future = self._engine.submit(self.engine_session, prepared.inputs)
        except Exception as error:
            self._settle(tick, error)
        else:
            engine_future.add_done_callback(lambda done: self._hand_over(tick, prepared, preprocess, done))

    def _hand_over(self, tick: _Tick, prepared: Prepared, preprocess: float, engine_future: Future[TickResult]) -> None:
        """Engine thread, perhaps with its locks held: only pass the result on."""
        try:
            self._pool.submit(self._finish, tick, prepared, preprocess, engine_future)
        except RuntimeError:  # the pool is shut down; no lock may be taken here
            tick.fail(EngineStopped("the policy was closed before this tick was done"))

    def _finish(self, tick: _Tick, prepared: Prepared, preprocess: float, engine_future: Future[TickResult]) -> None:
        """Policy thread: the model's actions to robot actions."""
        try:
            result = engine_future.result()
            actions = self._preparation.robot_actions(result.actions, prepared.state)
        except CancelledError:
            self._settle(tick, SessionEnded(f"session {self.session_id}: the engine cancelled this tick"))
        except Exception as error:
            self._settle(tick, error)
        else:
            timings = {"preprocess": preprocess, **result.timings, "total": tick.milliseconds()}
            self._settle(
                tick,
                PolicyReply(
                    actions,
                    timings,
                    result,
                    prepared.warnings,
                    lambda: self._engine.model.imagined_video(result),
                ),
                prepared.memory,
            )

    def _settle(self, tick: _Tick, outcome: PolicyReply | Exception, memory: Memory | None = None) -> None:
        """End the tick, unless a reset or close has done so; `memory` becomes the session's."""
        with self._lock:
            if self._tick is not tick:
                return
            self._tick = None  # before the future is set: its receiver may send the next observation at once
            self._memory = memory or self._memory
            seen = tick.observation
            if self.recorder is not None and isinstance(outcome, PolicyReply) and isinstance(seen, Observation):
                self.recorder.tick(seen, outcome)
            elif isinstance(outcome, PolicyReply):
                self._record("imagined")
        if isinstance(outcome, PolicyReply):
            for warning in outcome.warnings:
                fields = {"event": "warning", "session": self.session_id}
                logger.warning("session %s: %s", self.session_id, warning, extra=fields)
            tick.future.set_result(outcome)
        else:
            tick.fail(outcome)
