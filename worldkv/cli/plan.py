"""`worldkv plan`: how many robots one GPU serves. Needs no GPU, and no torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from worldkv.bench.plan import RATES, Plan, Sizes, make_plan, sizes_of_checkpoint, sizes_of_model, sizes_of_video
from worldkv.bench.released import RELEASED, VIDEO_MODELS
from worldkv.cli.common import add_block_size, add_checkpoint, add_robot_and_base
from worldkv.cli.errors import OK, UsageError
from worldkv.cli.numbers import gigabytes, real
from worldkv.cli.places import PICTURES, add_output
from worldkv.cli.preflight import check_robot_and_base, require_packages
from worldkv.cli.ranks import add_mesh, mesh_of
from worldkv.cli.video import add_video_options, command_family, expect_options_of, video_choices
from worldkv.engine.room import WORKSPACE
from worldkv.models.causal_wan.folder import Survey
from worldkv.models.wan.shard import ALONE
from worldkv.show.terminal import size_text
from worldkv.words import count

MORE = (
    "Sizes are those of the released models, or a folder's; times were measured on one H200\n"
    "(docs/benchmarks.md). `serve` makes as many sessions as are told here. Needs no GPU."
)
EXAMPLE = "worldkv plan --model dreamzero-14b --memory 141 --precision fp8 -o plan.png"
_DEFAULT = "dreamzero-14b"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, needed=False, what="plan for this checkpoint folder, from its headers")
    parser.add_argument("--model", choices=(*RELEASED, *VIDEO_MODELS), help=f"plan for a released one ({_DEFAULT})")
    parser.add_argument("--memory", type=gigabytes, default=141.0, metavar="GB", help="of the GPU (141, an H200)")
    parser.add_argument("--precision", choices=("model", "fp8"), default="model", help="of the DiT's products (model)")
    parser.add_argument("--cfg-scale", type=real(), metavar="G", help="guidance (5); 1 turns it off")
    parser.add_argument("--window-policy", choices=("reset", "slide"), default="reset", help="(reset)")
    add_block_size(parser)
    add_output(parser, "file", "a picture of the memory", endings=PICTURES)
    add_mesh(parser)
    add_robot_and_base(parser)
    add_video_options(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.checkpoint is not None and arguments.model is not None:
        raise UsageError("--model: a checkpoint folder says its sizes itself; give one of the two")
    if arguments.output is not None:
        require_packages("plots", "matplotlib", option="--output")
    check_robot_and_base(arguments)
    for option, given in (("--base", arguments.base), ("--embodiment", arguments.embodiment)):
        if arguments.checkpoint is None and given:
            raise UsageError(f"{option}: is for a checkpoint folder; give one, or leave it out")
    sizes = _sizes(arguments)
    if sizes.is_video and arguments.window_policy != "reset":
        raise UsageError("--window-policy: is for robots' models; a video's window is --window-frames, --sink-frames")
    plan = _plan(arguments, sizes)
    rows = {
        "world model (DiT)": plan.dit,
        "encoders": plan.encoders,
        "CUDA's own": plan.driver,
        "kept to work in": plan.workspace,
        "stored once for all": plan.shared,
        "a session's charge, its most": plan.charge,
        **({"its decoder's state, kept twice": plan.state} if plan.state else {}),
        "a fork's charge, likewise": plan.charge,
        "a fork's price, at its 1st write": plan.fork,
        "a frame of history": plan.frame,
        "a parked session, on the host": plan.parked,
    }
    print(f"{sizes.title}, {arguments.precision} products, bfloat16, {_where(arguments)}\n")
    for name, num_bytes in rows.items():
        print(f"  {name:<33} {size_text(num_bytes):>12}")
    print(f"\n  {'blocks of the cache':<33} {plan.num_blocks:>12}")
    print(f"  {'sessions that fit':<33} {plan.num_sessions:>12}")
    if plan.missing:
        print(f"  not one fits, {size_text(plan.missing)} are missing: {_way_out(arguments, sizes, plan)}")
    _print_rate(arguments, sizes, plan)
    if arguments.output is not None:
        plot_plan(arguments.output, sizes.title, plan)
        print(f"\npicture in {arguments.output}")
    return OK


def _where(arguments: argparse.Namespace) -> str:
    gpu, mesh = f"a GPU of {arguments.memory:g} GB", mesh_of(arguments)
    if mesh == ALONE:
        return gpu
    return (
        f"each of {count(mesh.num_ranks, 'rank')} on {gpu}\n({mesh}; rank 0, told here, has the encoders, the others "
        "all but those; parked: of all ranks)"
    )


def _sizes(arguments: argparse.Namespace) -> Sizes:
    if arguments.checkpoint is None:
        model = arguments.model or _DEFAULT
        expect_options_of("causal_wan" if model in VIDEO_MODELS else "dreamzero", arguments)
        return sizes_of_model(model, video_choices(arguments))
    family = command_family(arguments.checkpoint, ("dreamzero", "causal_wan"))
    expect_options_of(family, arguments)
    if family == "dreamzero":
        return sizes_of_checkpoint(arguments.checkpoint, arguments.base, arguments.embodiment)
    return sizes_of_video(Survey.open(arguments.checkpoint, video_choices(arguments)))


def _way_out(arguments: argparse.Namespace, sizes: Sizes, plan: Plan) -> str:
    """Options that do make room, one alone where one is enough, and the GPU that would."""
    fp8 = ("--precision fp8", {"precision": "fp8"})
    unguided = ("--cfg-scale 1 (half the cache)", {"cfg_scale": 1.0})
    enough = [[way] for way in (fp8, unguided) if _fits(arguments, sizes, way[1])]
    if not enough and _fits(arguments, sizes, {**fp8[1], **unguided[1]}):
        enough = [[fp8, unguided]]
    ways = [" with ".join(name for name, _ in way) for way in enough]
    larger = (plan.memory - plan.workspace + plan.missing) / (1 - WORKSPACE) / 1e9
    return "try " + ", or ".join([*ways, f"a GPU of {math.ceil(larger)} GB"])


def _fits(arguments: argparse.Namespace, sizes: Sizes, changed: Mapping[str, object]) -> bool:
    return _plan(argparse.Namespace(**{**vars(arguments), **changed}), sizes).num_sessions > 0


def _plan(arguments: argparse.Namespace, sizes: Sizes) -> Plan:
    return make_plan(
        sizes,
        arguments.memory,
        arguments.precision,
        arguments.cfg_scale,
        arguments.window_policy,
        arguments.block_size,
        mesh_of(arguments),
    )


def _print_rate(arguments: argparse.Namespace, sizes: Sizes, plan: Plan) -> None:
    if sizes.model is None:
        advice = "`worldkv bench` measures it" if sizes.is_video else "run `worldkv doctor` against a server"
        print(f"  {'a block' if sizes.is_video else 'a tick':<33} not measured for these sizes: {advice}")
        if sizes.is_video:
            print(f"  {'a block lasts':<33} {sizes.chunk_s:>10.2f} s")
        return
    if mesh_of(arguments) != ALONE:
        print(f"  {'a tick':<33} not measured on several ranks")
        return
    rate, chunk_s = RATES[sizes.model, arguments.precision], sizes.chunk_s
    speedup = 2.0 if arguments.cfg_scale == 1 else 1.0
    print(f"  {'a tick, alone':<33} {rate.tick_s / speedup:>10.2f} s  on one H200, measured")
    if speedup != 1:
        print(f"  {'':<46}  (half of what was measured with guidance: an estimate)")
    in_time = int(rate.ticks_per_s * speedup * chunk_s)
    robots = in_time if plan.num_sessions else 0
    print(f"  {'robots in time':<33} {robots:>12}  whose chunk of actions lasts {chunk_s:g} s")
    if not plan.num_sessions:
        print("  no session fits, so no robot is served")
    elif in_time > plan.num_sessions:
        sessions = count(plan.num_sessions, "session")
        print(f"  memory is the limit: {sessions} at once, more by taking turns (parked in between)")


def plot_plan(path: Path, model: str, plan: Plan) -> None:
    """The GPU's memory as one bar."""
    from matplotlib.figure import Figure

    parts = {
        "DiT": (plan.dit, "#2563a8"),
        "encoders": (plan.encoders, "#79aede"),
        "to work in, and CUDA's own": (plan.workspace + plan.driver, "#c3cad2"),
        "shared": (plan.shared, "#e8833a"),
        count(plan.num_sessions, "session"): (plan.num_sessions * (plan.charge + plan.state), "#2f9e75"),
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
