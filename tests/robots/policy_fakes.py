"""What policy tests stand on: a small made-up robot, an engine that computes nothing, a byte tokenizer."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from worldkv.device import HostCopy
from worldkv.errors import SessionBusy, SessionEnded
from worldkv.models.dreamzero.inputs import TickInputs, TickResult
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.experiment_cfg import read_embodiment

HORIZON, TEXT_LEN = 6, 16
CAMERAS = ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left")


def conf() -> dict[str, Any]:
    def step(name: str, **arguments: Any) -> dict[str, Any]:
        return {"_target_": f"groot.vla.data.transform.{name}", **arguments}

    keys = {
        "video": [f"video.{camera}" for camera in CAMERAS],
        "state": ["state.joint_position", "state.gripper_position"],
        "action": ["action.joint_position", "action.gripper_position"],
    }
    return {
        "relative_action": True,
        "relative_action_per_horizon": False,
        "relative_action_keys": ["joint_position"],
        "action_horizon": HORIZON,
        "modality_configs": {"oxe_droid": {kind: {"modality_keys": list(names)} for kind, names in keys.items()}},
        "transforms": {
            "oxe_droid": {
                "transforms": [
                    step("VideoCrop", scale=0.95, mode="random"),
                    step("VideoResize", height=16, width=24, interpolation="linear"),
                    step("StateActionTransform", normalization_modes=dict.fromkeys(keys["state"], "q99")),
                    step("StateActionTransform", normalization_modes=dict.fromkeys(keys["action"], "q99")),
                    step("ConcatTransform", **{f"{kind}_concat_order": names for kind, names in keys.items()}),
                    step(
                        "DreamTransform",
                        max_state_dim=16,
                        max_action_dim=10,
                        max_length=TEXT_LEN,
                        action_horizon=HORIZON,
                    ),
                ]
            }
        },
    }


def metadata() -> dict[str, Any]:
    def statistics(dim: int, scale: float) -> dict[str, list[float]]:
        ends = {"q01": -1.0, "q99": 1.0, "min": -1.5, "max": 1.5, "mean": 0.1, "std": 0.5}
        return {name: [scale * end * (1 + 0.1 * i) for i in range(dim)] for name, end in ends.items()}

    dims = {"joint_position": 7, "gripper_position": 1}
    video = {camera: {"resolution": [320, 180], "channels": 3, "fps": 15.0} for camera in CAMERAS}
    shapes = {key: {"shape": [dim], "absolute": True} for key, dim in dims.items()}
    return {
        "oxe_droid": {
            "embodiment_tag": "oxe_droid",
            "statistics": {
                "state": {key: statistics(dim, 1.0) for key, dim in dims.items()},
                "action": {key: statistics(dim, 0.3) for key, dim in dims.items()},
            },
            "modalities": {"video": video, "state": shapes, "action": dict(shapes)},
        }
    }


def embodiment() -> Embodiment:
    return read_embodiment(conf(), metadata())


def observation(seed: int = 0, num_frames: int | None = 1, **changes: Any) -> dict[str, Any]:
    """A valid observation; `num_frames` None: no time axis. A change to None removes a field."""
    random = np.random.default_rng(seed)
    shape = (180, 320, 3) if num_frames is None else (num_frames, 180, 320, 3)
    whole: dict[str, Any] = {
        f"observation/{camera}": random.integers(1, 256, shape, dtype=np.uint8)
        for camera in ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
    }
    whole["observation/joint_position"] = random.uniform(-0.5, 0.5, 7)
    whole["observation/gripper_position"] = random.uniform(0, 1, 1)
    whole["prompt"] = "pick up the red block"
    whole.update({name.replace("__", "/"): value for name, value in changes.items()})
    return {name: value for name, value in whole.items() if value is not None}


class FakeTokenizer:
    """Bytes of the instruction, which the template repeats at its end."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        self.texts.append(text)
        tail = text.encode()[-TEXT_LEN:]
        ids = np.zeros((1, TEXT_LEN), np.int64)
        ids[0, : len(tail)] = list(tail)
        return ids, (ids != 0).astype(np.int64)


@dataclass(frozen=True)
class FakeHealth:
    ready: bool
    reason: str


@dataclass(eq=False)
class FakeSession:
    session_id: str | None
    closed_for: str | None = None
    resets: int = 0
    pending: list[tuple[TickInputs, Future[TickResult]]] = field(default_factory=list)


class FakeEngine:
    """Answers each tick with numbers made from its inputs; at once, or when `answer` is called.

    As unfriendly as the contract allows: it sets futures while it holds its own lock.
    """

    def __init__(self, *, manual: bool = False) -> None:
        self.manual = manual
        self.lock = threading.Lock()
        self.sessions: list[FakeSession] = []
        self.submitted: list[tuple[str | None, TickInputs]] = []
        self.fail_next: Exception | None = None
        self.actions_override: np.ndarray | None = None
        self.arrived = threading.Semaphore(0)
        self.warmed = 0

    def open_session(self, session_id: str | None = None) -> FakeSession:
        self.sessions.append(FakeSession(session_id))
        return self.sessions[-1]

    def submit(self, session: FakeSession, inputs: TickInputs) -> Future[TickResult]:
        future: Future[TickResult] = Future()
        with self.lock:
            if session.pending:
                raise SessionBusy("busy")
            self.submitted.append((session.session_id, inputs))
            session.pending.append((inputs, future))
        self.arrived.release()
        if not self.manual:
            threading.Thread(target=self.answer, args=(session,)).start()
        return future

    def answer(self, session: FakeSession) -> None:
        with self.lock:
            inputs, future = session.pending.pop()
            if self.fail_next is not None:
                error, self.fail_next = self.fail_next, None
                future.set_exception(error)
            else:
                future.set_result(self.result(inputs))

    def result(self, inputs: TickInputs) -> TickResult:
        digest = inputs.frames.astype(np.int64).sum() + inputs.token_ids.sum() + int(1e6 * inputs.state.sum())
        actions = np.random.default_rng(abs(int(digest))).uniform(-1, 1, (HORIZON, 10)).astype(np.float32)
        return TickResult(
            action_copy=HostCopy(torch.from_numpy(actions if self.actions_override is None else self.actions_override)),
            video_latents=torch.zeros(1),
            observed_latents=torch.zeros(1),
            restart_reason="first tick" if len(inputs.frames) == 1 else None,
            start_frame=1,
            timings={"queue": 0.1, "encode": 1.0, "commit": 2.0, "denoise": 3.0, "total": 6.1},
            frames_cached=1,
            blocks_used=2,
            blocks_free=6,
        )

    def reset(self, session: FakeSession) -> None:
        session.resets += 1
        self._cancel(session)

    def close(self, session: FakeSession, reason: str) -> None:
        session.closed_for = reason
        self._cancel(session)

    def _cancel(self, session: FakeSession) -> None:
        with self.lock:
            while session.pending:
                session.pending.pop()[1].set_exception(SessionEnded("engine: ended"))

    def warm_up(self) -> None:
        self.warmed += 1

    def health(self) -> FakeHealth:
        return FakeHealth(self.warmed > 0, "" if self.warmed else "cold")
