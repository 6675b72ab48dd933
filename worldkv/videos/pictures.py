"""Pictures that a viewer sends, opened; bounded before they are."""

from __future__ import annotations

import base64
import binascii
import io

import numpy as np

from worldkv.errors import BadRequest

MAX_SIDE = 8192  # pixels


def read_image(data: object) -> np.ndarray:
    """Of base64 text, or the file's bytes: uint8 [1, H, W, 3]. Raises BadRequest, that names `image`."""
    import av

    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except (ValueError, binascii.Error):
            raise BadRequest("image: expected a picture's bytes as base64") from None
    if not isinstance(data, bytes) or not data:
        raise BadRequest(f"image: expected a picture's bytes, as base64 in a message, got {type(data).__name__}")
    try:
        with av.open(io.BytesIO(data), "r") as container:
            stream = container.streams.video[0]
            if max(stream.width, stream.height) > MAX_SIDE:
                raise BadRequest(
                    f"image: expected at most {MAX_SIDE} pixels a side, got {stream.width}x{stream.height}"
                )
            picture = next(container.decode(stream)).to_ndarray(format="rgb24")
    except (av.FFmpegError, IndexError, StopIteration):
        raise BadRequest("image: expected a picture, as PNG, JPEG or WebP; this cannot be read as one") from None
    return picture[None]
