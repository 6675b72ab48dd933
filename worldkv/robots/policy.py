"""A policy: robot observations in, absolute robot actions out, through an engine that it does not own.

`Policy` is what servers and scripts hold; a `PolicySession` is a handle of the engine's with a recorder beside it. What
a session remembers lives in the engine, and so does who may do what when. Does not know the wire nor the cache.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from worldkv.errors import EngineStopped
from worldkv.models.dreamzero.inputs import TickResult
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.observation import Observation
from worldkv.robots.preparation import Imagined, Preparation, Seen
from worldkv.robots.program import RobotPolicy, RobotResult, RobotState
from worldkv.robots.recorder import Recorder, SessionRecorder

if TYPE_CHECKING:
    import torch

    from worldkv.engine.engine import Engine, Health, SessionHandle, SnapshotHandle, TickReply

__all__ = ["Imagined", "Policy", "PolicyReply", "PolicySession"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyReply:
    """What one tick answers.

    `actions`: float32 [horizon, action_dim], absolute joint positions in radians, then the gripper in 0..1.
    `timings`: milliseconds: queue, preprocess, encode, commit, denoise, postprocess, and total, which is their sum.
    `warnings`: what is probably wrong with the observation, each told once per session.
    `facts`: what people are shown of the tick beside its timings; plain values.
    `decode_video`: the imagined frames, uint8 [T, H, W, 3]. Waits for the decoder, which runs when nothing more urgent
    does.
    """

    actions: np.ndarray
    timings: Mapping[str, float]
    result: TickResult
    warnings: tuple[str, ...]
    facts: Mapping[str, str | int | float | None]
    decode_video: Callable[[], np.ndarray]


class Policy:
    """Serves one embodiment of one checkpoint: the robots' app. Thread-safe; whoever made the engine shuts it down."""

    def __init__(
        self,
        engine: Engine[Seen, RobotState, RobotResult],
        preparation: Preparation,
        *,
        random_weights: bool = False,
    ) -> None:
        self.engine = engine
        self.random_weights = random_weights  # nobody trained them; displays say so
        self.recorder: Recorder | None = None  # set it before the first session; `close` closes it
        self._preparation = preparation
        self._warm = False

    @property
    def embodiment(self) -> Embodiment:
        return self._preparation.embodiment

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

    def read(self, observation: Mapping[str, Any]) -> Observation:
        """Check what a robot sent, before any session is touched for it; `infer` takes the result as well.

        Raises BadRequest. Takes milliseconds: not for an event loop.
        """
        return self._preparation.read(observation)

    def open_session(self, session_id: str | None = None) -> PolicySession:
        """A new session with an empty history. Raises AdmissionRefused if there is no room for it."""
        handle = self.engine.open_session(session_id or uuid.uuid4().hex)
        recorder = None if self.recorder is None else self.recorder.begin(handle.session_id)
        return PolicySession(self.engine, handle, recorder)

    def fork(self, source: PolicySession | SnapshotHandle, session_id: str | None = None) -> PolicySession:
        """A new session that goes on from a session as it is now, or from a snapshot; no K/V is copied.

        Waits for the batch under way. Raises SessionBusy during the source's tick, AdmissionRefused.
        """
        parent = source.handle if isinstance(source, PolicySession) else source
        origin = source.session_id if isinstance(source, PolicySession) else "a snapshot"
        handle = self.engine.fork(parent, session_id or uuid.uuid4().hex)
        recorder = None if self.recorder is None else self.recorder.begin(handle.session_id, forked_from=origin)
        return PolicySession(self.engine, handle, recorder)

    def release(self, snapshot: SnapshotHandle) -> None:
        """Give a snapshot's references back; safe twice."""
        self.engine.release(snapshot)

    def warm_up(self) -> None:
        """Run the two kinds of tick that robots ask for (first, later) in a session that is thrown away."""
        self.engine.warm_up()
        self._warm = True

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


