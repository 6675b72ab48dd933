"""The framing, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from wire_values import MAX, VALUES, same

from worldkv_client.errors import BadRequest
from worldkv_client.wire import (
    pack,
    unpack,
)


class TestFraming:
    @pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
    def test_bytes_are_those_of_the_stock_openpi_client(self, value: Any) -> None:
        stock: ModuleType = pytest.importorskip(
            "openpi_client.msgpack_numpy",
            reason="openpi-client is not installed: pip install --no-deps openpi-client==0.1.2",
        )
        assert pack(value) == stock.packb(value)
        assert same(stock.unpackb(pack(value)), unpack(stock.packb(value), max_bytes=MAX))

    @pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
    def test_what_is_packed_comes_back(self, value: Any) -> None:
        plain = {"double scalar": float, "str scalar": str}  # msgpack takes them for Python's own
        back = unpack(pack(value), max_bytes=MAX)
        name = next(name for name, known in VALUES.items() if known is value)
        assert same(plain.get(name, lambda same: same)(value), back)

    @given(
        hnp.arrays(
            st.one_of(
                hnp.boolean_dtypes(),
                hnp.integer_dtypes(),
                hnp.unsigned_integer_dtypes(),
                hnp.floating_dtypes(),
            ),
            hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
        )
    )
    def test_any_array_of_numbers_comes_back(self, array: np.ndarray) -> None:
        assert same(unpack(pack(array), max_bytes=MAX), array)

    def test_an_array_is_a_map_with_byte_keys(self) -> None:
        raw = msgpack.unpackb(pack(np.array([[1, 2]], np.uint8)))
        assert raw == {b"__ndarray__": True, b"data": b"\x01\x02", b"dtype": "|u1", b"shape": [1, 2]}
        assert msgpack.unpackb(pack(np.int8(5))) == {b"__npgeneric__": True, b"data": 5, b"dtype": "|i1"}

    def test_marker_keys_may_be_text(self) -> None:
        array = {"__ndarray__": True, "data": b"\x01\x02", "dtype": "|u1", "shape": [2]}
        scalar = {"__npgeneric__": True, "data": 5, "dtype": "|i1"}
        back = unpack(msgpack.packb([array, scalar]), max_bytes=MAX)
        assert same(back, [np.array([1, 2], np.uint8), np.int8(5)])

    def test_arrays_are_read_only_views_of_the_message(self) -> None:
        array = unpack(pack(np.zeros(4)), max_bytes=MAX)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1

    def test_a_large_image_is_not_copied_once_it_is_unpacked(self) -> None:
        data = pack({"image": np.zeros((4, 720, 1280, 3), np.uint8)})
        tracemalloc = pytest.importorskip("tracemalloc", reason="this Python cannot say what it allocates")
        tracemalloc.start()
        unpack(data, max_bytes=1 << 26)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.1 * len(data), "one copy, which msgpack makes"

    @pytest.mark.parametrize(
        "value",
        [
            np.zeros(2, complex),
            np.complex64(1),
            np.array([object()]),
            np.zeros(1, [("a", "<f4")]),
            object(),
            {1, 2},
        ],
        ids=["complex", "complex scalar", "objects", "record", "object", "set"],
    )
    def test_what_cannot_be_sent_is_named(self, value: Any) -> None:
        with pytest.raises(BadRequest, match=r"^state: cannot be sent: .* not part of the format"):
            pack({"prompt": "pick", "state": value})
        with pytest.raises(BadRequest, match=r"^message: cannot be sent"):
            pack(value)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("worldkv_client.wire", "{'torch', 'websockets', 'starlette'}"),
        ("worldkv_client.client", "{'torch', 'starlette', 'uvicorn'}"),
    ],
)
def test_importing_the_robot_s_side_stays_light(module: str, heavy: str) -> None:
    script = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
