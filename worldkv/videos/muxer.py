"""Blocks of pictures as bytes that a browser shows: JPEGs, or fragments of an mp4 file. Pure functions, for any thread.

Every fragment is made by itself: it begins with a picture that needs no other, so a viewer may begin at any block, and
nothing has to be kept between two of them. Needs PyAV (the `video` extra).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np

from worldkv.errors import BadRequest

if TYPE_CHECKING:
    from av.container import OutputContainer
    from av.video.stream import VideoStream

TIMESCALE = 16_000  # ticks a second of an mp4 file's clock: at 16 frames a second each lasts 1000, exactly
_HEADER = 8  # bytes of a box before its content: length and name
_JPEG_QUANTISER = 3  # 2 is the best
_CODECS = ("libx264", "libvpx-vp9", "libsvtav1")  # whichever of them the build has, in this order
_OPTIONS: Mapping[str, Mapping[str, object]] = {
    "libx264": {"preset": "veryfast", "tune": "zerolatency", "crf": "21", "g": "1000", "bf": "0", "sc_threshold": "0"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8", "crf": "30", "b": "0", "lag-in-frames": "0"},
    "libsvtav1": {"preset": "10", "crf": "32", "svtav1-params": "pred-struct=1"},
}
_OTHER_MIMES = {"libvpx-vp9": "vp09.00.31.08", "libsvtav1": "av01.0.05M.08"}


@dataclass(frozen=True)
class Mp4:
    """One block. `init`: what a file or stream of fragments begins with, equal for all blocks of one size. `mime`: by
    which a browser knows whether it plays that."""

    init: bytes
    fragment: bytes
    mime: str


def require_encoder() -> None:
    """Raises BadRequest where the server has no PyAV, or a build of it that cannot write video."""
    try:
        _codec()
    except ImportError as error:
        raise BadRequest("format: the server needs PyAV for it: pip install 'worldkv[video]'") from error


def jpeg_of(picture: np.ndarray) -> bytes:
    """uint8 [H, W, 3], RGB, of even sides. The same picture gives the same bytes."""
    import av

    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
    encoder = av.CodecContext.create("mjpeg", "w")
    encoder.height, encoder.width = picture.shape[:2]
    encoder.pix_fmt, encoder.time_base, encoder.thread_count = "yuvj420p", Fraction(1, 25), 1
    encoder.options = dict.fromkeys(("qmin", "qmax"), str(_JPEG_QUANTISER))
    packets = [*encoder.encode(frame.reformat(format="yuvj420p")), *encoder.encode(None)]
    return b"".join(bytes(packet) for packet in packets)


def packed_jpegs(frames: np.ndarray) -> bytes:
    """uint8 [T, H, W, 3] as T times a length (4 bytes, little-endian) and so many bytes of a JPEG."""
    pictures = [jpeg_of(frame) for frame in frames]
    return b"".join(part for picture in pictures for part in (struct.pack("<I", len(picture)), picture))


def unpacked(data: bytes) -> list[bytes]:
    """What `packed_jpegs` has packed."""
    pictures, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        pictures.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return pictures


def mp4_of(frames: np.ndarray, first_frame: int, fps: int) -> Mp4:
    """uint8 [T, H, W, 3], of even sides, whose first one is the file's frame number `first_frame`."""
    import av

    out = io.BytesIO()
    flags = {"movflags": "empty_moov+default_base_moof+frag_custom+skip_trailer", "video_track_timescale": TIMESCALE}
    with av.open(out, "w", format="mp4", options={name: str(value) for name, value in flags.items()}) as container:
        stream = _stream(container, frames, fps)
        for number, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            picture.pts, picture.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
        mime = f'video/mp4; codecs="{_mime(stream.codec_context.extradata)}"'
    boxes = list(_boxes(out.getvalue()))
    init = b"".join(box for name, box in boxes if name in (b"ftyp", b"moov"))
    parts = [_at(box, first_frame, fps) if name == b"moof" else box for name, box in boxes]
    return Mp4(init, b"".join(parts)[len(init) :], mime)


def _stream(container: OutputContainer, frames: np.ndarray, fps: int) -> VideoStream:
    stream = cast("VideoStream", container.add_stream(_codec(), rate=fps))
    stream.height, stream.width = frames.shape[1:3]
    stream.pix_fmt, stream.options = "yuv420p", dict(_OPTIONS[_codec()])
    stream.codec_context.thread_count = 1
    stream.codec_context.time_base = Fraction(1, fps)
    return stream


@cache
def _codec() -> str:
    """Raises ImportError where there is none."""
    from av.codec.codec import codecs_available

    for name in _CODECS:
        if name in codecs_available:
            return name
    raise ImportError(f"none of {', '.join(_CODECS)} is in this build of PyAV")


def _mime(extradata: bytes | None) -> str:
    """As RFC 6381 names codecs: of H.264 by profile, constraints and level, which its first parameters say."""
    if _codec() != "libx264":
        return _OTHER_MIMES[_codec()]
    assert extradata is not None
    at = extradata.index(b"\x00\x00\x01\x67") + 4  # a sequence parameter set
    return f"avc1.{extradata[at : at + 3].hex().upper()}"


def _boxes(data: bytes, start: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """(name, whole box) one after the other."""
    while start < len(data):
        length = int.from_bytes(data[start : start + 4], "big")
        yield data[start + 4 : start + 8], data[start : start + length]
        start += length


def _at(moof: bytes, first_frame: int, fps: int) -> bytes:
    """A fragment's header, made for frame 0, for another one: its number in the file, and its time."""
    moved = bytearray(moof)
    at = _HEADER
    for name, box in _boxes(moof, _HEADER):
        if name == b"mfhd":
            struct.pack_into(">I", moved, at + 12, first_frame + 1)  # any number, as long as it rises
        elif name == b"traf":
            inner = at + _HEADER
            for part, content in _boxes(box, _HEADER):
                if part == b"tfdt":
                    assert content[8] == 1, "a time of 8 bytes"
                    struct.pack_into(">Q", moved, inner + 12, first_frame * TIMESCALE // fps)
                inner += len(content)
        at += len(box)
    return bytes(moved)
