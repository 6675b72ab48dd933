"""Robots as yaml: the packaged ones to the byte, a user's own checked by line and against the checkpoint."""

from __future__ import annotations

import copy
import hashlib
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import policy_fakes as fakes
import pytest
import yaml

from worldkv.errors import CheckpointError
from worldkv.robots.dataset import ModelSizes, find_embodiment, read_embodiment
from worldkv.robots.embodiment_file import EmbodimentFile, find_packaged, load_embodiment_file, packaged, parse
from worldkv.robots.preparation import Memory, Preparation
from worldkv.robots.transforms import absolute_actions, normalise_state

SIZES = ModelSizes(action_horizon=fakes.HORIZON, max_state_dim=32, max_action_dim=32, text_len=fakes.TEXT_LEN)
PROMPT_DIGESTS = {
    "agibot": "50181f429aebd5e6",
    "human": "065ae17ae256cbfc",
    "oxe_droid": "fd51a8582811ad63",
    "yam": "ab4215d527473b67",
}
AGIBOT_DIMS = {
    "left_arm_joint_position": 7,
    "right_arm_joint_position": 7,
    "left_effector_position": 1,
    "right_effector_position": 1,
    "head_position": 2,
    "waist_position": 2,
    "robot_velocity": 2,
}


def text_of(name: str) -> str:
    return (resources.files("worldkv.robots") / "embodiments" / f"{name}.yaml").read_text(encoding="utf-8")


def metadata_for(file: EmbodimentFile, tag: str, dims: dict[str, int], fps: float = 30.0) -> dict[str, Any]:
    """Statistics in which number i of a key runs from -(i + 1) to i + 1."""

    def statistics(dim: int) -> dict[str, list[float]]:
        high = [float(i + 1) for i in range(dim)]
        return {
            "q01": [-v for v in high],
            "q99": high,
            "min": [-2 * v for v in high],
            "max": [2 * v for v in high],
            "mean": [0.0] * dim,
            "std": high,
        }

    keys = {"state": [e.key for e in file.state], "action": [e.key for e in file.actions]}
    cameras = {camera.name: {"resolution": [640, 480], "channels": 3, "fps": fps} for camera in file.cameras}
    return {
        tag: {
            "embodiment_tag": tag,
            "statistics": {kind: {key: statistics(dims[key]) for key in names} for kind, names in keys.items()},
            "modalities": {
                "video": cameras,
                **{kind: {key: {"shape": [dims[key]]} for key in names} for kind, names in keys.items()},
            },
        }
    }


def test_the_packaged_prompts_are_the_models_own_to_the_byte() -> None:
    digests = {name: hashlib.sha256(file.prompt.encode()).hexdigest()[:16] for name, file in packaged().items()}
    assert digests == PROMPT_DIGESTS
    assert find_packaged("xdof") is packaged()["agibot"]
    assert find_packaged("mecka_hands") is packaged()["human"]
    assert find_packaged("unicycle") is None


def test_agibot_is_served_without_conf_yaml() -> None:
    file = packaged()["agibot"]
    metadata = metadata_for(file, "agibot", AGIBOT_DIMS)
    assert find_embodiment(None, {}, metadata) == ("agibot", None), "the only robot there, and no file was named"
    tag, chosen = find_embodiment("agibot", {}, metadata)
    robot = read_embodiment({}, metadata, tag, file=chosen, sizes=SIZES)
    assert (robot.action_dim, sum(q.dim for q in robot.state), robot.fps) == (22, 20, 30.0)
    assert {a.key for a in robot.actions if not a.relative} == {"robot_velocity"}
    assert (robot.layout, robot.image_size, robot.action_horizon) == ("grid", (352, 640), fakes.HORIZON)

    preparation = Preparation(robot, fakes.FakeTokenizer())
    raw = preparation.synthetic_observation(4)
    assert set(raw) == {*(camera.field for camera in file.cameras), *(e.field for e in file.state), "prompt"}
    raw["observation/left_arm_joint_position"] = np.array([0.5, -1, 9, 0, 0, 0, -3.5])  # of +-1 ... +-7
    prepared = preparation.prepare(preparation.read(raw), Memory())
    np.testing.assert_allclose(prepared.inputs.state[0, :7], [0.5, -0.5, 1, 0, 0, 0, -0.5])
    predicted = np.zeros((fakes.HORIZON, 32), np.float32)
    predicted[:, 0], predicted[:, 20] = 0.25, 0.5
    actions = preparation.robot_actions(predicted, prepared.state)
    assert actions.shape == (fakes.HORIZON, 22)
    np.testing.assert_allclose(actions[0, :3], [0.25 + 0.5, -1, 9], rtol=1e-6)  # added to the raw, unclipped state
    np.testing.assert_allclose(actions[0, 20:], [0.5, 0.0], atol=1e-6)  # velocities are not relative


