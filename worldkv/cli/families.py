"""Options that are one family's own: how they are asked for, and that no other family ignores them silently."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from worldkv.cli.errors import UsageError
from worldkv.cli.numbers import whole

OPTIONS: Mapping[str, tuple[str, ...]] = {  # family -> fields that go to its loader
    "dreamzero": ("embodiment", "steps", "cfg_scale"),
    "causal_wan": ("preset", "height", "width", "window_frames", "sink_frames"),
}


def add_video_options(parser: argparse.ArgumentParser) -> None:
    """Of causal video."""
    group = parser.add_argument_group("video")
    group.add_argument(
        "--preset", metavar="NAME", help="the training run whose settings the folder does not hold (its causal.json)"
    )
    group.add_argument("--height", type=whole(16), metavar="PIXELS", help="of a frame (480)")
    group.add_argument("--width", type=whole(16), metavar="PIXELS", help="of a frame (832)")
    group.add_argument(
        "--window-frames", type=whole(1), metavar="N", help="latent frames that a block sees (as it was trained)"
    )
    group.add_argument(
        "--sink-frames", type=whole(0), metavar="N", help="of which: the first ones, which never leave (as trained)"
    )


def options_of(arguments: argparse.Namespace, family: str) -> dict[str, object]:
    """What was given of the family's own options. Raises UsageError for one of another family's."""
    for other, fields in OPTIONS.items():
        given = [field for field in fields if getattr(arguments, field, None) is not None]
        if other != family and given:
            name = "--" + given[0].replace("_", "-")
            raise UsageError(f"{name}: is for the family {other}; {arguments.checkpoint} is of {family}; leave it out")
    own = {field: getattr(arguments, field, None) for field in OPTIONS.get(family, ())}
    return {field: value for field, value in own.items() if value is not None}
