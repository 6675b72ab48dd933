"""What fits on one GPU, and how many robots it serves in time: from sizes, and from rates that were measured.

Sessions are counted by the engine's own rule (`engine.room`). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.bench.released import RELEASED, VIDEO_ENCODERS, VIDEO_MODELS
from worldkv.engine.room import DRIVER_BYTES, WORKSPACE, Room, usable_on_gpu
from worldkv.models.causal_wan import folder as video
from worldkv.models.causal_wan.config import CausalWanConfig
from worldkv.models.causal_wan.config import kv_spec as video_spec
from worldkv.models.causal_wan.room import COPIES, state_bytes
from worldkv.models.dreamzero.folder import DIT_PREFIX
from worldkv.models.dreamzero.layout import TRUE_SIZES, needed_shapes
from worldkv.models.dreamzero.spec import check_guidance, kv_spec
from worldkv.models.dreamzero.survey import Survey, Surveyed, read_sizes
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE, WanConfig
from worldkv.models.wan.layout import decoder_state_size
from worldkv.models.wan.shard import ALONE, Mesh, check_parts, split_shapes

if TYPE_CHECKING:
    from worldkv.kv.spec import KVSpec
    from worldkv.kv.window import WindowPolicy
    from worldkv.models.dreamzero.config import DreamZeroConfig
    from worldkv.models.wan.sizes import EncoderSizes

_CONTROL_HZ = 15.0  # a DROID robot executes its chunk at this rate
_VIDEO_HZ = 16.0  # of Wan's video


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
    state: int  # of a session beside its K/V
    num_blocks: int
    num_sessions: int

    @property
    def missing(self) -> int:
        """Bytes that one session lacks; 0 where one fits."""
        needed = self.dit + self.encoders + self.driver + self.workspace + self.shared + self.charge + self.state
        return max(0, needed - self.memory)


@dataclass(frozen=True)
class Sizes:
    """The model to plan for. `model`: its name if it was measured. `chunk_s`: how long a chunk of actions lasts, or a
    block of video. `spec_of`: what a session keeps, by guidance and window policy where the family has a choice."""

    title: str
    dit: int  # bytes in bfloat16
    encoders: int
    products: int  # weights that take one byte each with float8 products
    split: int  # bytes of the DiT, in bfloat16, that tensor-parallel ranks divide among them
    spec_of: Callable[[float | None, WindowPolicy, Mesh], KVSpec]
    model: str | None
    chunk_s: float
    state_bytes: int = 0  # of one copy of what a session keeps beside its K/V, in bfloat16
    is_video: bool = False


def sizes_of_model(model: str, choices: video.Choices | None = None) -> Sizes:
    """Of a released model's true sizes. `choices`: of video. Raises CheckpointError."""
    if model in VIDEO_MODELS:
        config = video.chosen(VIDEO_MODELS[model](), choices or video.Choices())
        return _sizes_of_video(config, VIDEO_ENCODERS, model)
    robots = RELEASED[model]()
    return _sizes_of_robots(robots, TRUE_SIZES[robots.dit.model_type], model, model, 24 / _CONTROL_HZ)


def sizes_of_checkpoint(folder: Path, base: Sequence[Path], embodiment: str | None) -> Sizes:
    """Of a DreamZero folder, from its headers. Raises CheckpointError."""
    from worldkv.robots.of_checkpoint import checkpoint_embodiment

    survey = Survey.open(folder, base)
    robot = checkpoint_embodiment(survey, embodiment)
    return replace(sizes_of(survey, folder.name), chunk_s=robot.action_horizon / robot.fps)


def sizes_of(survey: Surveyed, title: str = "") -> Sizes:
    """Of a DreamZero folder whose headers were read, whatever robot it is for."""
    known = (name for name, make in RELEASED.items() if make().dit == survey.config.dit)
    chunk_s = survey.config.action_horizon / _CONTROL_HZ
    return _sizes_of_robots(survey.config, read_sizes(survey), title, next(known, None), chunk_s)


def sizes_of_video(survey: video.Survey) -> Sizes:
    """Of a causal Wan folder whose headers were read. Raises CheckpointError."""
    return _sizes_of_video(survey.config, video.read_sizes(survey), survey.folder.name)


def _sizes_of_robots(
    config: DreamZeroConfig, encoders: EncoderSizes, title: str, model: str | None, chunk_s: float
) -> Sizes:
    def spec_of(cfg_scale: float | None, window_policy: WindowPolicy, mesh: Mesh) -> KVSpec:
        chosen = config if cfg_scale is None else replace(config, cfg_scale=cfg_scale)
        check_guidance(chosen, mesh)
        check_parts(config.dit, mesh.tensor)
        return kv_spec(chosen, window_policy, mesh)

    shapes = needed_shapes(config, encoders)
    dit, rest = _num_bytes(shapes, DIT_PREFIX)
    split = _num_split(shapes, DIT_PREFIX)
    return Sizes(title, dit, rest, _num_products(config.dit), split, spec_of, model, chunk_s)


