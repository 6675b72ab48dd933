"""Messages of people who mean harm."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from wire_values import MAX, VALUES, unpack_and_parse

from worldkv_client.errors import BadRequest, MessageTooLarge
from worldkv_client.wire import (
    pack,
    unpack,
)


def array_map(**changes: Any) -> bytes:
    fields = {"__ndarray__": True, "data": b"\x00" * 8, "dtype": "<f4", "shape": [2]} | changes
    return msgpack.packb({key.encode(): value for key, value in fields.items()})


BAD_ARRAYS = {
    "too little data": (array_map(data=b"\x00" * 7), r"float32 \[2\] takes 8 bytes, got 7"),
    "too much data": (array_map(data=b"\x00" * 9), r"takes 8 bytes, got 9"),
    "no data": (array_map(data=None), "expected bytes as its data, got NoneType"),
    "text as data": (array_map(data="12345678"), "expected bytes as its data, got str"),
    "negative size": (array_map(shape=[-2]), r"list of sizes as its shape, got \[-2\]"),
    "bool as size": (array_map(shape=[True, 2]), "list of sizes as its shape"),
    "float as size": (array_map(shape=[2.0]), "list of sizes as its shape"),
    "no shape": (array_map(shape=None), "list of sizes as its shape, got None"),
    "a number as shape": (array_map(shape=2), "list of sizes as its shape, got 2"),
    "overflow": (array_map(shape=[2**62, 2**62]), r"takes \d+ bytes, got 8"),
    "overflow behind a zero": (array_map(shape=[0, 2**62, 2**62], data=b""), "too big"),
    "too many axes": (array_map(shape=[1] * 100, data=b"\x00" * 4), r"a list of 100"),
    "absurdly many axes": (array_map(shape=[2**62] * 4000), "a list of 4000"),
    "objects": (array_map(dtype="|O"), r"expected a dtype such as .*, got '\|O'"),
    "complex": (array_map(dtype="<c8"), "expected a dtype"),
    "void": (array_map(dtype="|V8"), "expected a dtype"),
    "a record": (array_map(dtype="<f4,<f4"), "expected a dtype"),
    "a deprecated name": (array_map(dtype="a8"), "expected a dtype"),
    "a python name": (array_map(dtype="float"), "expected a dtype"),
    "no size": (array_map(dtype="|S0", shape=[2**40], data=b""), "expected a dtype"),
    "a huge item": (array_map(dtype="<U999999999"), "expected a dtype"),
    "an unknown unit": (array_map(dtype="<M8[fortnight]"), "expected a dtype"),
    "bytes as dtype": (array_map(dtype=b"<f4"), "expected a dtype"),
    "no characters": (array_map(dtype="<U1", data=b"\xff" * 8), "something that is no character"),
}


BAD_SCALARS = {
    "out of range": {"data": 300, "dtype": "|u1"},
    "text for a number": {"data": "3", "dtype": "<f4"},
    "float for an int": {"data": 1.5, "dtype": "<i4"},
    "int for a bool": {"data": 1, "dtype": "|b1"},
    "nothing": {"data": None, "dtype": "<f4"},
    "objects": {"data": 1, "dtype": "|O"},
    "complex": {"data": 1.0, "dtype": "<c8"},
    "time out of range": {"data": 2**63, "dtype": "<M8[s]"},
}


class TestHostileMessages:
    @pytest.mark.parametrize(("data", "reason"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
    def test_a_bad_array_is_refused_with_a_reason(self, data: bytes, reason: str) -> None:
        with pytest.raises(BadRequest, match=f"^array: .*{reason}"):
            unpack(data, max_bytes=MAX)

    @pytest.mark.parametrize("fields", BAD_SCALARS.values(), ids=BAD_SCALARS)
    def test_a_bad_scalar_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(BadRequest, match=r"^(numpy scalar: expected a value for|array: expected a dtype)"):
            unpack(msgpack.packb({b"__npgeneric__": True} | fields), max_bytes=MAX)

    def test_a_float_that_does_not_fit_becomes_infinite_without_a_warning(self) -> None:
        scalar = unpack(msgpack.packb({b"__npgeneric__": True, b"data": 1e300, b"dtype": "<f2"}), max_bytes=MAX)
        assert np.isinf(scalar)

    def test_a_message_over_the_limit_is_refused_before_it_is_read(self) -> None:
        with pytest.raises(MessageTooLarge, match="expected at most 100 bytes, got 101"):
            unpack(b"\xc1" * 101, max_bytes=100)

    @pytest.mark.parametrize("not_bytes", ["text", None, 3])
    def test_what_is_not_binary_is_refused(self, not_bytes: Any) -> None:
        with pytest.raises(BadRequest, match="expected a binary frame"):
            unpack(not_bytes, max_bytes=100)

    @pytest.mark.parametrize("depth", [17, 100, 1000, 100_000])
    @pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
    def test_deep_nesting_is_refused(self, depth: int, level: bytes) -> None:
        assert unpack(level * 16 + b"\xc0", max_bytes=MAX) is not None
        with pytest.raises(BadRequest, match="at most 16 levels of lists and maps"):
            unpack(level * depth + b"\xc0", max_bytes=MAX)

    @pytest.mark.parametrize(
        "data",
        [
            struct.pack(">BI", 0xDD, 5000) + b"\xc0" * 5000,
            struct.pack(">BI", 0xDD, 2**32 - 1),
            struct.pack(">BI", 0xDF, 2**32 - 1),
            struct.pack(">BI", 0xC6, 2**32 - 1),
            (struct.pack(">BI", 0xDD, 4000) + b"\x80" * 3999) * 100 + b"\xc0",
            struct.pack(">BH", 0xDC, 4000) + (struct.pack(">BH", 0xDC, 4000) + b"\x80" * 4000) * 4000,
        ],
        ids=["long list", "huge list", "huge map", "huge bytes", "lists in lists", "millions of maps"],
    )
    def test_a_small_message_cannot_take_much_memory(self, data: bytes) -> None:
        tracemalloc = pytest.importorskip("tracemalloc", reason="this Python cannot say what it allocates")
        tracemalloc.start()
        try:
            with pytest.raises(BadRequest):
                unpack(data, max_bytes=1 << 26)
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()

    @given(st.binary(max_size=300))
    @example(b"")
    @example(b"\x81\xd6\xff\x00\x00\x00\x00\xc0")  # a timestamp as a key
    @example(b"\xd7\xff\xff\xff\xff\xff\xff\xff\xff\xff")  # a timestamp with too many nanoseconds
    @example(b"\x81\xc4\x01a\xc0")
    @example(b"\xa1\xff")
    def test_random_bytes_raise_nothing_but_bad_request(self, data: bytes) -> None:
        unpack_and_parse(data)

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def test_damaged_messages_raise_nothing_but_bad_request(self, data: st.DataObject) -> None:
        whole = bytearray(pack(VALUES["map"] | VALUES["nested"] | {"s": VALUES["str array"], "x": np.int8(1)}))
        for _ in range(data.draw(st.integers(1, 4))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        unpack_and_parse(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
        unpack_and_parse(bytes(whole))

    @settings(suppress_health_check=[HealthCheck.too_slow])  # Hypothesis builds its tables of characters once
    @given(
        st.dictionaries(
            st.sampled_from(["__ndarray__", "__npgeneric__", "data", "dtype", "shape"]).map(str.encode),
            st.one_of(
                st.just(True),
                st.sampled_from(["<f4", "|u1", "|S3", "<U2", "<M8[s]", "<m8", "|b1", "<f16", "|O", "<f2,<i4"]),
                st.text(max_size=6),
                st.binary(max_size=24),
                st.integers(-(2**63), 2**64 - 1),
                st.floats(),
                st.none(),
                st.lists(st.integers(-2, 2**40), max_size=4),
            ),
        ).map(lambda fields: {b"__ndarray__": True} | fields)
    )
    def test_array_maps_with_any_fields_raise_nothing_but_bad_request(self, fields: dict[bytes, Any]) -> None:
        unpack_and_parse(msgpack.packb(fields))
        unpack_and_parse(msgpack.packb({b"__npgeneric__": True} | {k: fields[k] for k in fields if b"__" not in k}))

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.dictionaries(
            st.sampled_from(["endpoint", "session_id", "sequence", "reset", "resume", "prompt"]),
            st.one_of(
                st.sampled_from(["infer", "reset", True, np.array([3]), np.zeros((2, 2)), np.int8(3), b"\xff"]),
                st.text(max_size=5),
                st.integers(-(2**63), 2**64 - 1),
                st.lists(st.none(), max_size=2),
            ),
        )
    )
    def test_requests_with_any_fields_raise_nothing_but_bad_request(self, message: dict[str, Any]) -> None:
        unpack_and_parse(pack(message))
