"""`worldkv inspect`: what a checkpoint folder holds and needs."""

from __future__ import annotations

import argparse

from worldkv.cli.common import add_block_size, add_checkpoint, add_robot_and_base
from worldkv.cli.errors import FAILED, OK
from worldkv.cli.video import add_video_options, command_family, expect_options_of, video_choices

MORE = (
    "Sizes by part, window, bytes of K/V per frame and per session, robots, tokenizer, and everything that\n"
    "is missing or contradicts itself; any of the last makes the exit code 1."
)
EXAMPLE = "worldkv inspect DreamZero-DROID"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, what="checkpoint folder")
    add_block_size(parser)
    add_robot_and_base(parser)
    add_video_options(parser)


def run(arguments: argparse.Namespace) -> int:
    family = command_family(arguments.checkpoint, ("dreamzero", "causal_wan"))
    expect_options_of(family, arguments)
    if family == "causal_wan":
        from worldkv.show.video_inspection import inspect_video_folder

        choices = video_choices(arguments)
        return OK if inspect_video_folder(arguments.checkpoint, choices, arguments.block_size) else FAILED
    from worldkv.cli.preflight import check_robot_and_base
    from worldkv.show.inspection import inspect_folder

    check_robot_and_base(arguments)
    whole = inspect_folder(arguments.checkpoint, arguments.base, arguments.embodiment, arguments.block_size)
    return OK if whole else FAILED
