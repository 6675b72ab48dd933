"""`worldkv plan`: how many robots one GPU serves. Needs no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from worldkv.bench.plan import RATES, Plan, Sizes, make_plan, sizes_of_checkpoint, sizes_of_model
from worldkv.bench.released import RELEASED
from worldkv.cli.common import OK, add_block_size, add_robot_and_base
from worldkv.show.terminal import size_text

MORE = (
    "Sizes are those of the released models, or a folder's; times were measured on one H200\n"
    "(docs/benchmarks.md). Needs no GPU."
)
EXAMPLE = "worldkv plan --model dreamzero-14b --memory 141 --precision fp8 --output plan.png"


def add_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", choices=tuple(RELEASED), default="dreamzero-14b")
    what.add_argument("--checkpoint", type=Path, metavar="DIR", help="plan for this folder, from its headers")
    parser.add_argument("--memory", type=float, default=141.0, metavar="GB", help="of the GPU (141, an H200)")
    parser.add_argument("--precision", choices=("model", "fp8"), default="model", help="of the DiT's products (model)")
    parser.add_argument("--cfg-scale", type=float, metavar="G", help="guidance (5); 1 turns it off")
    parser.add_argument("--window-policy", choices=("reset", "slide"), default="reset", help="(reset)")
    add_block_size(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="draw the memory as a picture (png, svg)")
    add_robot_and_base(parser)


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
    rate, chunk_s = RATES[sizes.model, arguments.precision], sizes.chunk_s
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