class PolicySession:
    """One robot's episode: a handle of the engine's, and its recorder. Thread-safe; one tick at a time.

    A tick that fails, for whatever reason, leaves the session as it was: send the same observation again.
    """

    def __init__(
        self,
        engine: Engine[Seen, RobotState, RobotResult],
        handle: SessionHandle,
        recorder: SessionRecorder | None,
    ) -> None:
        self.handle = handle
        self.recorder = recorder
        self._engine = engine

    @property
    def session_id(self) -> str:
        return self.handle.session_id

    def infer(self, observation: Observation | Mapping[str, Any], deadline: float | None = None) -> Future[PolicyReply]:
        """Start a tick and return at once. The arrays of `observation` must not change until it is done.

        `observation`: what `Policy.read` made, or a map by the embodiment's fields, which are RoboArena's for DROID:
        images uint8 [H, W, 3] or [T, H, W, 3], joints [7] in radians, the gripper [1] in 0..1, `prompt`. Raises
        EngineStopped. The rest arrives in the future: BadRequest, SessionBusy, SessionNotFound, SessionEnded (reset or
        closed meanwhile), the engine's errors.
        """
        return self._start(observation if isinstance(observation, Observation) else dict(observation), deadline)

    def imagine(self, noise_seed: int | None = None) -> Future[PolicyReply]:
        """A tick without a robot: the future that the last one predicted is taken for observed, and the next one
        imagined. Raises like `infer`; BadRequest where nothing was observed yet."""
        return self._start(Imagined(noise_seed), None)

    def reset(self) -> Future[None]:
        """Forget all frames; the next tick starts a new window. A tick in flight ends with SessionEnded. Whatever is
        asked for later comes after it."""
        done = self._engine.reset(self.handle)
        done.add_done_callback(lambda _: self._record("reset"))
        return done

    def close(self, reason: str) -> Future[None]:
        """End the session and give its cache back; safe twice, the first reason stands. Nobody needs to wait."""
        done = self._engine.close(self.handle, reason)
        done.add_done_callback(lambda _: self._record("closed", reason=reason))
        return done

    def snapshot(self) -> SnapshotHandle:
        """Freeze the session between two ticks. Waits for the batch under way.

        Raises SessionBusy during a tick, AdmissionRefused.
        """
        return self._engine.snapshot(self.handle)

    def restore(self, snapshot: SnapshotHandle) -> None:
        """Go back to a snapshot of this or another session. Raises like `snapshot`."""
        self._engine.restore(self.handle, snapshot)
        self._record("restored")

    def park(self) -> None:
        """Move the session's K/V to host memory until its next tick. Raises SessionBusy during a tick."""
        self._engine.park(self.handle)

    def describe(self) -> dict[str, Any]:
        """What people and programs are shown of a session; plain values."""
        info = self._engine.describe(self.handle)
        return {
            "state": "parked" if info.parked else "live",
            "busy": info.busy,
            "frames_seen": info.num_chunks,
            "blocks": info.num_blocks,
            "bytes_parked": info.bytes_parked,
        }

    def _start(self, seen: Seen, deadline: float | None) -> Future[PolicyReply]:
        answer: Future[PolicyReply] = Future()
        answer.set_running_or_notify_cancel()  # a caller cannot cancel; reset and close do
        submitted = self._engine.submit(self.handle, seen, deadline)
        submitted.add_done_callback(lambda done: self._answer(done, answer))
        return answer

    def _answer(self, done: Future[TickReply[RobotResult]], answer: Future[PolicyReply]) -> None:
        """The engine's thread: only pass the result on."""
        error = done.exception()
        if error is not None:
            answer.set_exception(error)
            return
        ticked = done.result()
        reply = self._reply(ticked)
        observation = ticked.result.observation
        if self.recorder is not None and observation is not None:
            self.recorder.tick(observation, reply)
        else:
            self._record("imagined")
        for warning in reply.warnings:
            fields = {"event": "warning", "session": self.session_id}
            logger.warning("session %s: %s", self.session_id, warning, extra=fields)
        answer.set_result(reply)

    def _reply(self, ticked: TickReply[RobotResult]) -> PolicyReply:
        result, info = ticked.result.model, ticked.info
        facts = {
            "restart_reason": result.restart_reason,
            "frames_cached": result.start_frame,
            "start_frame": result.start_frame,
            "blocks_used": info.blocks_used,
            "blocks_free": info.blocks_free,
        }
        warnings = ticked.result.warnings
        return PolicyReply(
            ticked.result.actions, info.timings, result, warnings, facts, lambda: self._imagined_video(result)
        )

    def _imagined_video(self, result: TickResult) -> np.ndarray:
        model = cast("RobotPolicy", self._engine.model).model
        video = self._engine.compute(model.imagined_video(result)).result()
        return model.frames(cast("torch.Tensor", video), result.video_latents.shape[1])

    def _record(self, event: str, **details: str) -> None:
        if self.recorder is not None:
            self.recorder.event(event, **details)
