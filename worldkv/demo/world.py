"""The demo of videos: a tiny model of random weights, served in a second process, watched by a program."""

from __future__ import annotations

from pathlib import Path

WORDS = ("a quiet lake at dawn", "a storm over the lake", "the lake under stars")
SESSION = "demo-world"
_HEIGHT, _WIDTH = 96, 160
_FILES = {
    "world.mp4": "the video, as the viewer got it",
    "world.png": "a frame of each block, under the words it was made with, and what each took",
    "server.log": "what the server said",
}


def show_world(output: Path, num_blocks: int) -> None:
    """Raises ConnectionLost, EngineStopped."""
