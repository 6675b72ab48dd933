"""What fits on one GPU, and how many robots it serves in time: from sizes, and from rates that were measured.

Sessions are counted by the engine's own rule (`engine.room`). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.bench.released import RELEASED
from worldkv.engine.room import DRIVER_BYTES, WORKSPACE, Room, usable_on_gpu
from worldkv.models.dreamzero.folder import DIT_PREFIX
from worldkv.models.dreamzero.layout import TRUE_SIZES, needed_shapes
from worldkv.models.dreamzero.spec import kv_spec
from worldkv.models.dreamzero.survey import Survey, Surveyed, read_sizes

if TYPE_CHECKING:
    from worldkv.kv.spec import KVSpec
    from worldkv.kv.window import WindowPolicy
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
    """Bytes, but for the counts. `num_blocks`: of the cache, all that the weights leave; `num_sessions` have room in
    it at once. `charge`: what a session is promised when it opens, a fork as well."""

    dit: int
    encoders: int
    shared: int
    charge: int
    fork: int  # what its first write copies, a block a branch at most; until then it takes nothing
    parked: int
    frame: int
    driver: int
    workspace: int  # kept to work in, as the engine does
    memory: int
    num_blocks: int
    num_sessions: int

    @property
    def missing(self) -> int:
        """Bytes that one session lacks; 0 where one fits."""
        needed = self.dit + self.encoders + self.driver + self.workspace + self.shared + self.charge
        return max(0, needed - self.memory)


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
    config = RELEASED[model]()
    dit, encoders = _num_bytes(config, TRUE_SIZES[config.dit.model_type])
    return Sizes(model, config, dit, encoders, model, 24 / _CONTROL_HZ)


def sizes_of_checkpoint(folder: Path, base: Sequence[Path], embodiment: str | None) -> Sizes:
    """Of a folder, from its headers. Raises CheckpointError."""
    from worldkv.robots.of_checkpoint import checkpoint_embodiment

    survey = Survey.open(folder, base)
    robot = checkpoint_embodiment(survey, embodiment)
    return replace(sizes_of(survey, folder.name), chunk_s=robot.action_horizon / robot.fps)


def sizes_of(survey: Surveyed, title: str = "") -> Sizes:
    """Of a folder whose headers were read, whatever robot it is for."""
    dit, encoders = _num_bytes(survey.config, read_sizes(survey))
    known = (name for name, make in RELEASED.items() if make().dit == survey.config.dit)
    return Sizes(title, survey.config, dit, encoders, next(known, None), survey.config.action_horizon / _CONTROL_HZ)


def _num_bytes(config: DreamZeroConfig, encoders: EncoderSizes) -> tuple[int, int]:
    """Of the DiT's weights and of the encoders', in bfloat16."""
    dit = rest = 0
    for name, shape in needed_shapes(config, encoders).items():
        if name.startswith(DIT_PREFIX):
            dit += 2 * math.prod(shape)
        else:
            rest += 2 * math.prod(shape)
    return dit, rest


def dit_bytes(sizes: Sizes, precision: str, itemsize: int = 2) -> int:
    """Of the DiT's weights, where the rest takes `itemsize` bytes a number."""
    dit = sizes.dit // 2 * itemsize
    if precision == "fp8":
        dim, ffn = sizes.config.dit.dim, sizes.config.dit.ffn_dim
        products = sizes.config.dit.num_layers * (6 * dim * dim + 2 * dim * ffn)
        dit -= (itemsize - 1) * products  # these products' weights take one byte
    return dit


def spec_of(sizes: Sizes, cfg_scale: float | None, window_policy: WindowPolicy = "reset") -> KVSpec:
    config = sizes.config if cfg_scale is None else replace(sizes.config, cfg_scale=cfg_scale)
    return kv_spec(config, window_policy)


def make_plan(
    sizes: Sizes,
    memory_gb: float,
    precision: str,
    cfg_scale: float | None,
    window_policy: WindowPolicy,
    block_size: int,
) -> Plan:
    """In bfloat16. `parked` is what a session with a full window takes on the host. Raises ValueError."""
    if not 0 < memory_gb < math.inf:
        raise ValueError(f"memory: expected more than 0 GB, got {memory_gb}")
    spec = spec_of(sizes, cfg_scale, window_policy)
    room = Room.of(spec, block_size, 2)
    dit, memory = dit_bytes(sizes, precision), round(memory_gb * 1e9)
    frame = len(spec.branches) * spec.chunk_size * spec.bytes_per_token(2)
    conditioning = len(spec.branches) * sum(spec.conditioning.values()) * spec.bytes_per_token(2)
    usable = usable_on_gpu(memory - DRIVER_BYTES - dit - sizes.encoders, memory)
    return Plan(
        dit=dit,
        encoders=sizes.encoders,
        shared=room.bytes_shared,
        charge=room.bytes_per_session,
        fork=len(spec.branches) * room.bytes_per_block,
        parked=spec.window.max_chunks * frame + conditioning,
        frame=frame,
        driver=DRIVER_BYTES,
        workspace=round(WORKSPACE * memory),
        memory=memory,
        num_blocks=room.blocks_in(usable),
        num_sessions=room.sessions_in(usable),
    )


def weights_and_room(
    sizes: Sizes, precision: str, cfg_scale: float | None, block_size: int, itemsize: int
) -> tuple[int, Room]:
    """Bytes of weights, and what a session takes, where numbers take `itemsize` bytes."""
    weights = dit_bytes(sizes, precision, itemsize) + sizes.encoders // 2 * itemsize
    return weights, Room.of(spec_of(sizes, cfg_scale), block_size, itemsize)
