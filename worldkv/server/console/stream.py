"""A session's frames as a stream that any browser or player shows: multipart JPEG, the newest seen, tick by tick."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from fractions import Fraction
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from worldkv.errors import BadRequest

if TYPE_CHECKING:
    from worldkv.server.console.history import Latest
    from worldkv.server.service import Service
    from worldkv.server.sessions import Entry

BOUNDARY = "frame"
_POLL_S = 0.1
_drawn: WeakKeyDictionary[Latest, asyncio.Future[bytes]] = WeakKeyDictionary()  # as long as somebody shows it


def require_encoder() -> None:
    """Raises BadRequest where the server has no PyAV."""
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise BadRequest("stream: the server needs PyAV for it: pip install 'worldkv[video]'") from error


async def parts(service: Service, entry: Entry) -> AsyncIterator[bytes]:
    """A JPEG for every tick that is answered from now on, until the session ends or the viewer leaves."""
    shown = -1
    entry.history.looked_at()
    try:
        while not service.draining and service.sessions.is_open(entry):
            latest = entry.history.latest
            if latest is None or latest.row.number == shown or latest.row.imagined:
                await asyncio.sleep(_POLL_S)
                continue
            shown = latest.row.number
            picture = await _picture(service, latest)
            head = f"--{BOUNDARY}\r\ncontent-type: image/jpeg\r\ncontent-length: {len(picture)}\r\n\r\n"
            yield head.encode() + picture + b"\r\n"
    finally:
        entry.history.left()


async def _picture(service: Service, latest: Latest) -> bytes:
    """Drawn once a tick, however many watch."""
    drawn = _drawn.get(latest)
    if drawn is None:
        drawn = _drawn[latest] = asyncio.ensure_future(service.for_people(jpeg_of, latest))
    return await asyncio.shield(drawn)


def jpeg_of(latest: Latest) -> bytes:
    """What a tick was shown, the newest frames side by side."""
    images = [stack[-1] for stack in (latest.reply.seen or {}).values()]
    tallest = max(image.shape[0] for image in images)
    padded = [np.pad(image, ((0, tallest - image.shape[0]), (0, 0), (0, 0))) for image in images]
    return jpeg(np.concatenate(padded, axis=1))


def jpeg(image: np.ndarray) -> bytes:
    """uint8 [H, W, 3], RGB; an odd side loses its last row or column."""
    import av

    height, width = (side - side % 2 for side in image.shape[:2])
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image[:height, :width]), format="rgb24")
    encoder = av.CodecContext.create("mjpeg", "w")
    encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuvj420p"
    encoder.time_base = Fraction(1, 25)
    packets = [*encoder.encode(frame.reformat(format="yuvj420p")), *encoder.encode(None)]
    return b"".join(bytes(packet) for packet in packets)
