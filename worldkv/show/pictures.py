"""Seen and imagined frames as people look at them: enlarged, side by side. numpy only."""

from __future__ import annotations

import numpy as np

VIDEO_HZ = 5  # of the model's imagination: 8 frames for the 24 actions at 15 Hz of DROID
_LEAST_HEIGHT = 180  # pixels; smaller imagined frames are enlarged
_GAP = 8  # pixels between the two halves of a comparison


def beside(seen: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Two frames side by side, no larger than what there is to see in the imagined one."""
    height = min(seen.shape[0], max(predicted.shape[0], _LEAST_HEIGHT))
    width = seen.shape[1] * height // seen.shape[0]
    gap = np.full((height, _GAP, 3), 255, np.uint8)
    return np.concatenate([resized(seen, height, width), gap, resized(predicted, height, width)], axis=1)


def enlarged(frame: np.ndarray) -> np.ndarray:
    """A whole number of times, so that it is no smaller than people can see."""
    times = max(1, -(-_LEAST_HEIGHT // frame.shape[0]))
    return np.repeat(np.repeat(frame, times, axis=0), times, axis=1)


def resized(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """[..., H, W, 3] to [..., height, width, 3] by the nearest pixels: nothing is smoothed away."""
    rows = np.arange(height) * frames.shape[-3] // height
    columns = np.arange(width) * frames.shape[-2] // width
    nearest: np.ndarray = frames[..., rows, :, :][..., columns, :]
    return nearest