def _sizes_of_video(config: CausalWanConfig, encoders: EncoderSizes, title: str) -> Sizes:
    def spec_of(cfg_scale: float | None, window_policy: WindowPolicy, mesh: Mesh) -> KVSpec:
        video.check_mesh(config, mesh)
        return video_spec(config, mesh=mesh)

    shapes, frames = video.needed_shapes(config, encoders), config.blocks.frames_per_block
    dit, rest = _num_bytes(shapes, video.PREFIXES.dit)
    return Sizes(
        title,
        dit,
        rest,
        _num_products(config.dit),
        _num_split(shapes, video.PREFIXES.dit),
        spec_of,
        None,
        frames * VAE_TEMPORAL_STRIDE / _VIDEO_HZ,
        state_bytes=state_bytes(config, decoder_state_size(encoders.vae, *config.latent_size), 2),
        is_video=True,
    )


def _num_bytes(shapes: Mapping[str, tuple[int, ...]], dit_prefix: str) -> tuple[int, int]:
    """Of the DiT's weights and of the encoders', in bfloat16."""
    sizes = {name: 2 * math.prod(shape) for name, shape in shapes.items()}
    dit = sum(size for name, size in sizes.items() if name.startswith(dit_prefix))
    return dit, sum(sizes.values()) - dit


def _num_split(shapes: Mapping[str, tuple[int, ...]], dit_prefix: str) -> int:
    """Bytes, in bfloat16, of what shards have a part of."""
    halves = split_shapes(shapes, 2, dit_prefix)
    return sum(2 * math.prod(shape) for name, shape in shapes.items() if halves[name] != shape)


def _num_products(dit: WanConfig) -> int:
    return dit.num_layers * (6 * dit.dim * dit.dim + 2 * dit.dim * dit.ffn_dim)


def dit_bytes(sizes: Sizes, precision: str, itemsize: int = 2, num_shards: int = 1) -> int:
    """Of a rank's DiT weights, where the rest takes `itemsize` bytes a number."""
    dit = (sizes.dit - sizes.split + sizes.split // num_shards) // 2 * itemsize
    return dit - (itemsize - 1) * sizes.products // num_shards if precision == "fp8" else dit


def make_plan(
    sizes: Sizes,
    memory_gb: float,
    precision: str,
    cfg_scale: float | None,
    window_policy: WindowPolicy,
    block_size: int,
    mesh: Mesh = ALONE,
) -> Plan:
    """Of a GPU, or of the first of `mesh`, which has the encoders beside its part. In bfloat16.

    `parked` is what a session with a full window takes on the hosts
    of all ranks. Raises ValueError.
    """
    if not 0 < memory_gb < math.inf:
        raise ValueError(f"memory: expected more than 0 GB, got {memory_gb}")
    spec = sizes.spec_of(cfg_scale, window_policy, mesh)
    state = COPIES * sizes.state_bytes
    room = Room.of(spec, block_size, 2, state)
    dit, memory = dit_bytes(sizes, precision, num_shards=mesh.tensor), round(memory_gb * 1e9)
    frame = len(spec.branches) * spec.chunk_size * spec.bytes_per_token(2)
    conditioning = len(spec.branches) * sum(spec.conditioning.values()) * spec.bytes_per_token(2)
    usable = usable_on_gpu(memory - DRIVER_BYTES - dit - sizes.encoders, memory)
    return Plan(
        dit=dit,
        encoders=sizes.encoders,
        shared=room.bytes_shared,
        charge=room.bytes_per_session - state,
        fork=len(spec.branches) * room.bytes_per_block,
        parked=(spec.window.max_chunks * frame + conditioning) * mesh.num_ranks + sizes.state_bytes,
        frame=frame,
        driver=DRIVER_BYTES,
        workspace=round(WORKSPACE * memory),
        memory=memory,
        state=state,
        num_blocks=room.blocks_in(usable),
        num_sessions=room.sessions_in(usable),
    )


def weights_and_room(
    sizes: Sizes, precision: str, cfg_scale: float | None, block_size: int, itemsize: int
) -> tuple[int, Room]:
    """Bytes of weights, and what a session takes, where numbers take `itemsize` bytes."""
    weights = dit_bytes(sizes, precision, itemsize) + sizes.encoders // 2 * itemsize
    return weights, Room.of(sizes.spec_of(cfg_scale, "reset", ALONE), block_size, itemsize)
