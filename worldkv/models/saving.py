"""A session's state as plain values and tensors, and back: what an export is made of. What is read cannot run code.

Values are written as they are and read by the types that a family's dataclasses state: whatever else is there, missing
or of another type is refused with its place. Knows no file and no session.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TypeVar, cast

import numpy as np
import torch

from worldkv.errors import BadRequest

T = TypeVar("T")
_MAX_SHOWN = 60  # characters of a value that is refused


@dataclass(frozen=True)
class Saved:
    """`values`: of JSON's types. `tensors`: on the host, by the names under which `values` mentions them."""

    values: object
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def part(self, name: str) -> Saved:
        """What `values`, a map, has under this name. Raises BadRequest."""
        return Saved(_require(self.values, dict, "state").get(name), self.tensors)

    def only(self, name: str) -> Saved:
        """The same as a map of this name alone."""
        return Saved({name: self.part(name).values}, self.tensors)


def save(value: object, name: str = "state") -> Saved:
    """Any nest of dataclasses, maps with text keys, tuples, lists, frozensets of texts, tensors, arrays and plain
    values. `name`: what tensors' names begin with. Waits for the tensors' device."""
    tensors: dict[str, torch.Tensor] = {}
    return Saved(_save(value, name, tensors), tensors)


def _save(value: object, where: str, tensors: dict[str, torch.Tensor]) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda axis: (-strides[axis], axis))
        if not value.permute(order).is_contiguous():  # a view with gaps
            order = list(range(value.dim()))
        tensors[where] = value.detach().permute(order).to("cpu").contiguous()
        return {"tensor": where, "order": order}  # of its axes in memory, which kernels' choice and rounding depend on
    if isinstance(value, np.ndarray):
        tensors[where] = torch.from_numpy(np.array(value))
        return {"array": where}
    if isinstance(value, tuple | list):
        return [_save(each, f"{where}.{index}", tensors) for index, each in enumerate(value)]
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, Mapping):
        return {key: _save(each, f"{where}.{key}", tensors) for key, each in value.items()}
    assert is_dataclass(value), f"{where}: {type(value).__name__} cannot be saved"
    return {each.name: _save(getattr(value, each.name), f"{where}.{each.name}", tensors) for each in fields(value)}


def num_bytes(value: object) -> int:
    """Of all tensors and arrays in a nest such as `save` takes, wherever they are."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(num_bytes, value))
    return sum(num_bytes(getattr(value, each.name)) for each in fields(value)) if is_dataclass(value) else 0


def load(saved: Saved, expected: type[T], known: Mapping[str, object], name: str = "state") -> T:
    """What `save` was given. `known`: names that the dataclasses' annotations use and their modules do not have.

    Raises BadRequest that names the place of what `expected` does not have room for.
    """
    return cast("T", _Loading(saved.tensors, dict(known)).load(saved.values, expected, name))


@dataclass(frozen=True)
class _Loading:
    tensors: Mapping[str, torch.Tensor]
    known: dict[str, object]

    def load(self, value: object, hint: object, where: str) -> object:
        origin, arms = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._any_of(value, arms, where)
        if hint in (torch.Tensor, np.ndarray) or origin is np.ndarray:
            return self._tensor(value, where, "tensor" if hint is torch.Tensor else "array")
        if origin in (tuple, list, frozenset):
            return self._several(value, origin, arms, where)
        if origin is not None and issubclass(origin, Mapping):
            named = _require(value, dict, where)
            return {key: self.load(each, arms[1], f"{where}.{key}") for key, each in named.items()}
        if isinstance(hint, type) and is_dataclass(hint):
            return self._dataclass(value, hint, where)
        assert isinstance(hint, type), f"{where}: {hint} cannot be loaded"
        return _require(value, hint, where)

    def _any_of(self, value: object, arms: tuple[object, ...], where: str) -> object:
        others = [arm for arm in arms if arm is not type(None)]
        if value is None and len(others) < len(arms):
            return None
        for arm in others[:-1]:
            try:
                return self.load(value, arm, where)
            except BadRequest:
                continue
        return self.load(value, others[-1], where)

    def _tensor(self, value: object, where: str, kind: str) -> object:
        """Memory of its own, not the export's."""
        named = _require(value, dict, where)
        if named.get(kind) != where or where not in self.tensors:
            raise _refused(where, f"the {kind} of this name", value)
        tensor, order = self.tensors[where].clone(), named.get("order")
        if kind == "array":
            return tensor.numpy()
        if not isinstance(order, list) or sorted(map(repr, order)) != sorted(map(repr, range(tensor.dim()))):
            raise _refused(where, f"an order of {tensor.dim()} axes", order)
        return tensor.permute([order.index(axis) for axis in range(tensor.dim())])

    def _several(self, value: object, origin: type, arms: tuple[object, ...], where: str) -> object:
        listed = _require(value, list, where)
        if origin is tuple and arms[-1] is not Ellipsis:
            if len(listed) != len(arms):
                raise _refused(where, f"{len(arms)} values", value)
            hints = list(arms)
        else:
            hints = [arms[0]] * len(listed)
        return origin(self.load(each, hints[i], f"{where}.{i}") for i, each in enumerate(listed))

    def _dataclass(self, value: object, hint: type, where: str) -> object:
        named = _require(value, dict, where)
        hints = typing.get_type_hints(hint, localns=self.known)
        names = [each.name for each in fields(hint)]
        if set(named) != set(names):
            raise _refused(where, f"the fields {names}", sorted(named))
        return hint(**{name: self.load(named[name], hints[name], f"{where}.{name}") for name in names})


def check_tensor(
    value: torch.Tensor | np.ndarray | None, where: str, dtype: object, shape: Sequence[int | None]
) -> None:
    """Raises BadRequest unless it is None, or just that; a size of None may be any but 0."""
    if value is None:
        return
    sizes = tuple(value.shape)
    fits = len(sizes) == len(shape) and all(
        have == want if want is not None else have > 0 for have, want in zip(sizes, shape, strict=True)
    )
    if value.dtype != dtype or not fits:
        wanted = [("any" if size is None else size) for size in shape]
        raise BadRequest(f"import: {where}: expected {dtype} of {wanted}, got {value.dtype} of {list(sizes)}")


def check_count(value: int, where: str, most: int) -> None:
    """Raises BadRequest unless it is 0 to `most`."""
    if not 0 <= value <= most:
        raise BadRequest(f"import: {where}: expected 0 to {most}, got {value}")


def check_same(values: object, expected: Mapping[str, object], where: str) -> Mapping[str, object]:
    """`values`, a map that has what `expected` has. Raises BadRequest that names what differs."""
    named = _require(values, dict, where)
    for name, want in expected.items():
        if name not in named or type(named[name]) is not type(want) or named[name] != want:
            raise _refused(f"{where}.{name}", f"{want!r}, as here", named.get(name))
    return cast("Mapping[str, object]", named)


R = TypeVar("R")


def _require(value: object, kind: type[R], where: str) -> R:
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise _refused(where, kind.__name__, value)
    return cast("R", value)


def _refused(where: str, expected: str, value: object) -> BadRequest:
    came = repr(value)
    return BadRequest(
        f"import: {where}: expected {expected}, got {came[:_MAX_SHOWN]}{'...' * (len(came) > _MAX_SHOWN)}"
    )
