"""What the tests of the wire send and read: values of every kind, and what a server does with a message."""

from __future__ import annotations

from typing import Any

import numpy as np

from worldkv_client.errors import BadRequest
from worldkv_client.wire import (
    parse_request,
    unpack,
)

MAX = 1 << 20  # bytes of a message

VALUES: dict[str, Any] = {
    "none": None,
    "int": 1,
    "big int": 2**63,
    "float": 1.5,
    "text": "größer",
    "bytes": b"\x00\xff",
    "list": [1, 2.0, "three"],
    "map": {"observation/wrist_image_left": np.zeros((4, 6, 3), np.uint8), "prompt": "pick"},
    "bool scalar": np.bool_(True),
    "int scalar": np.int64(-3),
    "float scalar": np.float32(1.5),
    "double scalar": np.float64(1.5),
    "str scalar": np.str_("asdf"),
    "0-d array": np.array(1.0),
    "str array": np.array(["asdf", "qwer"]),
    "bytes array": np.array([b"asdf", b"q"]),
    "bool array": np.array([True, False]),
    "big-endian array": np.arange(3, dtype=">i4"),
    "special floats": np.array([np.nan, np.inf, -np.inf]),
    "fortran order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(12, dtype=np.int16).reshape(3, 4)[::2, ::-1],
    "empty array": np.zeros((0, 7), np.float32),
    "time array": np.array(["2026-01-01"], "<M8[D]"),
    "nested": {"a": [{"b": np.arange(3)}, [np.float16(2)]]},
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def unpack_and_parse(data: bytes) -> None:
    try:
        parse_request(unpack(data, max_bytes=MAX))
    except BadRequest as error:
        told = str(error)
    else:
        return
    assert 0 < len(told) < 4000
