"""Reads and writes mp4 files as uint8 arrays, with PyAV (the `video` extra). Does not know what they show."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np

from worldkv.show.terminal import Step


def read_video(path: str | Path, step: Step | None = None) -> np.ndarray:
    """All frames of a video file: uint8 [T, H, W, 3], RGB. `step(done, in all)` as it goes; 0 in all is unknown.

    Raises FileNotFoundError for a path that is no file, ValueError for one that holds no readable video.
    """
    av = _pyav()
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such video file")
    frames = []
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError(f"{path}: expected a video, got a file without a video stream")
            stream = container.streams.video[0]
            for frame in container.decode(stream):
                frames.append(frame.to_ndarray(format="rgb24"))
                if step is not None:
                    step(len(frames), stream.frames)
    except av.FFmpegError as error:
        raise ValueError(
            f"{path}: not a readable video: {error.strerror} (frame {len(frames)}); is the file complete?"
        ) from error
    if not frames:
        raise ValueError(f"{path}: expected at least one frame, got none")
    return np.stack(frames)


def write_video(path: str | Path, frames: np.ndarray | Iterable[np.ndarray], fps: float) -> None:
    """Write frames, uint8 [T, H, W, 3] RGB or an iterable of [H, W, 3], as H.264 in yuv420p.

    That plays anywhere, and needs even sides: an odd one is padded by repeating the last row or column. Raises
    ValueError for no frames, other dtypes or changing sizes. A file that cannot be finished is removed.
    """
    av = _pyav()
    path = Path(path)
    count = 0
    try:
        with av.open(str(path), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
            stream.pix_fmt = "yuv420p"
            stream.options = {"crf": "18", "preset": "veryfast"}
            for count, frame in enumerate(frames, start=1):
                picture = _even(frame)
                height, width = picture.shape[:2]
                if count == 1:
                    stream.height, stream.width = height, width
                elif (stream.height, stream.width) != (height, width):
                    raise ValueError(f"frame {count - 1}: expected the first frame's size, got {frame.shape}")
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            if count == 0:
                raise ValueError("frames: expected at least one, got none")
            container.mux(stream.encode())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _even(frame: np.ndarray) -> np.ndarray:
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        raise ValueError(f"frame: expected uint8 [H, W, 3], got {frame.dtype} {list(frame.shape)}")
    height, width = frame.shape[:2]
    padded = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(padded)


def _pyav() -> ModuleType:
    try:
        import av
    except ImportError:
        raise ImportError("reading and writing video needs PyAV: pip install 'worldkv[video]'") from None
    return av
