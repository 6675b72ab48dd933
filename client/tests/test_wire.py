"""The framing, byte for byte, and messages of people who mean harm."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from worldkv_client.errors import BadRequest, MessageTooLarge
from worldkv_client.wire import (
    Encoding,
    InferRequest,
    ResetRequest,
    pack,
    parse_request,
    read_request,
    unpack,
    unpack_encoded,
)

MAX = 1 << 20

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
BAD_ND = {
    "objects": (np.array([{}, 1], object), "an array of objects is a pickle, which is never opened"),
    "a record": (np.zeros(2, [("a", "<f4"), ("b", "<i4")]), "got a record; send its columns as fields"),
    "nested records": (np.zeros(1, [("a", [("b", "<f4", (2, 2))])]), "got a record"),
    "bytes of no type": (np.zeros(1, "V8"), "got a record"),
    "too little data": ({"shape": [3]}, r"float32 \[3\] takes 12 bytes, got 8"),
    "overflow": ({"shape": [2**62, 2**62]}, r"takes \d+ bytes, got 8"),
    "negative size": ({"shape": [-2]}, r"list of sizes as its shape, got \[-2\]"),
    "no shape": ({"shape": None}, "list of sizes as its shape, got None"),
    "a description": ({"type": [["a", "<f4"]]}, "got a record"),
    "a type of many": ({"type": "<f4,<f4"}, "expected a dtype"),
    "objects by type": ({"type": "|O"}, "expected a dtype"),
    "a huge item": ({"type": "<U999999999"}, "expected a dtype"),
    "a number as type": ({"type": 3}, "expected a dtype"),
    "another kind": ({"kind": b"X"}, "got a record"),
    "a kind in text": ({"kind": "O"}, "never opened"),
    "a scalar of two": ({"nd": False}, "float32 \\[\\] takes 4 bytes, got 8"),
    "a scalar's object": ({"nd": False, "type": "|O"}, "expected a dtype"),
    "no characters": ({"type": "<U1", "data": b"\xff" * 8}, "something that is no character"),
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


def nd_map(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return msgpack_numpy.packb(value)
    fields = {"nd": True, "data": b"\x00" * 8, "type": "<f4", "kind": b"", "shape": [2]} | value
    return msgpack.packb({key.encode(): field for key, field in fields.items()})


class TestMsgpackNumpy:
    """The package's own encoding, which other policy servers' clients use."""

    @pytest.mark.parametrize("name", [name for name in VALUES if name != "time array"])  # it cannot send times
    def test_what_the_package_packs_is_read_and_answered_in_kind(self, name: str) -> None:
        value = VALUES[name]
        packed = msgpack_numpy.packb(value)
        back, encoding = unpack_encoded(packed, max_bytes=MAX)
        assert same(back, msgpack_numpy.unpackb(packed))
        assert pack(value, Encoding.MSGPACK_NUMPY) == packed, "byte for byte"
        has_arrays = b"\xc4\x02nd" in packed
        assert encoding is (Encoding.MSGPACK_NUMPY if has_arrays else Encoding.OPENPI)

    def test_our_own_encoding_is_told_apart(self) -> None:
        for value in (VALUES["map"], VALUES["nested"], {"prompt": "p"}, None):
            assert unpack_encoded(pack(value), max_bytes=MAX)[1] is Encoding.OPENPI
        both = msgpack.packb({"a": msgpack.unpackb(pack(np.zeros(2))), "b": msgpack.unpackb(nd_map({}))})
        assert unpack_encoded(both, max_bytes=MAX)[1] is Encoding.OPENPI

    @pytest.mark.parametrize("value", [1 + 2j, np.complex64(1 + 2j), np.complex128(2j), np.full(3, 1j)], ids=repr)
    def test_complex_numbers_are_read_for_whatever_refuses_them_by_name(self, value: Any) -> None:
        back = unpack(msgpack_numpy.packb({"state": value}), max_bytes=MAX)["state"]
        assert np.array_equal(back, value)
        with pytest.raises(BadRequest, match=r"^state: cannot be sent"):
            pack({"state": back}, Encoding.MSGPACK_NUMPY)

    @pytest.mark.parametrize("text", ["", "x", "1" * 100, None, b"1j", "__import__('os')"], ids=repr)
    def test_what_is_no_complex_number_is_refused(self, text: Any) -> None:
        with pytest.raises(BadRequest, match=r"^complex: expected a text such as"):
            unpack(msgpack.packb({b"complex": True, b"data": text}), max_bytes=MAX)

    @pytest.mark.parametrize(("value", "reason"), BAD_ND.values(), ids=BAD_ND)
    def test_what_is_not_safe_is_refused_with_a_reason(self, value: Any, reason: str) -> None:
        with pytest.raises(BadRequest, match=f"^array: .*{reason}"):
            unpack(nd_map(value), max_bytes=MAX)

    def test_a_pickle_is_never_opened(self, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[Any, ...]:
                return (Path(tmp_path / "it_ran").touch, ())

        packed = msgpack_numpy.packb(np.array([Bomb()], object))
        with pytest.raises(BadRequest, match="never opened"):
            unpack(packed, max_bytes=MAX)
        assert list(tmp_path.iterdir()) == []

    def test_arrays_are_read_only_views(self) -> None:
        array = unpack(msgpack_numpy.packb(np.zeros(4)), max_bytes=MAX)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1

    def test_a_map_that_only_looks_like_it_stays_a_map(self) -> None:
        for value in ({"nd": True, "type": "a", "data": "b"}, {b"nd": 3, b"type": "<f4"}, {b"complex": 1, b"data": ""}):
            assert unpack(msgpack.packb(value), max_bytes=MAX) == value

    def test_a_request_keeps_its_encoding_for_the_reply(self) -> None:
        message = {"endpoint": "infer", "session_id": np.array([7]), "observation/wrist_image_left": np.zeros(3)}
        for encoding, packb in ((Encoding.MSGPACK_NUMPY, msgpack_numpy.packb), (Encoding.OPENPI, pack)):
            request = read_request(packb(message), max_bytes=MAX)
            assert isinstance(request, InferRequest)
            assert (request.session_id, request.encoding) == ("7", encoding)
        assert read_request(msgpack_numpy.packb({"endpoint": "reset"}), max_bytes=MAX) == ResetRequest()

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.dictionaries(
            st.sampled_from([b"nd", b"type", b"kind", b"shape", b"data", b"complex"]),
            st.one_of(
                st.booleans(),
                st.sampled_from(["<f4", "|u1", "|S3", "<U2", "<M8[s]", "<c8", "|b1", "|O", "<f2,<i4", "(1+2j)"]),
                st.binary(max_size=24),
                st.integers(-(2**63), 2**64 - 1),
                st.none(),
                st.lists(st.one_of(st.integers(-2, 2**40), st.text(max_size=3)), max_size=4),
            ),
        )
    )
    def test_any_fields_raise_nothing_but_bad_request(self, fields: dict[bytes, Any]) -> None:
        unpack_and_parse(msgpack.packb({b"nd": True} | fields))
        unpack_and_parse(msgpack.packb(fields))


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


def unpack_and_parse(data: bytes) -> None:
    try:
        parse_request(unpack(data, max_bytes=MAX))
    except BadRequest as error:
        told = str(error)
    else:
        return
    assert 0 < len(told) < 4000


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
