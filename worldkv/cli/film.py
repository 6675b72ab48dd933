"""`worldkv film`: a live session as mp4, what it saw last beside what it expects next. Imports no torch."""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from worldkv.cli.common import add_server_address, add_ticks
from worldkv.cli.errors import OK, UsageError
from worldkv.cli.places import add_output
from worldkv.cli.preflight import require_packages
from worldkv.errors import ConnectionLost
from worldkv.robots.tiling import tile_views
from worldkv.show.pictures import VIDEO_HZ, beside, resized
from worldkv.show.terminal import Step, progress
from worldkv.show.video import write_video
from worldkv.words import count
from worldkv_client.console import console_feed, hear, receive

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

Tick = tuple[Mapping[str, np.ndarray], np.ndarray]  # what the cameras saw, by name; the imagined frames


MORE = (
    "Watches the session as the console does, for some ticks of its robot. Of recordings, `worldkv replay` makes\n"
    "such a video. Needs no torch."
)
EXAMPLE = "worldkv film --url ws://gpu-box:8000 --session arm --ticks 20 --output arm.mp4"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_server_address(parser)
    parser.add_argument("--session", required=True, metavar="ID", help="of an open session, or enough of its beginning")
    add_ticks(parser, 10, "to film")
    add_output(parser, "file", "the film", default="film.mp4", endings=(".mp4",))


def run(arguments: argparse.Namespace) -> int:
    require_packages("video", "av", option="--output")
    with console_feed(arguments.url, arguments.api_key, proxy=arguments.proxy) as (socket, hello):
        session = session_meant(arguments.session, hear(socket, "overview"))
        socket.send(json.dumps({"watch": [session]}))
        with progress(f"filming {session}") as step:
            ticks = _ticks(socket, session, arguments.ticks, step)
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            write_video(arguments.output, pairs(ticks, hello["about"]), VIDEO_HZ)
    print(f"{arguments.output}: {count(arguments.ticks, 'tick')}, left what it saw last, right what it expected next")
    return OK


def session_meant(text: str, overview: Mapping[str, Any]) -> str:
    """The open session of that id, or the only one whose id begins so. Raises ConnectionLost."""
    known = [session["id"] for session in overview["sessions"]]
    found = [text] if text in known else [name for name in known if name.startswith(text)]
    if len(found) > 1:
        raise UsageError(f"--session: {text!r} begins several: {', '.join(found)}; give more of it")
    _require_open(found[0] if found else text, known)
    return found[0]


def _ticks(socket: ClientConnection, session: str, num_ticks: int, step: Step) -> Iterator[Tick]:
    """Each tick from now on."""
    seen: dict[str, np.ndarray] = {}
    done = 0
    while done < num_ticks:
        message = receive(socket)
        if isinstance(message, dict):
            if message["type"] == "overview":
                _require_open(session, [other["id"] for other in message["sessions"]])
            continue
        header, arrays = unpacked(message)
        if header["type"] == "observed":
            seen = {image["name"]: array for image, array in zip(header["images"], arrays, strict=True)}
        elif header["type"] == "imagined":
            done += 1
            step(done, num_ticks)
            yield seen, arrays[0]


def _require_open(session: str, known: list[str]) -> None:
    if session not in known:
        raise ConnectionLost(f"session {session!r} is not open; open are {', '.join(known) or 'none'}")


def unpacked(message: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The console's binary message: header length, header, pixels."""
    (length,) = struct.unpack("<I", message[:4])
    header: dict[str, Any] = json.loads(message[4 : 4 + length])
    shapes = [image["shape"] for image in header["images"]] if "images" in header else [header["shape"]]
    arrays, at = [], 4 + length
    for shape in shapes:
        size = int(np.prod(shape))
        arrays.append(np.frombuffer(message, np.uint8, size, at).reshape(shape))
        at += size
    return header, arrays


def pairs(ticks: Iterator[Tick], robot: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """Frames side by side: the cameras as the model sees them, and each imagined frame. `robot`: of the hello."""
    height, width = robot["camera_size"]
    black = np.zeros((height, width, 3), np.uint8)
    for seen, imagined in ticks:
        views = [seen.get(camera["name"], black) for camera in robot["cameras"]]
        tiled = tile_views([resized(view[None], height, width) for view in views], robot["layout"])[0]
        yield from (beside(tiled, frame) for frame in imagined)
