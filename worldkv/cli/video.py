"""Options of causal video, and which options a checkpoint's family takes. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.cli.errors import UsageError
from worldkv.cli.numbers import whole

if TYPE_CHECKING:
    from worldkv.models.causal_wan.folder import Choices

OF_VIDEO = ("preset", "height", "width", "window_frames", "sink_frames", "lora", "tiny_decoder")
OF_ROBOTS = ("embodiment", "steps", "cfg_scale")
_FAMILIES = {"dreamzero": ("robots", OF_VIDEO), "causal_wan": ("video", OF_ROBOTS)}  # the options that it has not


def add_video_options(parser: argparse.ArgumentParser) -> None:
    """What a folder of causal video leaves open."""
    group = parser.add_argument_group("causal video")
    presets = "settings of a known training run, in place of the folder's causal.json: self-forcing, longlive, ..."
    group.add_argument("--preset", metavar="NAME", help=presets)
    group.add_argument("--height", type=whole(16), metavar="N", help="of the video in pixels (480)")
    group.add_argument("--width", type=whole(16), metavar="N", help="(832)")
    window = "latent frames that a block sees, sink and itself included (the run's own)"
    group.add_argument("--window-frames", type=whole(1), metavar="N", help=window)
    group.add_argument("--sink-frames", type=whole(0), metavar="N", help="of them, kept for ever (the run's own)")
    group.add_argument("--lora", type=Path, metavar="FILE", help="to be merged (the one in the folder, if it has one)")
    tiny = "a tiny decoder's weights (taew2_1.pth): many times faster than the model's own, and other pixels"
    group.add_argument("--tiny-decoder", type=Path, metavar="FILE", help=tiny)


def video_choices(arguments: argparse.Namespace) -> Choices:
    """Of `add_video_options` and `--base`."""
    from worldkv.models.causal_wan.folder import Choices

    return Choices(base=arguments.base, **{name: getattr(arguments, name) for name in OF_VIDEO})


def command_family(folder: Path, known: Collection[str]) -> str:
    """The family of a folder, one of `known`; DreamZero for what no family takes, whose error says what it lacks.

    Raises CheckpointError for a family that the command does not know.
    """
    from worldkv.errors import CheckpointError
    from worldkv.models.registry import family_of

    try:
        family = family_of(folder)
    except CheckpointError:
        return "dreamzero"
    if family not in known:
        raise CheckpointError(f"{folder} is of the family {family}, which this command does not know")
    return family


def kind_of(folder: Path) -> str:
    """What a folder's model is for, in a word."""
    return _FAMILIES[command_family(folder, _FAMILIES)][0]


def alone(arguments: argparse.Namespace, folder: Path, beside: Path) -> argparse.Namespace:
    """The options of one of two checkpoints that are served together: without those that only the other one takes."""
    own, other = (command_family(each, _FAMILIES) for each in (folder, beside))
    mine = argparse.Namespace(**{**vars(arguments), "checkpoint": folder})
    if own != other:
        for name in _FAMILIES[own][1]:
            setattr(mine, name, None)
    return mine


def expect_options_of(family: str, arguments: argparse.Namespace) -> None:
    """Raises UsageError for an option that this family's folders do not take."""
    what, others = _FAMILIES.get(family, ("", ()))
    for name in others:
        if getattr(arguments, name, None) is not None:
            option = f"--{name.replace('_', '-')}"
            subject = getattr(arguments, "checkpoint", None) or arguments.model
            raise UsageError(f"{option}: {subject} is a model of {what}, which has no such choice")
