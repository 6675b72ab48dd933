"""msgpack for numpy, byte for byte openpi's or the package msgpack-numpy's: `pack` and `unpack`. Pure functions.

openpi's: an array is a map with the byte keys `__ndarray__` (true), `data` (C order), `dtype` (numpy's `.str`),
`shape`; a numpy scalar one with `__npgeneric__`, `data`, `dtype`. msgpack-numpy's: `nd` (true; false for a scalar),
`type`, `kind` (empty), `shape`, `data`; a Python complex is `complex` (true) and `data`, its text. Pickled objects and
records, which that package sends as well, are refused. Unpacking bounds what a message may cost, and the only error it
raises is BadRequest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgpack
import numpy as np

from worldkv_client.errors import BadRequest, MessageTooLarge

DEFAULT_MAX_BYTES = 64 * 1024 * 1024

_MAX_DEPTH = 16
_TOO_DEEP = f"message: expected at most {_MAX_DEPTH} levels of lists and maps, got more"
_MAX_LIST = 4096  # per list: msgpack allocates what a header announces, before it sees the items
_MAX_MAP = 1024
_MAX_VALUES = 65536  # in all lists and maps of a message; arrays count as one value each
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|16)|[SU][1-9]\d{0,8}|[mM]8(?:\[\w{1,16}\])?)")
_COMPLEX = re.compile(r"[<>|=]?c(?:8|16)")  # of msgpack-numpy's; whatever reads the field refuses it by its name
_REFUSED_KINDS = "VOc"
_MAX_COMPLEX_CHARACTERS = 64
_VALUE_TYPES: Mapping[str, tuple[type, ...]] = {
    "b": (bool,),
    "i": (int,),
    "u": (int,),
    "f": (float, int),
    "S": (bytes,),
    "U": (str,),
    "m": (int,),
    "M": (int,),
}


class Encoding(str, Enum):
    """How arrays stand in a message."""

    OPENPI = "openpi"
    MSGPACK_NUMPY = "msgpack-numpy"


def pack(obj: Any, encoding: Encoding = Encoding.OPENPI) -> bytes:
    """`obj` (None, bool, int, float, str, bytes, list, dict, numpy arrays and scalars) as msgpack.

    Raises BadRequest, which names the field, for what cannot be sent.
    """
    try:
        packed: bytes = msgpack.packb(obj, default=_ENCODERS[encoding])
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadRequest(f"{_unpackable_field(obj)}cannot be sent: {error}") from None
    return packed


def unpack(data: Any, *, max_bytes: int) -> Any:
    """What `pack` made `data` from; arrays are read-only views. Raises BadRequest, MessageTooLarge."""
    return unpack_encoded(data, max_bytes=max_bytes)[0]


def unpack_encoded(data: Any, *, max_bytes: int) -> tuple[Any, Encoding]:
    """What `unpack` returns, and the encoding in which an answer is understood. Raises like `unpack`."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise BadRequest(f"message: expected a binary frame of msgpack, got {type(data).__name__}")
    if len(data) > max_bytes:
        raise MessageTooLarge(
            f"message: expected at most {max_bytes} bytes, got {len(data)}; send fewer or smaller frames"
        )
    budget = _Budget()
    try:
        obj = msgpack.unpackb(
            data,
            object_hook=budget.map,
            list_hook=budget.list,
            max_array_len=_MAX_LIST,
            max_map_len=_MAX_MAP,
        )
    except BadRequest:
        raise
    except msgpack.StackError:
        raise BadRequest(_TOO_DEEP) from None
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        detail = str(error) or type(error).__name__
        raise BadRequest(f"message: expected one msgpack value, got {len(data)} bytes: {detail}") from None
    _check_depth(obj)
    return obj, Encoding.MSGPACK_NUMPY if budget.encodings == {Encoding.MSGPACK_NUMPY} else Encoding.OPENPI


def _encode(obj: Any) -> Any:
    """msgpack's hook for what it does not know."""
    _require_known(obj)
    if isinstance(obj, np.ndarray):
        return {b"__ndarray__": True, b"data": obj.tobytes(), b"dtype": obj.dtype.str, b"shape": obj.shape}
    if isinstance(obj, np.generic):
        return {b"__npgeneric__": True, b"data": obj.item(), b"dtype": obj.dtype.str}
    raise AssertionError


def _encode_nd(obj: Any) -> Any:
    """The same, as msgpack-numpy has it."""
    _require_known(obj)
    if isinstance(obj, np.ndarray):
        return {b"nd": True, b"type": obj.dtype.str, b"kind": b"", b"shape": obj.shape, b"data": obj.tobytes()}
    return {b"nd": False, b"type": obj.dtype.str, b"data": obj.tobytes()}


_ENCODERS = {Encoding.OPENPI: _encode, Encoding.MSGPACK_NUMPY: _encode_nd}


def _require_known(obj: Any) -> None:
    if not isinstance(obj, (np.ndarray, np.generic)):
        raise TypeError(f"{type(obj).__module__}.{type(obj).__qualname__} is not part of the format")
    if obj.dtype.kind in _REFUSED_KINDS:
        raise ValueError(f"arrays of dtype {obj.dtype} are not part of the format")


def _unpackable_field(obj: Any) -> str:
    """The first field of a map that cannot be packed, as the head of a message."""
    for key, value in obj.items() if isinstance(obj, Mapping) else ():
        try:
            msgpack.packb({key: value}, default=_encode)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return f"{key}: "
    return "message: "


