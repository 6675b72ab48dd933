"""`worldkv inspect`: what a checkpoint folder holds and needs."""

from __future__ import annotations

import argparse

from worldkv.cli.common import add_block_size, add_checkpoint, add_robot_and_base
from worldkv.cli.errors import FAILED, OK

MORE = (
    "Sizes by part, window, bytes of K/V per frame and per session, embodiments, tokenizer, and everything that\n"
    "is missing or contradicts itself; any of the last makes the exit code 1."
)
EXAMPLE = "worldkv inspect DreamZero-DROID"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, what="DreamZero checkpoint folder")
    add_block_size(parser)
    add_robot_and_base(parser)


def run(arguments: argparse.Namespace) -> int:
    from worldkv.cli.preflight import check_robot_and_base
    from worldkv.show.inspection import inspect_folder

    check_robot_and_base(arguments)
    whole = inspect_folder(arguments.checkpoint, arguments.base, arguments.embodiment, arguments.block_size)
    return OK if whole else FAILED
