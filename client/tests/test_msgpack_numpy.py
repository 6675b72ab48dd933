"""The encoding of the package `msgpack-numpy`: read where it is safe, and answered in kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_values import MAX, VALUES, same, unpack_and_parse

from worldkv_client.errors import BadRequest
from worldkv_client.wire import (
    Encoding,
    InferRequest,
    ResetRequest,
    pack,
    read_request,
    unpack,
    unpack_encoded,
)

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
