"""Where an embodiment file, metadata.json and config.json say different things: named, never chosen in silence."""

from __future__ import annotations

from typing import Any

import policy_fakes as fakes
import pytest

from worldkv.errors import CheckpointError
from worldkv.robots.dataset import ModelSizes, read_embodiment
from worldkv.robots.embodiment_file import EmbodimentFile, from_mapping, packaged

SIZES = ModelSizes(action_horizon=fakes.HORIZON, max_state_dim=16, max_action_dim=10, text_len=fakes.TEXT_LEN)


def own(**changes: Any) -> EmbodimentFile:
    """A user's file that agrees with the fakes, but for `changes`."""
    return packaged()["oxe_droid"].model_copy(update={"view_size": [16, 24], **changes})


def with_resolution() -> EmbodimentFile:
    return own(cameras=[c.model_copy(update={"resolution": [480, 640]}) for c in own().cameras])


def with_dim() -> EmbodimentFile:
    return own(state=[s.model_copy(update={"dim": 6}) if s.key == "joint_position" else s for s in own().state])


CONFLICTS = {
    "rate": (own(rate_hz=30.0), "rate_hz 30, metadata.json 15.0"),
    "resolution": (with_resolution(), r"resolution of exterior_image_1_left \[480, 640\], metadata.json \[320, 180\]"),
    "dim": (with_dim(), r"dim of state joint_position 6, metadata.json \[7\]"),
}


@pytest.mark.parametrize("conf", [fakes.conf(), {}], ids=["with conf.yaml", "without"])
@pytest.mark.parametrize(("file", "words"), CONFLICTS.values(), ids=CONFLICTS)
def test_a_file_that_contradicts_metadata_is_refused(file: EmbodimentFile, words: str, conf: dict[str, Any]) -> None:
    assert read_embodiment(conf, fakes.metadata(), file=own(), sizes=SIZES).fps == 15
    with pytest.raises(CheckpointError, match=f"the embodiment file says {words}: correct the file"):
        read_embodiment(conf, fakes.metadata(), file=file, sizes=SIZES)


def test_sizes_that_conf_yaml_and_config_json_do_not_share_are_theirs() -> None:
    sizes = ModelSizes(action_horizon=fakes.HORIZON, max_state_dim=64, max_action_dim=10, text_len=fakes.TEXT_LEN)
    with pytest.raises(CheckpointError, match=r"config.json says max_state_dim 64, conf.yaml 16"):
        read_embodiment(fakes.conf(), fakes.metadata(), file=own(), sizes=sizes)


def test_a_file_inside_another_is_named_by_its_place_there() -> None:
    whole = packaged()["oxe_droid"].model_dump(exclude_none=True)
    with pytest.raises(CheckpointError, match=r"worldkv.yaml: embodiments.oxe_droid: layout: "):
        from_mapping(whole | {"layout": "nonsense"}, "worldkv.yaml: embodiments.oxe_droid")
    whole["state"][0]["range"] = [1.0, -1.0]
    with pytest.raises(CheckpointError, match=r"range: expected low and high, got \[1.0, -1.0\]"):
        from_mapping(whole, "worldkv.yaml")
