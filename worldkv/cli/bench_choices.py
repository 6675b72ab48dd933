"""What `worldkv bench` can measure, and which of its options go together. Imports no torch."""

from __future__ import annotations

import argparse

from worldkv.bench.paced import Pace
from worldkv.bench.released import TINY
from worldkv.cli.errors import UsageError
from worldkv.engine.config import EngineConfig
from worldkv_client import ServerAddress

PARTS = (
    "attention",
    "ticks",
    "sessions",
    "paced",
    "parking",
    "export",
    "steady",
    "profile",
    "memory",
    "baseline",
    "fp8",
)
OWN_ENGINE = ("paced", "parking", "export")  # each makes one; paced takes a minute for each number of robots
COMPARED = ("baseline", "fp8")  # with the default steps in the model's own precision
AT_ONCE = tuple(part for part in PARTS if part not in OWN_ENGINE)
SESSIONS = [1, 2, 4, 8, 16, 32, 64]
ROBOTS = [4, 8, 16]
DEFAULT_STEPS = 8  # as the models have
_OF_SERVERS: dict[str, object] = {"dialect": "roboarena", "proxy": "auto"}
_OF_PACED: dict[str, object] = {
    "find": False,
    "episode": None,
    "observe": None,
    "period": None,
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
    if set(arguments.parts) == {"attention"}:
        of_engines = {"precision": "model", "steps": None}
        wrong, why = {**wrong, **of_engines}, "is for parts that run an engine"
    compared = [part for part in arguments.parts if part in COMPARED]
    if compared and arguments.parts is not AT_ONCE and not is_compared(arguments):
        option = "--steps" if arguments.precision == "model" else "--precision"
        raise UsageError(
            f"{option}: {compared[0]} compares with {DEFAULT_STEPS} steps in the model's own precision; "
            "leave one of them out"
        )
    for field, default in wrong.items():
        if getattr(arguments, field) != default:
            raise UsageError(f"{arguments.options[field]}: {why}")


def is_compared(arguments: argparse.Namespace) -> bool:
    """Whether the parts that compare with the default steps in the model's own precision can be measured."""
    return arguments.precision == "model" and arguments.steps in (None, DEFAULT_STEPS)


def expect_options_of_video(arguments: argparse.Namespace) -> None:
    """The same for a model of video. Raises UsageError."""
    for field, default in {"url": None, "observe": None, **_OF_SERVERS}.items():
        if getattr(arguments, field) != default:
            raise UsageError(f"{arguments.options[field]}: is for robots; {arguments.model} is a model of video")


def expect_no_pace(arguments: argparse.Namespace, why: str) -> None:
    """Raises UsageError where an option says how robots or viewers ask."""
    for field, default in _OF_PACED.items():
        if getattr(arguments, field) != default:
            raise UsageError(f"{arguments.options[field]}: {why}")
