"""What the two dialects' requests mean, and how they are answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from worldkv_client import errors
from worldkv_client.errors import AdmissionRefused, BadRequest, WorldKVError
from worldkv_client.wire import (
    CONTROL_FIELDS,
    CloseCode,
    Dialect,
    InferRequest,
    ResetRequest,
    close_code,
    error_text,
    infer_reply,
    normalise_session_id,
    observe_reply,
    parse_request,
)
from worldkv_client.wire.robots import require_no_near_miss


class TestRequests:
    def test_roboarena_s_names_are_kept_and_control_keys_taken_out(self) -> None:
        message = {
            "endpoint": "infer",
            "session_id": "a",
            "observation/exterior_image_1_left": 1,
            "prompt": "p",
        }
        request = parse_request(message)
        assert request == InferRequest(
            Dialect.ROBOARENA, {"observation/exterior_image_1_left": 1, "prompt": "p"}, session_id="a"
        )

    def test_openpi_s_only_exterior_camera_is_roboarena_s_first(self) -> None:
        request = parse_request({"observation/exterior_image_1_left": 1, "observation/wrist_image_left": 2})
        assert request == InferRequest(
            Dialect.OPENPI, {"observation/exterior_image_0_left": 1, "observation/wrist_image_left": 2}
        )

    @pytest.mark.parametrize("value", [7, "7", b"7", np.int64(7), np.array([7])], ids=repr)
    @pytest.mark.parametrize("endpoint", [{"endpoint": "infer"}, {}], ids=["roboarena", "openpi"])
    def test_an_environment_is_named_as_a_session_is(self, value: Any, endpoint: dict[str, Any]) -> None:
        request = parse_request({**endpoint, "env_id": value, "prompt": "p"})
        assert isinstance(request, InferRequest)
        assert (request.env_id, request.session_id, request.observation) == ("7", None, {"prompt": "p"})
        assert parse_request({"endpoint": "reset", "env_id": value}) == ResetRequest(env_id="7")

    @pytest.mark.parametrize("value", ["", True, 1.5, [], b"\xff"], ids=repr)
    def test_what_is_no_environment_s_name_is_refused(self, value: Any) -> None:
        for message in ({}, {"endpoint": "infer"}, {"endpoint": "reset"}):
            with pytest.raises(BadRequest, match=r"^env_id: expected"):
                parse_request({**message, "env_id": value})

    def test_a_request_s_prompt_is_the_observation_s(self) -> None:
        assert InferRequest(Dialect.OPENPI, {"prompt": "p"}).prompt == "p"
        assert InferRequest(Dialect.OPENPI, {}).prompt is None

    @pytest.mark.parametrize(
        ("message", "words"),
        [
            ({"endpoint": "reset", "sesion_id": "a"}, "sesion_id: nothing reads this field; did you mean session_id?"),
            ({"endpoint": "reset", "env-id": "a"}, "env-id: nothing reads this field; did you mean env_id?"),
            ({"endpont": "reset"}, "endpont: nothing reads this field; did you mean endpoint?"),
            ({"end_point": "infer", "session_id": "a"}, "end_point: nothing reads this field; did you mean endpoint?"),
        ],
    )
    def test_a_misspelling_that_would_change_the_session_is_refused(self, message: dict[str, Any], words: str) -> None:
        with pytest.raises(BadRequest) as refused:
            parse_request(message)
        assert str(refused.value) == words

    def test_a_reset_may_carry_what_nothing_reads(self) -> None:
        reset = {"endpoint": "reset", "reason": "done", "prompt": "p", "observation/wrist_image_left": np.zeros(3)}
        unread = ("reason", "prompt", "observation/wrist_image_left")
        assert parse_request(reset) == ResetRequest(unread=unread)

    def test_control_keys_are_read(self) -> None:
        request = parse_request({"sequence": 3, "reset": True, "resume": np.bool_(True), "prompt": "p"})
        assert request == InferRequest(Dialect.OPENPI, {"prompt": "p"}, sequence=3, restart=True, resume=True)

    def test_a_reset_may_name_a_session(self) -> None:
        assert parse_request({"endpoint": "reset"}) == ResetRequest()
        assert parse_request({"endpoint": "reset", "session_id": 5}) == ResetRequest("5")

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("robot", "robot"),
            (b"robot", "robot"),
            (np.str_("robot"), "robot"),
            (np.bytes_(b"robot"), "robot"),
            (17, "17"),
            (np.int32(17), "17"),
            (np.array([17]), "17"),
            (np.array(17), "17"),
            (np.array(["robot"]), "robot"),
            (np.array([[b"robot"]]), "robot"),
            (-1, "-1"),
            (0, "0"),
        ],
    )
    def test_a_session_id_is_normalised(self, value: Any, text: str) -> None:
        assert normalise_session_id(value) == text

    @pytest.mark.parametrize(
        "value",
        [
            "",
            "a" * 257,
            "a\nb",
            b"\xff",
            True,
            1.0,
            None,
            [],
            {},
            np.array([1, 2]),
            np.zeros(0, int),
            np.array([1.0]),
        ],
        ids=repr,
    )
    def test_what_is_no_session_id_is_refused(self, value: Any) -> None:
        with pytest.raises(BadRequest, match=r"^session_id: expected"):
            normalise_session_id(value)


class TestReplies:
    ACTIONS = np.ones((24, 8), np.float32)

    def test_roboarena_gets_the_bare_actions(self) -> None:
        reply = infer_reply(InferRequest(Dialect.ROBOARENA, {}, sequence=1), self.ACTIONS, {}, ("warning",))
        assert reply is self.ACTIONS

    def test_openpi_gets_a_map(self) -> None:
        reply = infer_reply(InferRequest(Dialect.OPENPI, {}), self.ACTIONS, {"infer_ms": 1.0})
        assert reply == {"actions": self.ACTIONS, "server_timing": {"infer_ms": 1.0}}
        reply = infer_reply(InferRequest(Dialect.OPENPI, {}, sequence=0), self.ACTIONS, {}, ("dark",))
        assert (reply["sequence"], reply["warnings"]) == (0, ["dark"])

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (errors.BadRequest, 4001),
            (errors.SessionNotFound, 4008),
            (errors.SessionEnded, 4008),
            (errors.SessionBusy, 4009),
            (errors.MessageTooLarge, 4013),
            (errors.AdmissionRefused, 4029),
            (errors.Unauthorised, 4401),
            (errors.EngineStopped, 1011),
            (errors.OutOfBlocks, 1011),
            (errors.RequestTimedOut, 4504),
            (errors.WorldKVError, 1011),
        ],
    )
    def test_every_error_has_its_close_code(self, error: type[WorldKVError], code: int) -> None:
        assert close_code(error.code) == CloseCode(code)

    def test_an_error_s_text_has_its_code_its_message_and_an_id(self) -> None:
        assert error_text(BadRequest("prompt: missing"), "1f") == "bad_request: prompt: missing [error 1f]"
        assert error_text(AdmissionRefused("full", 250), "1f") == (
            "admission_refused: full (retry_after_ms=250) [error 1f]"
        )

    def test_an_unexpected_error_s_text_tells_nothing_of_the_inside(self) -> None:
        assert error_text(KeyError("secret"), "1f") == "internal: the server failed on this request [error 1f]"


def test_frames_ahead_of_a_request_are_marked_in_either_dialect() -> None:
    fields = {"observation/wrist_image_left": 2}
    roboarena = parse_request({"endpoint": "observe", "session_id": "a", "env_id": 1, **fields})
    assert roboarena == InferRequest(Dialect.ROBOARENA, fields, "a", env_id="1", observes=True)
    assert parse_request({"endpoint": "infer", "observe": True, **fields}) == InferRequest(
        Dialect.ROBOARENA, fields, observes=True
    )
    openpi = parse_request({"observe": True, "sequence": 3, "reset": True, "observation/exterior_image_1_left": 1})
    assert openpi == InferRequest(
        Dialect.OPENPI, {"observation/exterior_image_0_left": 1}, sequence=3, restart=True, observes=True
    )
    assert observe_reply(openpi, 2, ("black",)) == {"frames_ahead": 2, "sequence": 3, "warnings": ["black"]}
    with pytest.raises(BadRequest, match="observe: expected a bool, got 1"):
        parse_request({"observe": 1, **fields})
    with pytest.raises(BadRequest, match="did you mean observe"):
        require_no_near_miss(["obserev"], CONTROL_FIELDS)
