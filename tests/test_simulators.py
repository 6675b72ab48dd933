"""The simulator examples: what they send and when, which way a gripper closes, a short run against a real server."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as when an example is run
try:
    import fetch_sim
    import robosuite_panda
    import simulated_robot
finally:
    sys.path.remove(str(EXAMPLES))


# An OpenGL that is installed and does not work leaves half-made contexts behind, which fail when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def skip_without(*modules: str) -> None:
    """Looks, but imports nothing: the example chooses a renderer before it imports mujoco."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed here: pip install 'worldkv[all,sim]'")


class StillRobot:
    """Goes where it is told at once; its pictures hold the number of the step after which they were taken."""

    prompt = "stay"
    renderer = "none"
    joint_limits = (np.full(7, -0.75), np.full(7, np.inf))

    def __init__(self) -> None:
        self.joint_position = np.zeros(7)
        self.gripper_position = 0.25
        self.targets: list[np.ndarray] = []
        self.grippers: list[float] = []

    def look(self) -> simulated_robot.Views:
        left, right, wrist = (np.full((180, 320, 3), len(self.targets) + add, np.uint8) for add in (0, 50, 100))
        return left, right, wrist

    def step(self, joint_target: np.ndarray, gripper_target: float) -> None:
        self.targets.append(joint_target)
        self.grippers.append(gripper_target)
        self.joint_position = joint_target

    def close(self) -> None: ...


class RecordingPolicy:
    """Answers with the same chunk, and keeps what it was asked."""

    def __init__(self, actions: np.ndarray) -> None:
        self.actions = actions
        self.requests: list[dict[str, Any]] = []

    def infer(self, observation: dict[str, Any]) -> np.ndarray:
        self.requests.append(observation)
        return self.actions


def actions(joints: float = 0.0, gripper: float = 0.0) -> np.ndarray:
    chunk = np.full((24, 8), joints, np.float32)
    chunk[:, 7] = gripper
    return chunk


def test_frames_are_taken_where_the_stock_client_takes_them() -> None:
    assert simulated_robot.steps_to_look_after() == [1, 8, 16, 24]  # 24 - 23, 24 - 16, 24 - 8, 24 - 0


def test_the_first_request_holds_one_frame_and_each_later_one_four() -> None:
    robot, policy = StillRobot(), RecordingPolicy(actions())
    film = simulated_robot.drive(robot, policy, 3)  # type: ignore[arg-type]
    left = [request["observation/exterior_image_0_left"][:, 0, 0, 0].tolist() for request in policy.requests]
    assert left == [[0], [1, 8, 16, 24], [25, 32, 40, 48]]
    last = policy.requests[-1]
    assert last["observation/exterior_image_1_left"][-1, 0, 0, 0] == 98, (
        "the right camera's frames are not in its place"
    )
    assert last["observation/wrist_image_left"][-1, 0, 0, 0] == 148, "the wrist camera's frames are not in its place"
    assert last["observation/wrist_image_left"].shape == (4, 180, 320, 3)
    assert last["observation/joint_position"].shape == (7,)
    assert last["observation/gripper_position"].tolist() == [0.25]
    assert film.shape == (1 + 3 * 4, 360, 640, 3)


def test_targets_follow_the_actions_no_faster_than_allowed_and_within_limits() -> None:
    robot = StillRobot()
    _, behind = simulated_robot.execute(robot, actions(joints=-1.0, gripper=1.5))
    targets = [target[0] for target in robot.targets]
    assert len(targets) == 24
    assert targets[:8] == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7, -0.75])  # 1.5 rad/s at 15 Hz
    assert targets[-1] == -0.75
    assert set(robot.grippers) == {1.0}
    assert behind == 0.0


@pytest.mark.parametrize("shape", [(6, 8), (24, 7), (24, 8, 1)])
def test_a_chunk_of_another_shape_is_not_executed(shape: tuple[int, ...]) -> None:
    robot = StillRobot()
    with pytest.raises(ValueError, match=re.escape(f"expected finite numbers [24, 8], got shape {list(shape)}")):
        simulated_robot.execute(robot, np.zeros(shape, np.float32))
    assert not robot.targets


def test_zero_is_an_open_gripper_and_one_a_closed_one_in_both_simulators() -> None:
    assert fetch_sim.gripper_of(0.05) == 0.0  # fingers 5 cm from the middle
    assert fetch_sim.gripper_of(0.0) == 1.0
    assert fetch_sim.opening_of(0.2) == pytest.approx(0.04)
    assert robosuite_panda.gripper_of(-0.028) == 0.0
    assert robosuite_panda.gripper_of(0.51) == 1.0
    assert robosuite_panda.gripper_of(0.241) == pytest.approx(0.5)
    assert robosuite_panda.gripper_of(0.8) == 1.0
    assert [robosuite_panda.command_of(gripper) for gripper in (0, 0.5, 1)] == [-1, 0, 1]


def test_what_is_wrong_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_sim.main(["--ticks", "0"]) == 2
    assert "--ticks: expected at least 1" in capsys.readouterr().err
    assert fetch_sim.main(["--url", "ftp://gpu-box:8000"]) == 2
    assert "expected ws://, wss://, http:// or https://, got 'ftp://gpu-box:8000'" in capsys.readouterr().err
    for module, missing, extra in (
        (fetch_sim, "gymnasium_robotics", "sim"),
        (robosuite_panda, "robosuite", "robosuite"),
    ):
        monkeypatch.setitem(sys.modules, missing, None)
        monkeypatch.setenv("MUJOCO_GL", "disable")
        assert module.main([]) == 2
        error = capsys.readouterr().err
        assert f"pip install 'worldkv[{extra}]'" in error
        assert error.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere mujoco brings its own choice")
