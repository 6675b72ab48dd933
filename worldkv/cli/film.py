"""`worldkv film`: a live session as mp4, what it saw last beside what it expects next. Imports no torch."""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from worldkv.cli.common import OK, Step, progress
from worldkv.cli.video import write_video
from worldkv.errors import ConnectionLost

_HZ = 5  # of the imagined video
_GAP = 8  # pixels between the two halves
_TICK_WITHIN_S = 120.0


def run(arguments: argparse.Namespace) -> int:
    if arguments.ticks < 1:
        raise ValueError(f"--ticks: expected at least 1, got {arguments.ticks}")
    url = arguments.url if "://" in arguments.url else f"ws://{arguments.url}"
    try:
        with connect(f"{url.rstrip('/')}/v1/console", open_timeout=10, max_size=None) as socket:
            socket.send(json.dumps({"key": arguments.api_key}))
            cameras = _hello(socket)["robot"]["cameras"]
            socket.send(json.dumps({"watch": [arguments.session]}))
            with progress(f"filming {arguments.session}") as step:
                write_video(arguments.output, pairs(_ticks(socket, arguments, step), cameras), _HZ)
    except (OSError, InvalidHandshake, ConnectionClosed, TimeoutError) as error:
        raise ConnectionLost(f"{url}: {error}; check the address, the session's id, and that its robot runs") from error
    print(f"{arguments.output}: {arguments.ticks} ticks, left what it saw last, right what it expected next")
    return OK


def _hello(socket: ClientConnection) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(socket.recv(timeout=30))
    if told["type"] == "refused":
        raise ConnectionLost(f"{told['why']}; give --api-key")
    return told


def _ticks(
    socket: ClientConnection, arguments: argparse.Namespace, step: Step
) -> Iterator[tuple[Mapping[str, np.ndarray], np.ndarray]]:
    """(what the cameras saw, by name; the imagined frames) of each tick from now on."""
    seen: dict[str, np.ndarray] = {}
    done = 0
    while done < arguments.ticks:
        message = socket.recv(timeout=_TICK_WITHIN_S)
        if isinstance(message, str):
            told = json.loads(message)
            if told["type"] == "overview" and not any(s["id"] == arguments.session for s in told["sessions"]):
                known = ", ".join(session["id"] for session in told["sessions"]) or "none"
                raise ConnectionLost(f"session {arguments.session!r} is not open; open are {known}")
            continue
        header, arrays = unpacked(message)
        if header["type"] == "observed":
            seen = {image["name"]: array for image, array in zip(header["images"], arrays, strict=True)}
        elif header["type"] == "imagined":
            done += 1
            step(done, arguments.ticks)
            yield seen, arrays[0]


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


def pairs(
    ticks: Iterator[tuple[Mapping[str, np.ndarray], np.ndarray]], cameras: list[dict[str, Any]]
) -> Iterator[np.ndarray]:
    """Frames side by side: the cameras where the model sees them, then each imagined frame in turn."""
    for seen, imagined in ticks:
        height, width = imagined.shape[1:3]
        times = max(1, 180 // height)
        left = tiled(seen, cameras, height * times, width * times)
        gap = np.full((height * times, _GAP, 3), 255, np.uint8)
        for frame in imagined:
            yield np.concatenate([left, gap, frame.repeat(times, 0).repeat(times, 1)], axis=1)


def tiled(seen: Mapping[str, np.ndarray], cameras: list[dict[str, Any]], height: int, width: int) -> np.ndarray:
    """The cameras in the model's arrangement, uint8 [height, width, 3]; black where one was not seen."""
    image = np.zeros((height, width, 3), np.uint8)
    for camera in cameras:
        frame, place = seen.get(camera["name"]), camera["place"]
        if frame is None:
            continue
        top, across = _half(place, height, "top", "bottom"), _half(place, width, "left", "right")
        rows = np.arange(top.stop - top.start) * frame.shape[0] // (top.stop - top.start)
        columns = np.arange(across.stop - across.start) * frame.shape[1] // (across.stop - across.start)
        image[top, across] = frame[rows][:, columns]
    return image


def _half(place: str, size: int, first: str, second: str) -> slice:
    """The part of a side that the place's words name; all of it where they name none."""
    if first in place:
        return slice(0, size // 2)
    return slice(size // 2, size) if second in place else slice(0, size)
