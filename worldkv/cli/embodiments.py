"""`worldkv embodiments`: the packaged robots, one's file to copy, or a check of a file."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.cli.errors import OK

if TYPE_CHECKING:
    from worldkv.robots.embodiment_file import EmbodimentFile

MORE = (
    "A file says how a robot's cameras, state and actions are named, ordered, scaled and tiled, and what the\n"
    "model is told about them. docs/embodiments.md describes it; copy one that is near to yours."
)
EXAMPLE = "worldkv embodiments oxe_droid > my_robot.yaml"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a packaged one to print, or a file to check")


def run(arguments: argparse.Namespace) -> int:
    from worldkv.robots.embodiment_file import load_embodiment_file, packaged

    if arguments.name is None:
        for name, file in packaged().items():
            print(f"{name:<12} {file.description}; tags {', '.join(file.tags)}")
        print("\nprint one with `worldkv embodiments NAME`; serve with `worldkv serve --embodiment NAME` or a file")
    elif arguments.name in packaged():
        path = resources.files("worldkv.robots") / "embodiments" / f"{arguments.name}.yaml"
        print(path.read_text(encoding="utf-8"), end="")
    else:
        _show(load_embodiment_file(Path(arguments.name)))
    return OK


def _show(file: EmbodimentFile) -> None:
    print(f"tags       {', '.join(file.tags)}: {file.description}")
    print(f"cameras    {', '.join(f'{camera.field} as {camera.name}' for camera in file.cameras)}; {file.layout}")
    print(f"state      {', '.join(f'{entry.field} as {entry.key} ({entry.normalisation})' for entry in file.state)}")
    relative = {True: ", relative", False: ""}
    print("actions    " + ", ".join(f"{a.key} ({a.normalisation}{relative[a.relative]})" for a in file.actions))
    print(f"rate       {file.rate_hz:g} Hz, {file.frames_per_tick} frames of each camera a tick")
    print("the file is well formed; a checkpoint's own words are compared with it when both are loaded")