@pytest.mark.parametrize(
    ("installed", "chosen"), [({"EGL", "OSMesa"}, "egl"), ({"OSMesa"}, "osmesa"), (set(), "disable")]
)
def test_the_renderer_is_what_is_installed_unless_the_user_chose(
    installed: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: name if name in installed else None)
    for wanted, expected in (("", chosen), ("glfw", "glfw")):
        monkeypatch.setenv("MUJOCO_GL", wanted)
        with simulated_robot.importing_mujoco("sim"):
            assert os.environ["MUJOCO_GL"] == expected
            os.environ["MUJOCO_GL"] = "overwritten"  # as robosuite does
        assert os.environ["MUJOCO_GL"] == expected


@pytest.fixture
def fetch() -> Any:
    skip_without("gymnasium_robotics", "mujoco")
    robot = fetch_sim.FetchRobot(seed=0)
    yield robot
    robot.close()


def test_fetch_goes_where_the_actions_say_and_its_gripper_opens_and_closes(fetch: fetch_sim.FetchRobot) -> None:
    start = fetch.joint_position
    wanted = start + np.array([0.4, 0.1, 0.2, -0.2, 0.3, 0.3, -0.5])
    for gripper in (0.0, 1.0):
        chunk = np.column_stack([np.tile(wanted, (24, 1)), np.full(24, gripper)]).astype(np.float32)
        for step, action in enumerate(chunk):
            fetch.step(start + (wanted - start) * min(1, (step + 1) / 12), float(action[7]))
        assert fetch.joint_position == pytest.approx(wanted, abs=0.02)
        assert fetch.gripper_position == pytest.approx(gripper, abs=0.05)
        start = wanted
    assert fetch._data.time - fetch._start == pytest.approx(48 / 15, abs=0.002), "time was lost between control steps"


def test_three_cameras_show_three_different_pictures_that_change_with_the_arm(fetch: fetch_sim.FetchRobot) -> None:
    before = fetch.look()
    for _ in range(6):
        fetch.step(fetch.joint_position + 0.1, 0.0)
    after = fetch.look()
    for view in before:
        assert view.shape == (180, 320, 3)
        assert view.dtype == np.uint8
        assert view.std() > 10, "a camera sees next to nothing"
    assert all((a != b).mean() > 0.01 for a, b in zip(before, after, strict=True)), "a camera is frozen"
    left, right, wrist = (view.astype(int) for view in before)
    assert min(np.abs(a - b).mean() for a, b in ((left, right), (right, wrist), (left, wrist))) > 10


def test_rays_and_opengl_show_the_same_scene(fetch: fetch_sim.FetchRobot, monkeypatch: pytest.MonkeyPatch) -> None:
    if fetch._cameras._renderer is None:
        pytest.skip(f"no OpenGL here: {simulated_robot.RENDERER_HINT}")
    monkeypatch.setenv("MUJOCO_GL", "disable")
    rays = simulated_robot.MujocoCameras(fetch._model, fetch._data, fetch_sim.MOUNTS)
    assert rays.name.startswith("rays")
    fetch._cameras._renderer.enable_segmentation_rendering()
    for mount in fetch_sim.MOUNTS:
        camera = mount.camera(fetch._data)
        drawn = fetch._cameras._rasterise(camera, mount.fov)[..., 0]
        assert (drawn == rays._hit(camera)[0]).mean() > 0.98, "the two renderers do not look from the same place"


class ServerInThisProcess:
    """What `connect` uses of ServerProcess: the same server for the same folder, without starting an interpreter and
    importing torch once more. That a process is started, watched and stopped is shown in tests/cli/test_serve.py."""

    pid = os.getpid()

    def __init__(self, checkpoint: Path, log: Path, options: list[str]) -> None:
        assert "--device" in options
        self._checkpoint = checkpoint
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> ServerInThisProcess:
        from worldkv.load import load_policy
        from worldkv.server.server import PolicyServer, ServerConfig

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the tokenizer that a random checkpoint lacks
            policy = load_policy(self._checkpoint)
        self._cleanup.callback(policy.engine.shutdown)
        self._cleanup.callback(policy.close)
        self.port = self._cleanup.enter_context(PolicyServer(policy, ServerConfig(port=0))).port
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def wait_until_ready(self) -> None: ...


def test_fetch_drives_a_server_over_the_wire(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("gymnasium_robotics", "mujoco", "torch", "diffusers", "transformers", "uvicorn", "av")
    from worldkv.show.video import read_video

    monkeypatch.setattr(simulated_robot, "ServerProcess", ServerInThisProcess)
    assert fetch_sim.main(["--ticks", "2", "--output", str(tmp_path / "run" / "fetch.mp4")]) == 0
    said = capsys.readouterr().out
    assert "random weights" in said
    rows = re.findall(r"^ +(\d)  (\d) x 3 +\d+ ms +([\d.]+) rad", said, re.MULTILINE)
    assert [row[:2] for row in rows] == [("0", "1"), ("1", "4")]
    assert all(float(moved) > 0.01 for *_, moved in rows), "the arm did not do what the policy said"
    film = read_video(tmp_path / "run" / "fetch.mp4")
    assert film.shape == (1 + 2 * 4, 360, 640, 3)
    assert np.abs(film[0].astype(int) - film[-1]).mean() > 1, "nothing moved in the video"
