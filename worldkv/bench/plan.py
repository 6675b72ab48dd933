"""What fits on one GPU, and how many robots it serves in time: from sizes, and from rates that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.bench.released import RELEASED

if TYPE_CHECKING:
    from worldkv.models.dreamzero.config import DreamZeroConfig
    from worldkv.models.wan.sizes import EncoderSizes

_CONTROL_HZ = 15.0  # a DROID robot executes its chunk at this rate


@dataclass(frozen=True)
class Rate:
    """Measured on one NVIDIA H200 (docs/benchmarks.md): seconds of a whole tick, alone, and ticks a second at most."""

    tick_s: float
    ticks_per_s: float


# whole ticks: the DiT's chunk and the video encoder
RATES = {
    ("dreamzero-14b", "model"): Rate(1.58, 0.64),
    ("dreamzero-14b", "fp8"): Rate(1.10, 0.91),
    ("dreamzero-5b", "model"): Rate(0.073, 23.0),
    ("dreamzero-5b", "fp8"): Rate(0.074, 23.0),
}


@dataclass(frozen=True)
class Plan:
    """Bytes; `num_sessions` is how many fit beside the weights."""

    dit: int
    encoders: int
    shared: int
    session: int
    parked: int
    frame: int
    workspace: int  # kept to work in, as the engine does
    memory: int
    num_sessions: int


@dataclass(frozen=True)
class Sizes:
    """The model to plan for. `model`: its name if it was measured. `chunk_s`: how long a chunk of actions lasts."""

    title: str
    config: DreamZeroConfig
    dit: int  # bytes in bfloat16
    encoders: int
    model: str | None
    chunk_s: float


def sizes_of_model(model: str) -> Sizes:
    """Of a released model's true sizes."""
    from worldkv.models.dreamzero.true_size import TRUE_SIZES

    config = RELEASED[model]()
    dit, encoders = _num_bytes(config, TRUE_SIZES[config.dit.model_type])
    return Sizes(model, config, dit, encoders, model, 24 / _CONTROL_HZ)


def sizes_of_checkpoint(folder: Path, base: Sequence[Path], embodiment: str | None) -> Sizes:
    """Of a folder, from its headers. Raises CheckpointError."""
    from worldkv.models.dreamzero.checkpoint import Checkpoint, read_sizes
    from worldkv.robots.of_checkpoint import checkpoint_embodiment

    checkpoint = Checkpoint.open(folder, base)
    config, robot = checkpoint.config, checkpoint_embodiment(checkpoint, embodiment)
    dit, encoders = _num_bytes(config, read_sizes(checkpoint))
    known = (name for name, make in RELEASED.items() if make().dit == config.dit)
    chunk_s = robot.action_horizon / robot.fps
    return Sizes(folder.name, config, dit, encoders, next(known, None), chunk_s)


def _num_bytes(config: DreamZeroConfig, encoders: EncoderSizes) -> tuple[int, int]:
    """Of the DiT's weights and of the encoders', in bfloat16."""
    from worldkv.models.dreamzero.checkpoint import needed_shapes
    from worldkv.models.dreamzero.folder import DIT_PREFIX

    dit = rest = 0
    for name, shape in needed_shapes(config, encoders).items():
        if name.startswith(DIT_PREFIX):
            dit += 2 * math.prod(shape)
        else:
            rest += 2 * math.prod(shape)
    return dit, rest


def make_plan(
    sizes: Sizes, memory_gb: float, precision: str, cfg_scale: float | None, window_policy: str, block_size: int
) -> Plan:
    """In bfloat16. `parked` is what a session with a full window takes on the host."""
    from worldkv.load import WORKSPACE
    from worldkv.models.dreamzero.model import kv_spec

    config, dit = sizes.config, sizes.dit
    if cfg_scale is not None:
        config = replace(config, cfg_scale=cfg_scale)
    if precision == "fp8":
        dim, ffn = config.dit.dim, config.dit.ffn_dim
        dit -= config.dit.num_layers * (6 * dim * dim + 2 * dim * ffn)  # these products' weights take one byte
    spec = kv_spec(config, window_policy)  # type: ignore[arg-type]
    block = spec.bytes_per_block(block_size, 2)
    session, shared = spec.blocks_per_session(block_size) * block, spec.blocks_shared(block_size) * block
    frame = len(spec.branches) * spec.chunk_size * spec.bytes_per_token(2)
    conditioning = len(spec.branches) * sum(spec.conditioning.values()) * spec.bytes_per_token(2)
    parked = spec.window.max_chunks * frame + conditioning
    memory = round(memory_gb * 1e9)
    workspace = round(WORKSPACE * memory)
    free = memory - workspace - dit - sizes.encoders - shared
    return Plan(dit, sizes.encoders, shared, session, parked, frame, workspace, memory, max(0, free // session))
