"""Commands between ranks as bytes: plain values, arrays, tensors, and the few classes that are named here.

Nothing else can be said, so what is read runs no code. A tensor is sent apart from the rest, since it may lie on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

from worldkv.kv.row import AttentionRow
from worldkv.kv.spec import KVSpec, Step
from worldkv.kv.window import Window
from worldkv.models.base import BatchLimits
from worldkv.models.causal_wan.config import CausalSettings, CausalWanConfig
from worldkv.models.checkpoints.dtypes import StoredDtype
from worldkv.models.checkpoints.lora import Adapter
from worldkv.models.checkpoints.source import Place
from worldkv.models.checkpoints.tensors import StoredTensors
from worldkv.models.dreamzero.config import DiTConfig, DreamZeroConfig
from worldkv.models.dreamzero.dit import DreamZeroRow
from worldkv.models.wan.config import WanConfig
from worldkv.models.wan.dit import WanRow
from worldkv.models.wan.network import ActiveRow, Recipe, WindowCopy
from worldkv.models.wan.shard import Mesh

_CLASSES: Mapping[str, Callable[..., object]] = {
    each.__name__: each
    for each in (
        *(ActiveRow, AttentionRow, WindowCopy, WanRow, DreamZeroRow, BatchLimits),
        *(Recipe, StoredTensors, StoredDtype, Place, Adapter, Mesh),
        *(KVSpec, Step, Window, DreamZeroConfig, DiTConfig, CausalWanConfig, CausalSettings, WanConfig),
    )
}
_KIND = "~"  # the key that tells a value of a kind from a plain dictionary


@dataclass
class Packed:
    """`text`: JSON, in which arrays and tensors have numbers. Tensors are where they were."""

    text: bytes = b""
    arrays: list[np.ndarray] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)


def packed(value: object) -> Packed:
    """Raises TypeError for what cannot be sent."""
    found = Packed()
    found.text = json.dumps(_plain(value, found)).encode()
    return found


def _plain(value: object, found: Packed) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_plain(each, found) for each in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", "of": [_plain(each, found) for each in value]}
    if isinstance(value, Mapping):
        return {_KIND: "dict", "of": [[_plain(key, found), _plain(each, found)] for key, each in value.items()]}
    if isinstance(value, Path):
        return {_KIND: "path", "of": str(value.resolve())}
    if isinstance(value, np.ndarray):
        found.arrays.append(np.ascontiguousarray(value))
        return {_KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, torch.Tensor):
        found.tensors.append(value)
        return {_KIND: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value):
        raise TypeError(f"a {name} is not sent between ranks")
    own = {each.name: _plain(getattr(value, each.name), found) for each in fields(value) if each.name[0] != "_"}
    return {_KIND: "class", "name": name, "of": own}


@dataclass(frozen=True)
class TensorShape:
    """Of a tensor that comes apart."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def tensor_shapes(text: bytes) -> list[TensorShape]:
    """Of the tensors in a text, in their order."""
    shapes: list[TensorShape] = []
    _walk(json.loads(text), shapes)
    return shapes


def _walk(node: object, shapes: list[TensorShape]) -> None:
    if isinstance(node, list):
        for each in node:
            _walk(each, shapes)
    elif isinstance(node, dict):
        if node.get(_KIND) == "tensor":
            shapes.append(TensorShape(getattr(torch, node["dtype"]), tuple(node["shape"])))
        else:
            _walk(list(node.values()), shapes)


def unpacked(text: bytes, arrays: Sequence[bytes | bytearray], tensors: Sequence[torch.Tensor]) -> object:
    """The inverse of `packed`."""
    return _value(json.loads(text), iter(arrays), iter(tensors))


def _value(node: object, arrays: Iterator[bytes | bytearray], tensors: Iterator[torch.Tensor]) -> object:
    if isinstance(node, list):
        return [_value(each, arrays, tensors) for each in node]
    if not isinstance(node, dict):
        return node
    kind, inner = node[_KIND], node.get("of")
    if kind == "array":
        return np.frombuffer(next(arrays), dtype=node["dtype"]).reshape(node["shape"])
    if kind == "tensor":
        return next(tensors)
    if kind == "path":
        return Path(str(inner))
    assert inner is not None
    if kind == "class":
        own = {name: _value(each, arrays, tensors) for name, each in inner.items()}
        return _CLASSES[node["name"]](**own)
    values = _value(inner, arrays, tensors)
    assert isinstance(values, list)
    return tuple(values) if kind == "tuple" else dict(values)
