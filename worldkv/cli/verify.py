"""`worldkv verify`: the paged engine against recorded outputs of the reference implementation, quantity by quantity."""

from __future__ import annotations

import argparse
import importlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from worldkv.attention.names import check_name
from worldkv.cli.common import add_attention, add_base, add_checkpoint, add_device
from worldkv.cli.errors import FAILED, OK, UsageError
from worldkv.cli.numbers import power_of_two, real, whole
from worldkv.cli.preflight import check_folder
from worldkv.cli.video import add_video_options, command_family, expect_options_of
from worldkv.engine.config import EngineConfig
from worldkv.show.terminal import spinner
from worldkv.words import count

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    Tensors = Mapping[str, torch.Tensor]

GOLDEN_FILE = "golden.safetensors"

MORE = (
    "Runs the calls of golden.safetensors and calls.json (of causal video: its blocks) in float32 and prints, per\n"
    "recorded quantity, ||ours - recorded|| / ||recorded||; the last line is the largest. A recorded quantity that\n"
    "is not computed counts as infinitely wrong. Of a robot's model also checks policy.safetensors, where there is\n"
    "one: pixels must be equal, numbers to 1e-6."
)
EXAMPLE = "worldkv verify golden/tiny_i2v --tolerance 1e-4 --block-size 16 64 128 --interleave 2"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "worldkv verify DIR [options]"  # DIR first: after --block-size it would be taken for a size
    add_checkpoint(parser, what="checkpoint with golden.safetensors and calls.json")
    parser.add_argument(
        "--tolerance", type=real(above=0), default=1e-3, metavar="X", help="largest relative error allowed (1e-3)"
    )
    add_attention(parser)
    parser.add_argument(
        "--block-size",
        type=power_of_two,
        nargs="+",
        default=[EngineConfig.block_size],
        metavar="N",
        help=f"KV slots per block, powers of two: the calls run once with each ({EngineConfig.block_size})",
    )
    add_device(parser, "cpu")
    recording = "folder of the recording (the checkpoint's)"
    parser.add_argument("--recording", type=Path, metavar="DIR", help=recording)
    add_base(parser)
    add_video_options(parser)
    parser.add_argument(
        "--interleave",
        type=whole(0),
        default=0,
        metavar="N",
        help="run N other sessions' ticks beside the calls and between them (0)",
    )


class Verification(Protocol):
    """Of a family's folders. Made by `open(arguments, recording)`, which raises CheckpointError for what is wrong."""

    def run(self, block_size: int) -> tuple[Tensors, Tensors, str]:
        """What was recorded, what was computed of it, and the attention backend."""
        ...

    def around_the_model(self) -> bool:
        """Whether what is not the engine's is right as well; prints what was found."""
        ...


_FAMILIES = {"dreamzero": "worldkv.cli.verify_robot", "causal_wan": "worldkv.cli.verify_video"}


def run(arguments: argparse.Namespace) -> int:
    check_name(arguments.attention)
    check_folder(arguments.checkpoint)
    recording = arguments.recording or arguments.checkpoint
    if not (recording / GOLDEN_FILE).is_file():
        raise UsageError(
            f"{recording} has no {GOLDEN_FILE}: verify needs a checkpoint folder with outputs recorded from "
            "the reference; to look at any other checkpoint use `worldkv inspect`"
        )
    with spinner("starting up"):
        family = command_family(arguments.checkpoint, _FAMILIES)
        expect_options_of(family, arguments)
        verification: Verification = importlib.import_module(_FAMILIES[family]).Verification.open(arguments, recording)
    worst = 0.0
    for block_size in arguments.block_size:
        expected, ours, attention = verification.run(block_size)
        print(f"blocks of {block_size}, attention by {attention}, {count(arguments.interleave, 'other session')}")
        worst = max(worst, _report(expected, ours))
    policy_ok = verification.around_the_model()
    print(f"max_relative_error {worst:.3e}")
    return OK if worst <= arguments.tolerance and policy_ok else FAILED


def _report(expected: Tensors, ours: Tensors) -> float:
    """Print a line per recorded quantity; the largest relative error, infinite where a quantity is missing."""
    from worldkv.models.dreamzero.verify import relative_error

    worst = 0.0
    for name in sorted(expected):
        wanted, got = expected[name].float(), ours.get(name)
        if got is None or got.shape != wanted.shape:
            error, note = math.inf, "not computed" if got is None else f"{list(got.shape)}, not {list(wanted.shape)}"
        else:
            error, note = relative_error(got, wanted), ""
        print(f"{name:<52} {error:.3e} {note}".rstrip())
        worst = max(worst, error)
    return worst
