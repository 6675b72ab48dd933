"""`worldkv plan`: how many robots one GPU serves. From sizes and from rates that were measured; needs no GPU."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.cli.common import OK, size_text

if TYPE_CHECKING:
    from worldkv.models.dreamzero.config import DreamZeroConfig

_WORKSPACE = 0.08  # of the GPU's memory, kept to work in, as the engine does
_CONTROL_HZ = 15.0  # a DROID robot executes its chunk at this rate


@dataclass(frozen=True)
class Rate:
    """Measured on one NVIDIA H200 (docs/benchmarks.md): seconds of a whole tick, alone, and ticks a second at most."""

    tick_s: float
    ticks_per_s: float


# whole ticks: the DiT's chunk and the video encoder
_RATES = {
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
    memory: int
    num_sessions: int

    @property
    def workspace(self) -> int:
        return round(_WORKSPACE * self.memory)


@dataclass(frozen=True)
class Sizes:
    """What is planned for. `model`: a name that was measured, or None. `chunk_s`: how long a chunk of actions lasts."""

    title: str
    config: DreamZeroConfig
    dit: int  # bytes in bfloat16
    encoders: int
    model: str | None
    chunk_s: float


def sizes_of_model(model: str) -> Sizes:
    """Of a released model's true sizes."""
    from worldkv.bench.models import TRUE_SIZES as MODELS
    from worldkv.models.dreamzero.checkpoint import dit_tensor_shapes
    from worldkv.models.dreamzero.true_size import TRUE_SIZES

    config = MODELS[model]()
    encoders = _num_bytes(TRUE_SIZES[config.dit.model_type].tensor_shapes())
    return Sizes(model, config, _num_bytes(dit_tensor_shapes(config.dit)), encoders, model, 24 / _CONTROL_HZ)


def sizes_of_checkpoint(folder: Path, base: Sequence[Path], embodiment: str | None) -> Sizes:
    """Of a folder, from its headers. Raises CheckpointError."""
    from worldkv.bench.models import TRUE_SIZES as MODELS
    from worldkv.load import checkpoint_embodiment
    from worldkv.models.dreamzero.checkpoint import Checkpoint, dit_tensor_shapes
    from worldkv.models.wan.sizes import read_sizes

    checkpoint = Checkpoint.open(folder, base)
    config, robot = checkpoint.config, checkpoint_embodiment(checkpoint, embodiment)
    encoders = _num_bytes(read_sizes(checkpoint).tensor_shapes())
    known = (name for name, make in MODELS.items() if make().dit == config.dit)
    chunk_s = robot.action_horizon / robot.fps
    return Sizes(folder.name, config, _num_bytes(dit_tensor_shapes(config.dit)), encoders, next(known, None), chunk_s)


def _num_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """In bfloat16."""
    return 2 * sum(math.prod(shape) for shape in shapes.values())


def make_plan(
    sizes: Sizes, memory_gb: float, precision: str, cfg_scale: float | None, window_policy: str, block_size: int
) -> Plan:
    """In bfloat16. `parked` is what a session with a full window takes on the host."""
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
    free = memory - round(_WORKSPACE * memory) - dit - sizes.encoders - shared
    return Plan(dit, sizes.encoders, shared, session, parked, frame, memory, max(0, free // session))


def run(arguments: argparse.Namespace) -> int:
    if arguments.checkpoint is not None:
        sizes = sizes_of_checkpoint(arguments.checkpoint, arguments.base, arguments.embodiment)
    else:
        sizes = sizes_of_model(arguments.model)
    plan = make_plan(
        sizes,
        arguments.memory,
        arguments.precision,
        arguments.cfg_scale,
        arguments.window_policy,
        arguments.block_size,
    )
    rows = {
        "world model (DiT)": plan.dit,
        "encoders": plan.encoders,
        "kept to work in": plan.workspace,
        "stored once for all": plan.shared,
        "a session, at most": plan.session,
        "a fork": plan.session,
        "a frame of history": plan.frame,
        "a parked session, on the host": plan.parked,
    }
    print(f"{sizes.title}, {arguments.precision} products, bfloat16, a GPU of {arguments.memory:g} GB\n")
    for name, num_bytes in rows.items():
        print(f"  {name:<30} {size_text(num_bytes):>12}")
    print(f"\n  sessions that fit              {plan.num_sessions:>12}")
    if not plan.num_sessions:
        print("  not one fits: try --precision fp8, --cfg-scale 1 (half the cache), or a GPU with more memory")
    _print_rate(arguments, sizes, plan)
    if arguments.output is not None:
        plot_plan(arguments.output, sizes.title, plan)
        print(f"\npicture in {arguments.output}")
    return OK


def _print_rate(arguments: argparse.Namespace, sizes: Sizes, plan: Plan) -> None:
    if sizes.model is None:
        print("  a tick                         not measured for these sizes: run `worldkv doctor` against a server")
        return
    rate, chunk_s = _RATES[sizes.model, arguments.precision], sizes.chunk_s
    speedup = 2.0 if arguments.cfg_scale == 1 else 1.0
    robots = int(rate.ticks_per_s * speedup * chunk_s)
    print(f"  a tick, alone                  {rate.tick_s / speedup:>10.2f} s  on one H200, measured")
    if speedup != 1:
        print("                                               (half of what was measured with guidance: an estimate)")
    print(f"  robots in time                 {robots:>12}  whose chunk of actions lasts {chunk_s:g} s")
    if robots > plan.num_sessions:
        print(f"  memory is the limit: {plan.num_sessions} at once, more by taking turns (parked in between)")


def plot_plan(path: Path, model: str, plan: Plan) -> None:
    """The GPU's memory as one bar."""
    from matplotlib.figure import Figure

    parts = {
        "DiT": (plan.dit, "#2563a8"),
        "encoders": (plan.encoders, "#79aede"),
        "to work in": (plan.workspace, "#c3cad2"),
        "shared": (plan.shared, "#e8833a"),
        f"{plan.num_sessions} sessions": (plan.num_sessions * plan.session, "#2f9e75"),
    }
    used = sum(size for size, _ in parts.values())
    parts["left"] = (max(0, plan.memory - used), "#f3f5f8")
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.subplots()
    start = 0.0
    for name, (size, colour) in parts.items():
        axes.barh([0], [size / 1e9], left=start, color=colour, label=f"{name}, {size / 1e9:.1f} GB")
        start += size / 1e9
    axes.set_title(f"{model} on a GPU of {plan.memory / 1e9:g} GB", loc="left", fontsize=11)
    axes.set_xlabel("GB")
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(ncols=3, frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    figure.savefig(path, dpi=150)
