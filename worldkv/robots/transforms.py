"""The arithmetic between a robot and the model: pixels, state numbers, action numbers, the prompt.

Pure functions of an `Embodiment` and arrays; the rounding is the reference's, so that pixels and numbers come
out equal. Does not know sessions or what a client may send: inputs are already valid.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from worldkv.robots.embodiment import Embodiment, Quantity

Numbers: TypeAlias = npt.NDArray[np.floating[Any]]

# A Python literal worth parsing starts with one of these; anything else is the instruction itself.
_LITERAL_STARTS = ("[", "(", "'", '"')


def resize_frames(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [T, H, W, 3] -> uint8 [T, height, width, 3]: bilinear with antialias, x255 truncated."""
    pixels_TCHW = torch.from_numpy(np.array(frames)).permute(0, 3, 1, 2).float() / 255
    resized = F.interpolate(pixels_TCHW, (height, width), mode="bilinear", antialias=True, align_corners=False)
    return (resized * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def prepare_view(frames: np.ndarray, embodiment: Embodiment) -> np.ndarray:
    """One camera's frames, uint8 [T, H, W, 3], cropped about the centre and resized to the size of a view."""
    height, width = frames.shape[1:3]
    crop_height, crop_width = int(height * embodiment.crop_scale), int(width * embodiment.crop_scale)
    # Half to even, as torchvision's CenterCrop: 4 rows for 180 to 171.
    top, left = round((height - crop_height) / 2), round((width - crop_width) / 2)
    cropped = frames[:, top : top + crop_height, left : left + crop_width]
    return resize_frames(cropped, embodiment.view_height, embodiment.view_width)


def normalise_state(state: Mapping[str, np.ndarray], embodiment: Embodiment) -> np.ndarray:
    """Raw state by key, float64 [dim] each -> normalised and zero-padded, float64 [1, max_state_dim]."""
    padded = np.zeros((1, embodiment.max_state_dim))
    end = 0
    for quantity in embodiment.state:
        start, end = end, end + quantity.dim
        padded[0, start:end] = normalise(np.asarray(state[quantity.key], dtype=np.float64), quantity)
    return padded


def absolute_actions(actions: np.ndarray, last_state: Mapping[str, np.ndarray], embodiment: Embodiment) -> np.ndarray:
    """Normalised actions float32 [horizon, >= action_dim] -> robot actions float64 [horizon, action_dim].

    Denormalised in float32 and not clamped; then the last observed raw state, float64 [dim] by key, is added
    to the relative keys.
    """
    columns = []
    end = 0
    for quantity in embodiment.actions:
        start, end = end, end + quantity.dim
        values = denormalise(actions[:, start:end], quantity).astype(np.float64)
        if quantity.relative:
            values += np.asarray(last_state[quantity.key], dtype=np.float64)
        columns.append(values)
    return np.concatenate(columns, axis=1)


def normalise(values: Numbers, quantity: Quantity) -> Numbers:
    """Raw numbers [..., dim] to the model's range. A constant of the training data stays or becomes 0."""
    match quantity.normalisation:
        case "q99":
            low, high = _statistics(quantity, "q01", "q99", dtype=values.dtype)
            return np.clip(_to_unit_range(values, low, high, where_constant=values), -1, 1)
        case "min_max":
            low, high = _statistics(quantity, "min", "max", dtype=values.dtype)
            return np.clip(_to_unit_range(values, low, high, where_constant=np.zeros_like(values)), -1, 1)
        case "mean_std":
            mean, std = _statistics(quantity, "mean", "std", dtype=values.dtype)
            return np.where(std != 0, (values - mean) / np.where(std != 0, std, 1), values)
        case "scale":
            bound = np.maximum(*map(np.abs, _statistics(quantity, "min", "max", dtype=values.dtype)))
            return np.where(bound != 0, values / np.where(bound != 0, bound, 1), 0)
        case "binary":
            return (values > 0.5).astype(values.dtype)
        case "none":
            return values


def denormalise(values: Numbers, quantity: Quantity) -> Numbers:
    """The inverse of `normalise`, in the dtype of `values`, [horizon, dim] to the same. Never clamps."""
    match quantity.normalisation:
        case "q99" | "min_max":
            ends = ("q01", "q99") if quantity.normalisation == "q99" else ("min", "max")
            low, high = _statistics(quantity, *ends, dtype=values.dtype)
            return (values + 1) / 2 * (high - low) + low
        case "mean_std":
            mean, std = _statistics(quantity, "mean", "std", dtype=values.dtype)
            return values * std + mean
        case "scale":
            bound = np.maximum(*map(np.abs, _statistics(quantity, "min", "max", dtype=values.dtype)))
            return values * bound
        case "binary":
            return (values > 0.5).astype(values.dtype)
        case "none":
            return values


def _statistics(quantity: Quantity, *names: str, dtype: np.dtype[np.floating[Any]]) -> list[Numbers]:
    """The named statistics, [dim] or [steps, dim]: both broadcast against [horizon, dim]."""
    return [quantity.statistics[name].astype(dtype) for name in names]


def _to_unit_range(values: Numbers, low: Numbers, high: Numbers, where_constant: Numbers) -> Numbers:
    """[low, high] -> [-1, 1]; `where_constant` where the two are equal."""
    span = np.where(high != low, high - low, 1)
    return np.where(high != low, 2 * ((values - low) / span) - 1, where_constant)


def format_prompt(prompt: str, template: str) -> str:
    """The text that the model reads for an instruction.

    Instructions come from data sets whose cells may be Python literals: of a list or tuple the first element
    is meant, of a quoted string what is inside the quotes. Anything that does not parse is taken as it is.
    """
    return template.replace("{p}", _instruction(prompt).lower())


def _instruction(prompt: str) -> str:
    if not prompt.lstrip(" \t").startswith(_LITERAL_STARTS):
        return prompt
    try:
        value = ast.literal_eval(prompt)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return prompt
    if isinstance(value, list | tuple):
        return str(value[0]) if value else prompt
    return str(value)
