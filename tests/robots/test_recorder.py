"""Sessions on disk as they run, and run again from there: the same bits, and honest about what is missing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import policy_fakes as fakes
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import droid_observation, random_checkpoint  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from worldkv.cli.main import main  # noqa: E402
from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.errors import BadRequest  # noqa: E402
from worldkv.load import load_policy  # noqa: E402
from worldkv.robots import recorder as recorder_module  # noqa: E402
from worldkv.robots.policy import Policy  # noqa: E402
from worldkv.robots.recorder import Recorder  # noqa: E402
from worldkv.robots.recording import Recording  # noqa: E402
from worldkv.show.lerobot import check_lerobot, write_lerobot  # noqa: E402
from worldkv.show.video import read_video  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[Policy]:
    policy = fakes.make_policy(fakes.FakeModel())
    policy.recorder = Recorder(tmp_path / "recorded", {"checkpoint": "none"})
    yield policy
    fakes.end(policy)


def recordings(policy: Policy) -> list[Recording]:
    assert policy.recorder is not None
    policy.close()
    return [Recording.open(folder) for folder in sorted(policy.recorder.folder.iterdir())]


def test_two_robots_are_recorded_in_one_batch_and_each_replays_alone_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, rng = random_checkpoint("ti2v"), np.random.default_rng(0)
    policy = load_policy(checkpoint, EngineConfig(max_sessions=2, batch_invariant=True))
    policy.recorder = Recorder(tmp_path / "recorded", {"batch_invariant": True})
    policy.warm_up()
    sessions = [policy.open_session(name) for name in ("left/arm", "right")]
    for number in range(7):
        prompt = "stack the cups" if number < 5 else "wash them"
        futures = [s.infer(droid_observation(rng, 1 if number == 0 else 4, prompt)) for s in sessions]
        with pytest.raises(BadRequest):  # what fails is not part of the episode
            policy._preparation.read({"prompt": "no cameras"})
        for future in futures:
            future.result()
        if number == 3:
            sessions[0].reset()
    for session in sessions:
        session.close("the episode is over")
    found = recordings(policy)
    policy.close()
    policy.engine.shutdown()
    assert [recording.about["session_id"] for recording in found] == ["left/arm", "right"], "and no warm-up"
    assert found[0].folder.name.endswith("-left_arm")
    events = [event["event"] for event in found[0].events]
    assert events == ["tick"] * 4 + ["reset"] + ["tick"] * 3 + ["closed"]
    for number, recording in enumerate(found):
        output = tmp_path / f"replay{number}"
        arguments = ["--checkpoint", str(checkpoint), "--recording", str(recording.folder), "--output", str(output)]
        assert main(["replay", *arguments]) == 0
        assert "7 of 7 ticks are equal to the recording bit for bit" in capsys.readouterr().out
        assert (output / "seen_and_predicted.mp4").stat().st_size > 1000


def test_a_recording_becomes_a_lerobot_dataset(policy: Policy, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    session = policy.open_session("arm")
    replies = [session.infer(fakes.observation(seed=n, num_frames=1 if n == 0 else 4)).result() for n in range(3)]
    (recording,) = recordings(policy)
    write_lerobot(tmp_path / "set", recording, fakes.embodiment())
    table = parquet.read_table(tmp_path / "set/data/chunk-000/episode_000000.parquet")
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    assert set(table.column_names) == {name for name, f in info["features"].items() if f["dtype"] != "video"}
    assert table.column("action").to_pylist()[2] == pytest.approx(replies[2].actions[0].tolist())
    assert len(table.column("action_chunk").to_pylist()[0]) == info["features"]["action_chunk"]["shape"][0]
    assert info["fps"] == pytest.approx(15 / fakes.HORIZON)
    video = read_video(tmp_path / "set/videos/chunk-000/observation.images.wrist_image_left/episode_000000.mp4")
    assert video.shape == (3, 180, 320, 3)
    with pytest.raises(ValueError, match="expected an empty folder"):
        check_lerobot(tmp_path / "set")


def test_a_replay_that_differs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = random_checkpoint("ti2v")
    policy = load_policy(checkpoint, EngineConfig(max_sessions=1))
    policy.recorder = Recorder(tmp_path / "recorded", {})
    session = policy.open_session("arm")
    session.infer(droid_observation(np.random.default_rng(0), 1, "stack")).result()
    session.close("the episode is over")
    (recording,) = recordings(policy)
    policy.close()
    policy.engine.shutdown()
    path = recording.folder / "ticks" / "000000.safetensors"
    stored = load_file(path)
    save_file(stored | {"actions": stored["actions"] + 1e-3}, path)
    command = ["replay", "--checkpoint", str(checkpoint), "--recording", str(recording.folder)]
    command += ["--output", str(tmp_path / "replay")]
    assert main(command) == 1
    assert "0 of 1 tick are equal to the recording bit for bit" in capsys.readouterr().out
    assert main([*command, "--tolerance", "0.1"]) == 0


def test_what_was_seen_and_answered_comes_back(policy: Policy) -> None:
    session = policy.open_session("arm")
    raw = fakes.observation(num_frames=3)
    del raw["observation/exterior_image_1_left"]  # a camera that may be missing
    reply = session.infer(raw).result()
    session.close("done")
    (recording,) = recordings(policy)
    (tick,) = recording.ticks(fakes.embodiment())
    assert np.array_equal(tick.actions, reply.actions)
    assert tick.observation.frames["exterior_image_2_left"] is None
    assert np.array_equal(tick.observation.frames["wrist_image_left"], raw["observation/wrist_image_left"])
    assert tick.observation.state["joint_position"].tolist() == raw["observation/joint_position"].tolist()
    assert tick.observation.prompt == raw["prompt"]
    assert tick.about["restart_reason"] == "first tick"
    assert set(tick.about["timings_ms"]) >= {"preprocess", "encode", "total"}
    assert recording.about["checkpoint"] == "none"
    assert [event["event"] for event in recording.events] == ["tick", "closed"]


def test_a_slow_disk_costs_ticks_of_the_recording_and_never_of_the_robot(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()
    save = recorder_module.save_file
    monkeypatch.setattr(recorder_module, "save_file", lambda *a: free.wait(20) and save(*a))
    assert policy.recorder is not None
    policy.recorder._works.maxsize = 4
    session = policy.open_session("arm")
    for _ in range(12):
        session.infer(fakes.observation()).result(5)
    free.set()
    (recording,) = recordings(policy)
    assert 4 <= recording.num_ticks < 12
    assert [r.getMessage() for r in caplog.records if "is not recorded: the disk is behind" in r.getMessage()]
    with pytest.raises(BadRequest, match="ticks are missing"):
        recording_without_first(recording).require_self_contained()


def recording_without_first(recording: Recording) -> Recording:
    return Recording(recording.folder, recording.about, recording.events[1:])


@pytest.mark.parametrize("trouble", ["a limit", "a full disk"])
def test_a_full_disk_and_a_limit_end_the_recording_alone(
    policy: Policy, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    assert policy.recorder is not None
    if trouble == "a limit":
        policy.recorder._limit = 1000
    else:
        monkeypatch.setattr(recorder_module, "save_file", full)
    session = policy.open_session("arm")
    for _ in range(5):
        session.infer(fakes.observation()).result(5)
    policy.recorder.close()
    told = [record.getMessage() for record in caplog.records if "recording stops" in record.getMessage()]
    assert len(told) == 1
    assert ("the limit" if trouble == "a limit" else "No space left") in told[0]


def test_forks_and_restored_sessions_are_recorded_but_not_replayed_alone(tmp_path: Path) -> None:
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(max_sessions=4))
    policy.recorder = Recorder(tmp_path / "recorded", {})
    rng = np.random.default_rng(0)
    session = policy.open_session("arm")
    session.infer(droid_observation(rng, 1, "stack")).result()
    snapshot, fork = session.snapshot(), policy.fork(session, "fork")
    fork.infer(droid_observation(rng, 4, "stack")).result()
    session.restore(snapshot)
    found = {recording.about["session_id"]: recording for recording in recordings(policy)}
    policy.release(snapshot)
    policy.close()
    policy.engine.shutdown()
    with pytest.raises(BadRequest, match="goes on from arm, which is not in it"):
        found["fork"].require_self_contained()
    with pytest.raises(BadRequest, match="goes on from a snapshot that was restored"):
        found["arm"].require_self_contained()


def test_folders_that_are_no_recording_are_named(policy: Policy, tmp_path: Path) -> None:
    policy.open_session("arm").infer(fakes.observation()).result()
    (recording,) = recordings(policy)
    with pytest.raises(BadRequest, match=r"expected a recorded session .* there are 1 in it, the last one is .*-arm"):
        Recording.open(recording.folder.parent)
    with pytest.raises(BadRequest, match="expected a recorded session"):
        Recording.open(tmp_path / "nowhere")
    (recording.folder / "ticks" / "000000.safetensors").write_bytes(b"")
    with pytest.raises(BadRequest, match=r"000000.safetensors: not a tick of this robot \(oxe_droid\)"):
        list(recording.ticks(fakes.embodiment()))
    about = json.loads((recording.folder / "session.json").read_text())
    (recording.folder / "session.json").write_text(json.dumps(about | {"format": 9}))
    with pytest.raises(BadRequest, match="expected format 1"):
        Recording.open(recording.folder)
