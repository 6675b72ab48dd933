"""Tiny engines for tests: a random checkpoint, made once a run, and inputs that differ by seed."""

from __future__ import annotations

import functools
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from worldkv.engine.engine import Engine, EngineConfig, SessionHandle
from worldkv.engine.messages import Inspect
from worldkv.engine.session import Session
from worldkv.load import load_engine
from worldkv.models.dreamzero.random import write_random_checkpoint
from worldkv.models.world_action import TickInputs

VIEWS = {"i2v": (16, 24), "ti2v": (16, 48)}  # pixels of a view: 6 and 3 tokens a frame


@functools.cache
def random_checkpoint(kind: str = "ti2v") -> Path:
    folder = Path(tempfile.mkdtemp(prefix="worldkv-test-")) / kind
    height, width = VIEWS[kind]
    return write_random_checkpoint(folder, kind=kind, view_height=height, view_width=width)


def make_engine(kind: str = "ti2v", **options: Any) -> Engine:
    """An engine over random weights; `options` of EngineConfig and load_engine."""
    fields = set(EngineConfig.__dataclass_fields__)
    few = {"max_sessions": 4}  # by itself an engine on a GPU would take all of it
    config = EngineConfig(**few | {name: value for name, value in options.items() if name in fields})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the byte-level tokenizer is what these checkpoints have
        return load_engine(
            random_checkpoint(kind), config, **{name: v for name, v in options.items() if name not in fields}
        )


def make_inputs(engine: Engine, seed: int, num_frames: int = 4, prompt: int = 0, **more: Any) -> TickInputs:
    """Inputs of one tick; the same arguments give the same inputs."""
    dit = engine.model.config.dit
    rng = np.random.default_rng(seed)
    height, width = (2 * size for size in VIEWS[dit.model_type])
    token_ids = np.zeros((1, dit.text_len), dtype=np.int64)
    token_ids[0, :4] = [5 + prompt, 7, 9, 1]
    mask = (token_ids != 0).astype(np.int64)
    return TickInputs(
        rng.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8),
        rng.uniform(-1, 1, (dit.num_states, dit.max_state_dim)),
        token_ids,
        mask,
        **more,
    )


def droid_observation(
    rng: np.random.Generator, num_frames: int, prompt: str = "stack the cups", size: tuple[int, int] = (180, 320)
) -> dict[str, Any]:
    """What a DROID robot sends: noise from three cameras, some state."""
    frames = rng.integers(0, 256, (3, num_frames, *size, 3), dtype=np.uint8)
    return {
        "observation/exterior_image_0_left": frames[0],
        "observation/exterior_image_1_left": frames[1],
        "observation/wrist_image_left": frames[2],
        "observation/joint_position": rng.uniform(-0.5, 0.5, 7),
        "observation/gripper_position": rng.uniform(0, 1, 1),
        "prompt": prompt,
    }


def inside(engine: Engine[Any, Any, Any], handle: SessionHandle) -> Session:
    """The core's own session. Look at it while the engine rests."""
    return engine.inspect(lambda core: core.sessions[handle])


def pause(engine: Engine[Any, Any, Any]) -> threading.Event:
    """Hold the engine's thread until the event is set; all that is asked for meanwhile is taken in one turn after it.

    The thread holds when this returns: else it could take the first of two messages with this one, and the second a
    turn later.
    """
    go_on, held = threading.Event(), threading.Event()

    def hold(core: Any) -> None:
        held.set()
        go_on.wait(10)

    engine.ask(Inspect(hold))
    assert held.wait(10)
    return go_on


def rest(engine: Engine[Any, Any, Any]) -> None:
    """Everything asked for so far has been done."""
    engine.inspect(lambda core: None)
