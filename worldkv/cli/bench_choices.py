"""What `worldkv bench` can measure, and which of its options go together. Imports no torch."""

from __future__ import annotations

import argparse

from worldkv.bench.paced import Pace
from worldkv.bench.released import TINY
from worldkv.cli.errors import UsageError
from worldkv.engine.config import EngineConfig
from worldkv_client import ServerAddress

PARTS = ("attention", "ticks", "sessions", "paced", "parking", "steady", "profile", "memory", "baseline", "fp8")
OWN_ENGINE = ("paced", "parking")  # each makes an engine of its own, and paced takes a minute for each number of robots
AT_ONCE = tuple(part for part in PARTS if part not in OWN_ENGINE)
SESSIONS = [1, 2, 4, 8, 16, 32, 64]
ROBOTS = [4, 8, 16]
_OF_SERVERS: dict[str, object] = {"dialect": "roboarena", "proxy": "auto"}
_OF_PACED: dict[str, object] = {
    "find": False,
    "episode": None,
    "observe": None,
    "period": Pace.period_s,
    "seconds": Pace.seconds,
    "robots": ROBOTS,
}


def check_combination(arguments: argparse.Namespace) -> None:
    """No option is taken and then ignored. Raises UsageError, for an address too."""
    here: dict[str, object] = {"model": TINY, "device": "auto", "sessions": SESSIONS}
    here |= {"precision": "model", "steps": None}
    here |= {"attention": EngineConfig.attention, "block_size": EngineConfig.block_size}
    if arguments.url is not None:
        ServerAddress.parse(arguments.url)
        wrong, why = here, "is for an engine in this process; leave it or --url out"
        if arguments.parts not in (AT_ONCE, ["paced"]):
            raise UsageError("--parts: of a server only paced can be measured; leave it or --url out")
    elif "paced" not in arguments.parts:
        wrong, why = _OF_SERVERS | _OF_PACED, "is for robots at their own pace; give --parts paced as well"
    else:
        wrong, why = _OF_SERVERS, "is for a server; give its --url"
    for field, default in wrong.items():
        if getattr(arguments, field) != default:
            raise UsageError(f"{arguments.options[field]}: {why}")


def expect_options_of_video(arguments: argparse.Namespace) -> None:
    """The same for a model of video. Raises UsageError."""
    for field, default in {"url": None, **_OF_SERVERS, **_OF_PACED}.items():
        if getattr(arguments, field) != default:
            raise UsageError(f"{arguments.options[field]}: is for robots; {arguments.model} is a model of video")