def test_yam_states_its_sizes_and_the_tiling_leaves_a_black_corner() -> None:
    file = packaged()["yam"]
    dims = {entry.key: entry.dim or 0 for entry in file.actions}
    assert list(dims.values()) == [6, 1, 6, 1]
    metadata = metadata_for(file, "yam", dims)
    for kind in ("state", "action"):
        del metadata["yam"]["modalities"][kind]  # the file says them
    robot = read_embodiment({}, metadata, "yam", file=file, sizes=SIZES)
    assert robot.action_dim == 14
    assert all(action.relative for action in robot.actions)
    preparation = Preparation(robot, fakes.FakeTokenizer())
    raw = preparation.synthetic_observation(1)
    frames = preparation.prepare(preparation.read(raw), Memory()).inputs.frames
    assert frames.shape == (1, 352, 640, 3)
    assert frames[0, :176, :320].mean() > 100
    assert not frames[0, 176:, 320:].any()


def test_one_camera_of_a_person_fills_the_image() -> None:
    file = packaged()["human"]
    metadata = metadata_for(file, "mecka_hands", {"hand_position": 6})
    assert find_embodiment("human", {}, metadata)[0] == "mecka_hands"
    robot = read_embodiment({}, metadata, "mecka_hands", file=file, sizes=SIZES)
    assert (robot.layout, robot.image_size) == ("single", (352, 640))
    preparation = Preparation(robot, fakes.FakeTokenizer())
    frames = preparation.prepare(preparation.read(preparation.synthetic_observation(1)), Memory()).inputs.frames
    assert frames.shape == (1, 352, 640, 3)
    assert frames.min() > 100


def test_statistics_per_step_against_values_by_hand() -> None:
    """As relative_action_per_horizon: step i has quantiles -(i + 1) * (j + 1) and (i + 1) * (j + 1)."""
    changed = yaml.safe_load(text_of("yam")) | {"statistics_per_step": True}
    file = EmbodimentFile.model_validate(changed)
    metadata = metadata_for(file, "yam", {entry.key: entry.dim or 0 for entry in file.actions})
    actions = metadata["yam"]["statistics"]["action"]
    for by_name in actions.values():
        for name, row in by_name.items():
            by_name[name] = [[value * (step + 1) for value in row] for step in range(fakes.HORIZON)]
    robot = read_embodiment({}, metadata, "yam", file=file, sizes=SIZES)
    state = {q.key: np.full(q.dim, 0.5) for q in robot.state}
    predicted = np.full((fakes.HORIZON, 14), 0.5, np.float32)
    absolute = absolute_actions(predicted, state, robot)
    expected = [0.5 + 0.5 * (step + 1) * 3 for step in range(fakes.HORIZON)]  # joint 2 of the left arm
    np.testing.assert_allclose(absolute[:, 2], expected, rtol=1e-6)
    np.testing.assert_allclose(normalise_state(state, robot)[0, :3], [0.5, 0.25, 1 / 6])


def test_a_file_of_ones_own_may_hold_the_statistics() -> None:
    changed = yaml.safe_load(text_of("human"))
    changed["cameras"][0]["resolution"] = [480, 640]
    for entry in (*changed["state"], *changed["actions"]):
        entry |= {"dim": 2, "normalisation": "mean_std"}
    numbers = {"mean": [1.0, 2.0], "std": [2.0, 0.0]}
    changed["statistics"] = {kind: {"hand_position": numbers} for kind in ("state", "action")}
    robot = read_embodiment({}, {}, "gr1_unified", file=EmbodimentFile.model_validate(changed), sizes=SIZES)
    assert (robot.cameras[0].height, robot.cameras[0].width) == (480, 640)
    normalised = normalise_state({"hand_position": np.array([5.0, 7.0])}, robot)
    np.testing.assert_allclose(normalised[0, :3], [2.0, 7.0, 0.0])  # a constant passes through, the rest is padding


