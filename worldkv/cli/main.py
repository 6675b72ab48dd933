"""`worldkv`: one command line, a module per command. Parses; imports a command's module only when it runs."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from worldkv import __version__
from worldkv.cli.common import BAD_INPUT, EXIT_CODES, FAILED
from worldkv.errors import WorldKVError

# argparse has no public name for what add_subparsers returns
Commands = argparse._SubParsersAction


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="worldkv",
        description="A paged KV cache with sessions, an engine and a server for autoregressive diffusion world models.",
        epilog="start with: worldkv demo      more about a command: worldkv COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"worldkv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    robots = (_add_serve, _add_demo, _add_replay, _add_doctor, _add_top, _add_film)
    folders = (_add_inspect, _add_verify, _add_convert, _add_embodiments)
    for add in (*robots, *folders, _add_plan, _add_bench):
        add(commands)
    return parser


def _command(
    commands: Commands[argparse.ArgumentParser], name: str, what: str, more: str, example: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=what,
        description=f"{what}\n\n{more}",
        epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("-v", "--verbose", action="store_true", help="log everything, and show tracebacks of errors")
    return command


def _add_engine_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("engine")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto: the GPU if there is one (auto)")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of weights and cache; auto: bfloat16 on a GPU, float32 on a CPU (auto)",
    )
    _add_cache_options(group)
    group.add_argument(
        "--precision", choices=("model", "fp8"), default="model", help="of the DiT's products, on a GPU (model)"
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="a session's answers do not depend on who shares its batches, bit for bit; slower",
    )
    _add_robot_and_base(group)
    group.add_argument(
        "--steps",
        default="8",
        choices=("5", "6", "7", "8", "all", "dynamic"),
        help="solver steps that run the network; others reuse the last velocity (8, as the reference does)",
    )
    group.add_argument(
        "--cfg-scale", type=float, metavar="G", help="guidance (5); 1 turns it off: half the work and half the cache"
    )


def _add_server_address(command: argparse.ArgumentParser, default: str | None = "ws://127.0.0.1:8000") -> None:
    command.add_argument("--url", default=default, metavar="URL", help=f"of the server ({default or 'none'})")
    command.add_argument(
        "--api-key", default=os.environ.get("WORLDKV_API_KEY") or None, metavar="KEY", help="(WORLDKV_API_KEY)"
    )


def _add_robot_and_base(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--embodiment",
        metavar="NAME",
        help="the robot: a packaged one (see `worldkv embodiments`) or a yaml file of your own (the checkpoint's)",
    )
    group.add_argument(
        "--base",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="base Wan folder, for what a LoRA run leaves out; of several the first that has a part brings it",
    )


def _add_cache_options(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--attention", default="auto", metavar="NAME", help="auto, reference, or cudnn on an NVIDIA GPU (auto)"
    )
    group.add_argument("--block-size", type=int, default=128, help="KV slots per block, a power of two (128)")


def _add_serve(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "serve",
        "Serve a checkpoint to robots over websockets.",
        "One port speaks the openpi and the RoboArena dialect. GET /healthz answers 200 once the model is warm, GET\n"
        "/metrics speaks Prometheus. Ctrl-C or SIGTERM lets the ticks in flight end; a second one does not wait.",
        "worldkv serve --checkpoint DreamZero-DROID --port 8000",
    )
    command.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="DreamZero checkpoint folder")
    command.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; beyond loopback --api-key is needed"
    )
    command.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (8000)")
    command.add_argument(
        "--api-key",
        default=os.environ.get("WORLDKV_API_KEY") or None,
        metavar="KEY",
        help="what robots must send; better in the environment, as WORLDKV_API_KEY",
    )
    command.add_argument(
        "--max-sessions",
        type=_session_count,
        default=4,
        metavar="N",
        help="sessions that the cache has room for, or auto: all that the GPU has; more are parked while idle (4)",
    )
    command.add_argument(
        "--episode-gap", type=float, metavar="S", help="a pause of more seconds begins a new episode (never)"
    )
    command.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="json: one line an event (text)"
    )
    command.add_argument("--otlp", metavar="URL", help="OpenTelemetry collector for traces of ticks (none)")
    command.add_argument(
        "--record", type=Path, metavar="DIR", help="write every session there; see `worldkv replay --recording`"
    )
    command.add_argument(
        "--record-limit-gb", type=float, default=100.0, metavar="GB", help="record no more than that (100)"
    )
    _add_engine_options(command)


def _session_count(text: str) -> int | None:
    """A number, or None for as many as fit."""
    return None if text == "auto" else int(text)


def _add_demo(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "demo",
        "See it work: a server, a robot with three cameras, actions, video and plots.",
        "Writes a tiny checkpoint of random weights, serves it in a second process and drives it over a real\n"
        "websocket with a drawn arm that follows the actions. The weights have learned nothing, so neither do the\n"
        "motions mean anything: it shows the machinery. Prints the address of its console; in a terminal it\n"
        "stays until it is stopped. Needs no GPU and no download.",
        "worldkv demo --ticks 12 --output demo-output",
    )
    command.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="(demo-output)")
    command.add_argument("--ticks", type=int, default=12, metavar="N", help="requests to make (12)")
    command.add_argument("--once", action="store_true", help="stop after them (what scripts get)")
    command.add_argument("--stay", action="store_true", help="go on until Ctrl-C (what a terminal gets)")


def _add_replay(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "replay",
        "Run a recorded session, or a three-camera clip, through a checkpoint.",
        "A recording is what `worldkv serve --record` wrote of a session: its ticks are run again and compared with\n"
        "what was answered; any difference above --tolerance makes the exit code 1.\n"
        "A clip is a folder with exterior_image_1_left.mp4, exterior_image_2_left.mp4 and wrist_image_left.mp4, at 15\n"
        "frames a second. The first request sends frame 0, request k the frames a-23, a-16, a-8 and a, with\n"
        "a = 23 + 24 (k - 1); joints and gripper are zero; with --url a server gets them, over its socket.\n"
        "Out come actions (npz, csv), predicted video, plots.",
        "worldkv replay --checkpoint DreamZero-DROID --clip droid_clip --output replay-output",
    )
    command.add_argument("--checkpoint", type=Path, metavar="DIR", help="DreamZero checkpoint folder")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--clip", type=Path, metavar="DIR", help="folder with the three camera files")
    source.add_argument("--recording", type=Path, metavar="DIR", help="folder of a recorded session")
    _add_server_address(command, default=None)
    command.add_argument(
        "--tolerance", type=float, default=0.0, help="largest relative difference from the recording (0: bit for bit)"
    )
    command.add_argument(
        "--lerobot", type=Path, metavar="DIR", help="write the recording as a LeRobot dataset as well (needs pyarrow)"
    )
    command.add_argument("--output", type=Path, default=Path("replay-output"), metavar="DIR", help="(replay-output)")
    command.add_argument("--prompt", metavar="TEXT", help="instruction (that of the public DROID test clip)")
    command.add_argument("--max-calls", type=int, metavar="N", help="stop after N requests (all)")
    _add_engine_options(command)


def _add_verify(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "verify",
        "Compare the paged engine with recorded outputs of the reference implementation.",
        "Runs the calls of golden.safetensors and calls.json in float32 and prints, per recorded quantity,\n"
        "||ours - recorded|| / ||recorded||; the last line is the largest. A recorded quantity that is not computed\n"
        "counts as infinitely wrong. Also checks policy.safetensors, where there is one: pixels must be equal,\n"
        "numbers to 1e-6.",
        "worldkv verify golden/tiny_i2v --tolerance 1e-4 --block-size 16 64 128 --interleave 2",
    )
    command.usage = "worldkv verify DIR [options]"  # DIR first: after --block-size it would be taken for a size
    command.add_argument("folder", type=Path, metavar="DIR", help="checkpoint with golden.safetensors and calls.json")
    command.add_argument("--tolerance", type=float, default=1e-3, help="largest relative error allowed (1e-3)")
    command.add_argument(
        "--attention", default="auto", metavar="NAME", help="auto, reference, or cudnn on an NVIDIA GPU (auto)"
    )
    command.add_argument(
        "--block-size",
        type=int,
        nargs="+",
        default=[128],
        metavar="N",
        help="KV slots per block, powers of two: the calls run once with each (128)",
    )
    command.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto (cpu)")
    command.add_argument(
        "--interleave",
        type=int,
        default=0,
        metavar="N",
        help="run N other sessions' ticks beside the calls and between them (0)",
    )


def _add_inspect(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "inspect",
        "Say what a checkpoint folder holds and needs, without reading its weights.",
        "Sizes by part, window, bytes of K/V per frame and per session, embodiments, tokenizer, and everything that\n"
        "is missing or contradicts itself; any of the last makes the exit code 1.",
        "worldkv inspect DreamZero-DROID",
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="DreamZero checkpoint folder")
    command.add_argument("--block-size", type=int, default=128, help="KV slots per block, a power of two (128)")
    _add_robot_and_base(command)


def _add_convert(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "convert",
        "Write any checkpoint as one clean folder: bfloat16 shards and one readable worldkv.yaml.",
        "Takes every published form: one file or shards, full fine-tunes, LoRA runs (merged), with or without their\n"
        "base, robots from conf.yaml or from --embodiment. Tokenizer and recordings come along. May be stopped and\n"
        "run again: whole shards are kept. Every tensor is read back and compared at the end.",
        "worldkv convert DreamZero-LoRA --base Wan2.1-I2V-14B-480P --output DreamZero-mine",
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="DreamZero checkpoint folder")
    command.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(bfloat16)")
    command.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="size of a shard, at most (5)")
    _add_robot_and_base(command)


def _add_embodiments(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "embodiments",
        "List the robots that come with worldkv, show one's file, or check a file of your own.",
        "A file says how a robot's cameras, state and actions are named, ordered, scaled and tiled, and what the\n"
        "model is told about them. docs/embodiments.md describes it; copy one that is near to yours.",
        "worldkv embodiments oxe_droid > my_robot.yaml",
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="a packaged one to print, or a file to check")


def _add_plan(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "plan",
        "How many robots one GPU serves: memory by part, sessions that fit, time of a tick.",
        "Sizes are those of the released models, or a folder's; times were measured on one H200\n"
        "(docs/benchmarks.md). Needs no GPU.",
        "worldkv plan --model dreamzero-14b --memory 141 --precision fp8 --output plan.png",
    )
    what = command.add_mutually_exclusive_group()
    what.add_argument("--model", choices=("dreamzero-14b", "dreamzero-5b"), default="dreamzero-14b")
    what.add_argument("--checkpoint", type=Path, metavar="DIR", help="plan for this folder, from its headers")
    command.add_argument("--memory", type=float, default=141.0, metavar="GB", help="of the GPU (141, an H200)")
    command.add_argument("--precision", choices=("model", "fp8"), default="model", help="of the DiT's products (model)")
    command.add_argument("--cfg-scale", type=float, metavar="G", help="guidance (5); 1 turns it off")
    command.add_argument("--window-policy", choices=("reset", "slide"), default="reset", help="(reset)")
    command.add_argument("--block-size", type=int, default=128, help="KV slots per block, a power of two (128)")
    command.add_argument("--output", type=Path, metavar="FILE", help="draw the memory as a picture (png, svg)")
    _add_robot_and_base(command)


def _add_doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "doctor",
        "From a robot's side: reach a server, check what it expects and what you send, measure, report.",
        "Opens a session of its own, ticks it with noise (and once with your observation, if you give one) and\n"
        "deletes it. Warnings of the server are printed as it would log them; a picture shows each camera beside its\n"
        "place in the model's image, since swapped cameras can only be seen. Needs no torch.",
        "worldkv doctor --url ws://gpu-box:8000 --observation seen.npz",
    )
    _add_server_address(command)
    command.add_argument(
        "--observation", type=Path, metavar="FILE", help="npz with what your robot sends: images, state, prompt"
    )
    command.add_argument("--ticks", type=int, default=5, metavar="N", help="to measure with (5)")
    command.add_argument("--output", type=Path, metavar="FILE", help="the picture, png (none)")


def _add_top(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "top",
        "A server's sessions and blocks in a terminal, live.",
        "What the console's first view shows; Ctrl-C ends it. Without a terminal, or with --once, one picture.",
        "worldkv top --url ws://gpu-box:8000",
    )
    _add_server_address(command)
    command.add_argument("--once", action="store_true", help="print once and end")


def _add_film(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "film",
        "A running session as mp4: what it saw last beside what it expects next.",
        "Watches the session as the console does, for some ticks of its robot. Of recordings, `worldkv replay` makes\n"
        "such a video. Needs no torch.",
        "worldkv film --url ws://gpu-box:8000 --session arm --ticks 20 --output arm.mp4",
    )
    _add_server_address(command)
    command.add_argument("--session", required=True, metavar="ID", help="of an open session")
    command.add_argument("--ticks", type=int, default=10, metavar="N", help="to film (10)")
    command.add_argument("--output", type=Path, default=Path("film.mp4"), metavar="FILE", help="(film.mp4)")


def _add_bench(commands: Commands[argparse.ArgumentParser]) -> None:
    parts = ("attention", "ticks", "sessions", "steady", "profile", "memory", "baseline", "fp8")
    command = _command(
        commands,
        "bench",
        "Measure the engine at a model's true size, with random weights.",
        "In one run: the machine's own ceilings, each attention backend against dense attention, ticks by stage, many\n"
        "sessions at once, a plain baseline that does the same work as the reference does it, float8 products. Prints\n"
        "a table, leaves bench.json and plots in the output folder; the last line is the JSON.",
        "worldkv bench --model dreamzero-5b --sessions 1 8 32",
    )
    command.add_argument("--model", choices=("dreamzero-14b", "dreamzero-5b", "tiny"), default="tiny", help="(tiny)")
    command.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto: the GPU if there is one (auto)")
    command.add_argument("--parts", nargs="+", choices=parts, default=parts, metavar="PART", help=f"of {parts} (all)")
    command.add_argument("--sessions", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N")
    command.add_argument("--output", type=Path, default=Path("bench-output"), metavar="DIR", help="(bench-output)")
    _add_cache_options(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A user's mistake is one `error: ...` on standard error."""
    arguments = build_parser().parse_args(argv)
    if arguments.verbose and arguments.command != "serve":  # which logs everything, in a form of its own
        logging.basicConfig(level=logging.INFO)
    try:
        module = importlib.import_module(f"worldkv.cli.{arguments.command}")
        code: int = module.run(arguments)
        return code
    except (WorldKVError, ValueError, OSError, ImportError) as error:
        if arguments.verbose:
            traceback.print_exc()
        hint = "; pip install 'worldkv[all]'" if isinstance(error, ModuleNotFoundError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return FAILED if isinstance(error, WorldKVError) and not isinstance(error, ValueError) else BAD_INPUT
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
