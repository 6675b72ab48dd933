"""What policy tests stand on: a small made-up robot, a model that computes nothing, a byte tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from worldkv.engine.engine import EngineConfig
from worldkv.kv.cache import KVCache
from worldkv.kv.spec import KVSpec
from worldkv.kv.state import KVState
from worldkv.kv.window import Window
from worldkv.load import start_engine
from worldkv.models.base import Encode, ModelCard, Outcome, Program
from worldkv.models.world_action import TickInputs, TickResult
from worldkv.robots.dataset import read_embodiment
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.policy import Policy
from worldkv.robots.preparation import Preparation
from worldkv.robots.program import RobotPolicy

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


class FakeModel:
    """Answers each tick with numbers made from its inputs; where it is `held`, not before `go_on` is set."""

    def __init__(self, *, held: bool = False) -> None:
        self.go_on, self.arrived = threading.Event(), threading.Semaphore(0)
        if not held:
            self.go_on.set()
        self.submitted: list[TickInputs] = []
        self.fail_next: Exception | None = None
        self.actions_override: np.ndarray | None = None
        self.spec = KVSpec(1, 1, 2, Window(1, 4), ("a",))
        self.card = ModelCard("fake", "nothing", 0, 4, {})

    def new_state(self, old: None = None) -> None:
        return None

    def program(self, kv: KVState, state: None, inputs: TickInputs) -> Program[TickResult, None]:
        self.submitted.append(inputs)
        yield Encode("answer", inputs)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return Outcome(self.result(inputs), None)

    def encode(self, encoder: str, payloads: Sequence[TickInputs]) -> Sequence[None]:
        self.arrived.release()
        assert self.go_on.wait(10)
        return [None] * len(payloads)

    def forward(self, cache: KVCache, rows: Sequence[Any]) -> Sequence[object]:
        raise AssertionError

    def fake_inputs(self, first: bool) -> TickInputs:
        raise AssertionError("the policy's own are for warming up")

    def result(self, inputs: TickInputs) -> TickResult:
        digest = inputs.frames.astype(np.int64).sum() + inputs.token_ids.sum() + int(1e6 * inputs.state.sum())
        actions = np.random.default_rng(abs(int(digest))).uniform(-1, 1, (HORIZON, 10)).astype(np.float32)
        return TickResult(
            actions=actions if self.actions_override is None else self.actions_override,
            video_latents=torch.zeros(1),
            observed_latents=torch.zeros(1),
            restart_reason="first tick" if len(inputs.frames) == 1 else None,
            start_frame=1,
        )


def make_policy(model: FakeModel, tokenizer: FakeTokenizer | None = None) -> Policy:
    """A policy over a real engine whose model computes nothing; `end` it."""
    preparation = Preparation(embodiment(), tokenizer or FakeTokenizer())
    robot: Any = RobotPolicy(model, preparation)  # type: ignore[arg-type]
    engine = start_engine(robot, EngineConfig(max_sessions=16, block_size=1), "cpu", torch.float32)
    return Policy(engine, preparation)


def end(policy: Policy) -> None:
    policy.close()
    policy.engine.shutdown()