def test_a_file_that_contradicts_conf_yaml_is_refused_and_one_that_agrees_is_not(tmp_path: Path) -> None:
    said = yaml.safe_load(text_of("oxe_droid")) | {"view_size": [16, 24]}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(said))
    tag, file = find_embodiment(tmp_path / "own.yaml", fakes.conf(), fakes.metadata())
    robot = read_embodiment(fakes.conf(), fakes.metadata(), tag, file=file)
    assert [camera.field for camera in robot.cameras] == [camera["field"] for camera in said["cameras"]]
    wrong = copy.deepcopy(said)
    wrong["cameras"] = wrong["cameras"][::-1]
    wrong["actions"][0]["relative"] = False
    wrong["state"][1]["normalisation"] = "min_max"
    with pytest.raises(CheckpointError) as caught:
        read_embodiment(fakes.conf(), fakes.metadata(), tag, file=EmbodimentFile.model_validate(wrong))
    for words in ("says cameras ['wrist", "says relative [], conf.yaml ['joint_position']", "'min_max'"):
        assert words in str(caught.value)


def test_a_camera_that_the_file_does_not_know_is_named() -> None:
    conf, metadata = fakes.conf(), fakes.metadata()
    for step in conf["transforms"]["oxe_droid"]["transforms"]:
        if "video_concat_order" in step:
            step["video_concat_order"] = ["video.a", "video.b", "video.c"]
    del conf["modality_configs"]["oxe_droid"]["video"]
    with pytest.raises(CheckpointError, match=r"the embodiment file has no camera 'a'"):
        read_embodiment(conf, metadata)


FAULTS = {
    "a misspelt key": ("crop_scale:", "crop_scael:", r"own.yaml:8: crop_scael: is not known; did you mean crop_scale"),
    "a text for a number": ("rate_hz: 15", "rate_hz: fast", r"own.yaml:5: rate_hz: input should be .*, got 'fast'"),
    "an unknown mode": (
        "normalisation: q99\n    range",
        "normalisation: q95\n    range",
        r"own.yaml:18: state\[1\].normalisation: input should be .*'mean_std'.*, got 'q95'",
    ),
    "a missing key": ("tags: [oxe_droid]\n", "", r"own.yaml:\d+: tags: is missing"),
    "a prompt without its place": ("{p}", "it", r"own.yaml: prompt: expected {p}"),
    "a layout that does not fit": ("layout: wrist_over_exteriors", "layout: single", "is for 1 cameras, there are 3"),
    "one field twice": (
        "observation/wrist_image_left",
        "observation/joint_position",
        "field 'observation/joint_position' stands there twice",
    ),
    "one key twice": ("rate_hz: 15", "rate_hz: 15\nrate_hz: 30", r"own.yaml:6: 'rate_hz' stands there twice"),
    "relative to nothing": (
        "key: joint_position, normalisation: q99, relative",
        "key: elbow, normalisation: q99, relative",
        "action 'elbow' is relative, but there is no state",
    ),
    "no yaml": ("cameras:", "cameras: [", r"own.yaml:\d+: not readable YAML"),
}


@pytest.mark.parametrize(("old", "new", "words"), FAULTS.values(), ids=FAULTS)
def test_every_fault_is_named_with_its_line(old: str, new: str, words: str) -> None:
    text = text_of("oxe_droid")
    assert old in text
    with pytest.raises(CheckpointError, match=words):
        parse(text.replace(old, new), "own.yaml")


def test_files_that_are_not_there_or_hold_something_else() -> None:
    with pytest.raises(CheckpointError, match=r"packaged ones are agibot, human, oxe_droid, yam"):
        load_embodiment_file("nowhere.yaml")
    for text in ("", "[]", "7"):
        with pytest.raises(CheckpointError, match=re.escape("expected a mapping")):
            parse(text, "own.yaml")
    with pytest.raises(CheckpointError, match="not readable YAML"):
        parse("!!python/name:os.system", "own.yaml")
