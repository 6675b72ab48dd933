"""Where an embodiment file, metadata.json and config.json say different things."""

from __future__ import annotations

import policy_fakes as fakes
import pytest

from worldkv.errors import CheckpointError
from worldkv.policy.embodiment_file import find_packaged, from_mapping
from worldkv.policy.experiment_cfg import ModelSizes, read_embodiment

SIZES = ModelSizes(action_horizon=fakes.HORIZON, max_state_dim=16, max_action_dim=10, text_len=fakes.TEXT_LEN)


def own(**changes):
    file = find_packaged("oxe_droid")
    return file.model_copy(update={"view_size": [16, 24], **changes})


def test_baseline():
    assert read_embodiment(fakes.conf(), fakes.metadata(), file=own(), sizes=SIZES).fps == 15


def test_a_rate_that_contradicts_metadata_is_a_fault_or_used():
    try:
        robot = read_embodiment(fakes.conf(), fakes.metadata(), file=own(rate_hz=30.0), sizes=SIZES)
    except CheckpointError:
        return
    assert robot.fps == 30, f"file says 30, served as {robot.fps}"


def test_without_conf_too():
    try:
        robot = read_embodiment({}, fakes.metadata(), file=own(rate_hz=30.0), sizes=SIZES)
    except CheckpointError:
        return
    assert robot.fps == 30, f"file says 30, served as {robot.fps}"


def test_a_resolution_that_contradicts_metadata_is_a_fault_or_used():
    cameras = [c.model_copy(update={"resolution": [480, 640]}) for c in own().cameras]
    try:
        robot = read_embodiment(fakes.conf(), fakes.metadata(), file=own(cameras=cameras), sizes=SIZES)
    except CheckpointError:
        return
    assert robot.cameras[0].recorded_height == 480, robot.cameras[0]


def test_a_dim_that_contradicts_metadata_is_a_fault():
    state = [c.model_copy(update={"dim": 6}) if c.key == "joint_position" else c for c in own().state]
    with pytest.raises(CheckpointError):
        read_embodiment(fakes.conf(), fakes.metadata(), file=own(state=state), sizes=SIZES)


def test_message_names_the_right_file():
    sizes = ModelSizes(action_horizon=fakes.HORIZON, max_state_dim=64, max_action_dim=10, text_len=fakes.TEXT_LEN)
    with pytest.raises(CheckpointError) as e:
        read_embodiment(fakes.conf(), fakes.metadata(), file=own(), sizes=sizes)

    assert "embodiment file says max_state_dim" not in str(e.value)


def test_reversed_range():
    text = dict(find_packaged("oxe_droid").model_dump(exclude_none=True))
    text["state"][0]["range"] = [1.0, -1.0]
    with pytest.raises(CheckpointError):
        from_mapping(text, "x")


def test_a_line_number_is_that_of_the_file_people_see():
    text = dict(find_packaged("oxe_droid").model_dump(exclude_none=True))
    text["layout"] = "nonsense"
    with pytest.raises(CheckpointError) as e:
        from_mapping(text, "worldkv.yaml: embodiments.oxe_droid")

    assert "oxe_droid:2" not in str(e.value)
    assert "embodiments.oxe_droid:3" not in str(e.value)