class _Budget:
    """msgpack's hooks for one message: builds arrays, and counts the values of lists and maps."""

    def __init__(self) -> None:
        self._left = _MAX_VALUES
        self.encodings: set[Encoding] = set()

    def list(self, items: list[Any]) -> list[Any]:
        self._spend(len(items))
        return items

    def map(self, items: dict[Any, Any]) -> Any:
        self._spend(1 + len(items))
        for marker, decode in (("__ndarray__", _decode_array), ("__npgeneric__", _decode_scalar)):
            if items.get(marker.encode(), items.get(marker)) is True:
                self.encodings.add(Encoding.OPENPI)
                fields = [items.get(name.encode(), items.get(name)) for name in ("data", "dtype", "shape")]
                return decode(*fields)
        if isinstance(items.get(b"nd"), bool) and b"type" in items:
            self.encodings.add(Encoding.MSGPACK_NUMPY)
            return _decode_nd(items)
        if items.get(b"complex") is True:
            self.encodings.add(Encoding.MSGPACK_NUMPY)
            return _decode_complex(items.get(b"data"))
        return items

    def _spend(self, num_values: int) -> None:
        self._left -= num_values
        if self._left < 0:
            raise BadRequest(f"message: more than {_MAX_VALUES} values in lists and maps; send numbers as arrays")


def _decode_array(data: Any, dtype_text: Any, shape: Any) -> np.ndarray:
    return _array(data, _decode_dtype(dtype_text), shape)


def _array(data: Any, dtype: np.dtype[Any], shape: Any) -> np.ndarray:
    if not isinstance(data, bytes):
        raise BadRequest(f"array: expected bytes as its data, got {type(data).__name__}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise BadRequest(f"array: expected a list of sizes as its shape, got {short(shape)}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes != len(data):
        raise BadRequest(f"array: {dtype} {short(shape)} takes {short(num_bytes)} bytes, got {len(data)}")
    try:
        array: np.ndarray = np.ndarray(shape, dtype, buffer=data)
    except (ValueError, TypeError, OverflowError) as error:  # too many axes, or a huge one beside a zero
        raise BadRequest(f"array: {dtype} {short(shape)}: {error}") from None
    if dtype.kind == "U" and array.size and array.reshape(-1).view(f"{dtype.str[0]}u4").max() > 0x10FFFF:
        raise BadRequest("array: a text array holds something that is no character")
    return array


def _decode_nd(items: dict[Any, Any]) -> Any:
    """An array or scalar of msgpack-numpy's."""
    kind, dtype_text = items.get(b"kind", b""), items[b"type"]
    if kind in (b"O", "O"):
        raise BadRequest("array: an array of objects is a pickle, which is never opened; send numbers, or lists")
    if kind not in (b"", "") or isinstance(dtype_text, list):
        raise BadRequest("array: expected an array of one type, got a record; send its columns as fields of their own")
    if isinstance(dtype_text, str) and _COMPLEX.fullmatch(dtype_text):
        dtype = np.dtype(dtype_text)
    else:
        dtype = _decode_dtype(dtype_text)
    if items[b"nd"]:
        return _array(items.get(b"data"), dtype, items.get(b"shape"))
    return _array(items.get(b"data"), dtype, [])[()]


def _decode_complex(text: Any) -> complex:
    try:
        if not isinstance(text, str) or len(text) > _MAX_COMPLEX_CHARACTERS:
            raise ValueError
        return complex(text)
    except ValueError:
        raise BadRequest(f"complex: expected a text such as '(1+2j)', got {short(text)}") from None


def _decode_scalar(data: Any, dtype_text: Any, _shape: Any) -> np.generic:
    dtype = _decode_dtype(dtype_text)
    if type(data) not in _VALUE_TYPES[dtype.kind]:
        raise BadRequest(f"numpy scalar: expected a value for {dtype}, got {type(data).__name__}")
    try:
        if dtype.kind in "iu" and not np.iinfo(dtype).min <= data <= np.iinfo(dtype).max:
            raise OverflowError("out of its range")  # numpy 1 would wrap it
        with np.errstate(over="ignore"):  # a float that becomes inf here is the receiver's to refuse
            scalar: Any = np.array(data, dtype)[()] if dtype.kind in "mM" else dtype.type(data)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"numpy scalar: expected a value for {dtype}: {error}") from None
    assert isinstance(scalar, np.generic)
    return scalar


def _decode_dtype(text: Any) -> np.dtype[Any]:
    if isinstance(text, str) and _DTYPE.fullmatch(text):
        try:
            dtype = np.dtype(text)
        except (ValueError, TypeError):  # a unit of time or a size that numpy does not have
            pass
        else:
            if dtype.itemsize > 0:  # an older numpy takes any size of a text, and then counts below zero
                return dtype
    raise BadRequest(
        f"array: expected a dtype such as '|u1' or '<f4' (kinds b, i, u, f, S, U, m, M), got {short(text)}"
    )


def _check_depth(obj: Any) -> None:
    level = [obj]  # the lists and maps of one depth
    for _ in range(_MAX_DEPTH + 1):
        level = [value for value in level if isinstance(value, (dict, list))]
        if not level:
            return
        level = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
    raise BadRequest(_TOO_DEEP)


def short(value: Any) -> str:
    """What a client sent, for a message of bounded length."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number beyond all bounds"
    if isinstance(value, dict) or (isinstance(value, list) and len(value) > 8):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (str, bytes)) and len(value) > 80:
        return f"{value[:80]!r}..."
    return f"[{', '.join(map(short, value))}]" if isinstance(value, list) else repr(value)[:160]
