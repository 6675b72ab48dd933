"""What a robot may send, what is refused and in which words, what is served with a warning."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import policy_fakes as fakes
import pytest

from worldkv.errors import BadRequest
from worldkv.robots.dataset import read_embodiment
from worldkv.robots.observation import MAX_PROMPT_CHARACTERS, Observation, read_observation, unread_warning

WRIST = "observation__wrist_image_left"
SECOND = "observation__exterior_image_1_left"
JOINTS = "observation__joint_position"
GRIPPER = "observation__gripper_position"


def _read(num_frames: int | None = 1, **changes: Any) -> Observation:
    return read_observation(fakes.observation(num_frames=num_frames, **changes), fakes.embodiment())


def _image(height: int = 180, width: int = 320, value: int = 9) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def test_exterior_cameras_are_off_by_one_and_the_newest_frames_are_kept() -> None:
    raw = fakes.observation(num_frames=6)
    read = read_observation(raw, fakes.embodiment())
    assert read.num_frames == 4
    for camera, field in (
        ("exterior_image_1_left", "exterior_image_0_left"),
        ("exterior_image_2_left", "exterior_image_1_left"),
        ("wrist_image_left", "wrist_image_left"),
    ):
        assert np.array_equal(read.frames[camera], raw[f"observation/{field}"][-4:])
    assert read.warnings == {}


def test_a_single_image_is_a_stack_of_one() -> None:
    read = _read(num_frames=None)
    assert read.num_frames == 1
    assert read.frames["wrist_image_left"].shape == (1, 180, 320, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({WRIST: None}, "observation/wrist_image_left: missing; got the fields observation/exterior_image_0"),
        ({WRIST: [[1, 2, 3]]}, "observation/wrist_image_left: expected an array, uint8 [180, 320, 3] or"),
        ({WRIST: np.zeros((3, 180, 320), np.uint8)}, "got uint8 [3, 180, 320]; move the channels last"),
        ({WRIST: np.zeros((180, 320), np.uint8)}, "got uint8 [180, 320]"),
        ({WRIST: np.zeros((1, 180, 320, 3), np.float32)}, "these are all 0: send uint8"),
        ({WRIST: _image() / 9}, "these are 0..1: send np.round(255 * x).astype(np.uint8)"),
        ({WRIST: _image() > 0}, "these are 0..1: send np.round(255 * x).astype(np.uint8)"),
        ({WRIST: _image().astype(np.float32)}, "send them as uint8, np.round(x).astype(np.uint8), and do not scale"),
        ({WRIST: _image() - 9.5}, "these are -1..1: send np.round(127.5 * (x + 1)).astype(np.uint8)"),
        ({WRIST: 1.0 - _image()}, "these go from -8 to -8: bring them to 0..255, then to uint8"),
        ({WRIST: np.full((180, 320, 3), np.nan)}, "some of its values are not finite"),
        ({WRIST: _image().astype(np.int64)}, "these are 0..255 as int64: send them as uint8, x.astype(np.uint8)"),
        ({WRIST: _image().astype(np.uint16) * 1000}, "these go from 9000 to 9000: bring them to 0..255"),
        ({WRIST: _image() * 1j}, "send real numbers, as uint8"),
        ({WRIST: np.zeros((0, 180, 320, 3), np.uint8)}, "expected at least one frame"),
        (
            {WRIST: _image(480, 640)},
            "expected 180x320 (height x width) or a size of that aspect, got 480x640",
        ),
        (
            {WRIST: np.full((3, 180, 320, 3), 9, np.uint8)},
            "cameras: expected the same number of frames from each, got: observation/exterior_image_0_left has 1, "
            "observation/exterior_image_1_left has 1, observation/wrist_image_left has 3; take a frame of every camera",
        ),
        ({JOINTS: None}, "observation/joint_position: missing"),
        ({JOINTS: np.zeros(6)}, "observation/joint_position: expected 7 finite numbers, got shape [6]"),
        ({JOINTS: np.zeros((4, 7))}, "got shape [4, 7]; send the newest state only"),
        ({JOINTS: np.zeros((7, 1))}, "got shape [7, 1]"),
        ({JOINTS: [0, 0, 0, float("nan"), 0, 0, 0]}, "expected 7 finite numbers, got [0.0, 0.0, 0.0, nan"),
        ({JOINTS: np.full(7, np.inf)}, "expected 7 finite numbers, got [inf"),
        ({JOINTS: np.full(7, 1e39)}, "expected 7 finite numbers, got [inf, inf, inf, inf, inf, inf, inf] as float32"),
        ({GRIPPER: np.longdouble("1e4000")}, "observation/gripper_position: expected 1 finite number, got [inf]"),
        ({JOINTS: ["a"] * 7}, "observation/joint_position: expected 7 finite numbers, got list of <U1"),
        ({JOINTS: [[1, 2], [3]]}, "got a ragged list"),
        ({JOINTS: np.full(7, 1j)}, "observation/joint_position: expected 7 finite numbers, got ndarray of complex128"),
        ({GRIPPER: np.zeros(2)}, "observation/gripper_position: expected 1 finite number, got shape [2]"),
        ({"prompt": None}, "prompt: missing"),
        ({"prompt": "  "}, "prompt: expected an instruction"),
        ({"prompt": 7}, "prompt: expected a text, got int"),
        ({"prompt": np.zeros(3)}, "prompt: expected a text, got ndarray"),
        ({"prompt": "x" * (MAX_PROMPT_CHARACTERS + 1)}, "prompt: expected at most 4096 characters, got 4097"),
    ],
)
def test_what_cannot_be_served_is_refused_by_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        _read(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({SECOND: None}, "observation/exterior_image_1_left is missing: the model sees a black view"),
        ({WRIST: np.zeros((1, 180, 320, 3), np.uint8)}, "observation/wrist_image_left is all black"),
        ({WRIST: _image(720, 1280)}, "wrist_image_left is 720x1280 and is resized to 180x320 here"),
        ({GRIPPER: np.array([85.0])}, "gripper_position is 85: expected 0 (open) to 1 (closed)"),
        ({JOINTS: np.full(7, 30.0)}, "joint_position[0] is 30; the training data has -1.5 to 1.5 (7 of 7"),
    ],
)
def test_what_is_probably_a_mistake_is_served_with_a_warning(changes: dict[str, Any], words: str) -> None:
    read = _read(**changes)
    assert len(read.warnings) == 1
    assert words in next(iter(read.warnings.values()))


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("prompt", "prompt: expected a text, got None"),
        ("observation/wrist_image_left", "observation/wrist_image_left: expected an array of uint8, got None"),
        ("observation/joint_position", "observation/joint_position: expected 7 finite numbers, got None"),
    ],
)
def test_what_is_none_is_not_called_missing(field: str, expected: str) -> None:
    with pytest.raises(BadRequest, match=f"^{expected}$"):
        read_observation({**fakes.observation(), field: None}, fakes.embodiment())
    second = {**fakes.observation(), "observation/exterior_image_1_left": None}
    assert "exterior_image_1_left is None" in "".join(read_observation(second, fakes.embodiment()).warnings.values())


@pytest.mark.parametrize(("lengths", "used"), [((4, 4, 3), 3), ((2, 1, 1), 1), ((5, 6, 5), 4), ((4, 5, 5), 4)])
def test_cameras_that_differ_by_a_frame_are_used_from_their_newest(lengths: tuple[int, ...], used: int) -> None:
    raw = fakes.observation(num_frames=6)
    fields = [field for field in raw if "image" in field]
    raw.update({field: raw[field][-length:] for field, length in zip(fields, lengths, strict=True)})
    read = read_observation(raw, fakes.embodiment())
    assert read.num_frames == used
    for frames, field in zip(read.frames.values(), fields, strict=True):
        assert frames is not None
        assert np.array_equal(frames, raw[field][-used:])
    (warning,) = read.warnings.values()
    assert f"{fields[0]} has {lengths[0]}" in warning
    assert "take a frame of every camera at the same steps" in warning


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("promt", "prompt"),
        ("Prompt", "prompt"),
        ("pormpt", "prompt"),
        ("observation/exterior_image0_left", "observation/exterior_image_0_left"),
        ("observation/exterior_image_0_letf", "observation/exterior_image_0_left"),
        ("observation.wrist_image_left", "observation/wrist_image_left"),
        ("observation/joint_positions", "observation/joint_position"),
    ],
)
def test_a_misspelt_field_is_told_with_what_was_meant(given: str, meant: str) -> None:
    raw = fakes.observation()
    raw[given] = raw.pop(meant)
    with pytest.raises(BadRequest, match=f"^{given}: nothing reads this field; did you mean {meant}\\?$"):
        read_observation(raw, fakes.embodiment())


@pytest.mark.parametrize(
    ("given", "meant"),
    [("sesion_id", "session_id"), ("env-id", "env_id"), ("sessionId", "session_id"), ("rest", "reset")],
)
def test_a_misspelt_control_is_told_as_well(given: str, meant: str) -> None:
    with pytest.raises(BadRequest, match=f"^{given}: nothing reads this field; did you mean {meant}\\?$"):
        read_observation({**fakes.observation(), given: "a"}, fakes.embodiment())


def test_fields_that_nothing_reads_are_one_warning_that_names_them() -> None:
    others = ["observation/exterior_image_2_left", "observation/wrist_image_right", "observation/joint_velocity"]
    raw = {**fakes.observation(), "observation/cartesian_position": np.zeros(6), "prompts": "a", "line\nbreak": 1}
    read = read_observation({**raw, **dict.fromkeys(others, 0)}, fakes.embodiment())
    warning = unread_warning(read.unread, fakes.embodiment())
    names = f"prompts, 'line\\nbreak', {', '.join(others)}"
    assert warning.startswith(
        f"nothing reads the fields {names}; this robot's are executed_steps, frames_ahead, observ"
    )
    many = {**fakes.observation(), **{f"x{n}": n for n in range(1000)}, "y" * 10**6: 0}
    warning = unread_warning(read_observation(many, fakes.embodiment()).unread, fakes.embodiment())
    assert "x7 and 993 more" in warning
    assert len(warning) < 1000


def test_many_fields_that_are_almost_known_cost_little() -> None:
    fields = {f"observation/exterior_image_0_le{a}{b}": 0 for a in "abcdefgh" for b in "0123456789abcdefghijklmnop"}
    started = time.perf_counter()
    with pytest.raises(BadRequest, match="did you mean observation/exterior_image_0_left"):
        read_observation({**fakes.observation(observation__exterior_image_0_left=None), **fields}, fakes.embodiment())
    assert time.perf_counter() - started < 1


def test_an_image_that_was_scaled_before_it_became_uint8_is_told() -> None:
    (warning,) = _read(**{WRIST: np.ones((1, 180, 320, 3), np.uint8)}).warnings.values()
    assert "no value above 1: was it scaled to 0..1 before it became uint8?" in warning


def test_numbers_and_prompts_may_come_in_the_forms_that_clients_use() -> None:
    assert _read(observation__gripper_position=np.float32(0.25)).state["gripper_position"].tolist() == [0.25]
    assert _read(observation__gripper_position=0).state["gripper_position"].tolist() == [0.0]
    state = _read(observation__joint_position=np.zeros((1, 7), np.float32)).state["joint_position"]
    assert state.shape == (7,)
    assert state.dtype == np.float64
    for prompt in ("lift", b"lift", np.array("lift"), np.array(["lift"]), np.str_("lift")):
        assert _read(prompt=prompt).prompt == "lift"


def test_a_resized_camera_keeps_its_content() -> None:
    large = np.repeat(np.repeat(_image(value=200), 2, axis=0), 2, axis=1)
    frames = _read(observation__wrist_image_left=large).frames["wrist_image_left"]
    assert frames.shape == (1, 180, 320, 3)
    assert abs(frames.astype(int) - 200).max() <= 1


def test_the_recorded_resolution_is_accepted_where_the_model_overrides_it() -> None:
    robot = read_embodiment(fakes.conf(), fakes.metadata(), camera_size=(160, 320))
    read = read_observation(fakes.observation(), robot)
    assert read.frames["wrist_image_left"].shape == (1, 160, 320, 3)
    assert len(read.warnings) == 3
