"""Recordings that would have looked whole and were not; disks, ids and limits."""

from __future__ import annotations

import resource
import signal
import threading

import numpy as np
import policy_fakes as fakes
import pytest

torch = pytest.importorskip("torch")
from engines import droid_observation, random_checkpoint  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_recorder import recordings  # noqa: E402

from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.errors import BadRequest  # noqa: E402
from worldkv.load import load_policy  # noqa: E402
from worldkv.robots import recorder as recorder_module  # noqa: E402
from worldkv.robots.recorder import Recorder  # noqa: E402
from worldkv.robots.recording import RecordedTick  # noqa: E402
from worldkv.show.recorded import Difference  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def policy(tmp_path):
    policy = fakes.make_policy(fakes.FakeModel())
    policy.recorder = Recorder(tmp_path / "recorded", {"checkpoint": "none"})
    yield policy
    fakes.end(policy)


def test_restored_before_its_first_tick_is_not_self_contained(tmp_path):
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(max_sessions=4))
    policy.recorder = Recorder(tmp_path / "recorded", {})
    rng = np.random.default_rng(0)
    session = policy.open_session("arm")
    session.infer(droid_observation(rng, 1, "stack")).result()
    snapshot = session.snapshot()
    other = policy.open_session("other")
    other.restore(snapshot)
    other.infer(droid_observation(rng, 4, "stack")).result()
    found = {r.about["session_id"]: r for r in recordings(policy)}
    policy.release(snapshot)
    policy.close()
    policy.engine.shutdown()

    with pytest.raises(BadRequest):
        found["other"].require_self_contained()


def test_a_lost_reset_is_told(policy, monkeypatch):
    gate = threading.Event()
    entered = threading.Event()
    save = recorder_module.save_file

    def slow(*a):
        entered.set()
        gate.wait(20)
        return save(*a)

    monkeypatch.setattr(recorder_module, "save_file", slow)
    policy.recorder._works.maxsize = 2
    session = policy.open_session("arm")
    session.infer(fakes.observation()).result(5)
    entered.wait(5)
    session.infer(fakes.observation()).result(5)
    session.infer(fakes.observation()).result(5)
    session.reset().result(5)  # queue is full: dropped
    gate.set()
    while not policy.recorder._works.empty():
        pass
    session.infer(fakes.observation()).result(5)
    (recording,) = recordings(policy)

    with pytest.raises(BadRequest):
        recording.require_self_contained()


def test_one_clients_long_id_does_not_stop_everybodys_recording(policy):
    bad = "\U00020000" * 64
    assert bad.isprintable()
    policy.open_session(bad).infer(fakes.observation()).result(5)
    policy.open_session("good").infer(fakes.observation()).result(5)
    names = [r.about["session_id"] for r in recordings(policy)]
    assert "good" in names


def test_a_really_full_disk_stops_the_recording_once(policy, caplog):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    session = policy.open_session("arm")
    session.infer(fakes.observation()).result(5)
    while policy.recorder._works.qsize():
        pass
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, old[1]))
        for _ in range(4):
            session.infer(fakes.observation()).result(5)
        policy.recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)

    told = [r for r in caplog.records if "recording stops" in r.getMessage()]
    assert len(told) == 1


def test_the_limit_holds_over_restarts(tmp_path):
    def size():
        return sum(p.stat().st_size for p in (tmp_path / "r").rglob("*") if p.is_file())

    for _ in range(4):
        policy = fakes.make_policy(fakes.FakeModel())
        policy.recorder = Recorder(tmp_path / "r", {}, limit_bytes=600_000)
        s = policy.open_session("arm")
        for _ in range(3):
            s.infer(fakes.observation()).result(5)
        policy.close()
    assert size() < 2 * 600_000, size()


def test_ticks_that_waited_when_the_limit_was_reached_are_not_written(tmp_path):
    policy, go_on = fakes.make_policy(fakes.FakeModel()), threading.Event()
    policy.recorder = Recorder(tmp_path / "r", {}, limit_bytes=1)
    slow = policy.recorder.begin("slow")
    assert policy.recorder.put(slow, 0, lambda: go_on.wait(10) and None)  # a slow disk
    session = policy.open_session("arm")
    for _ in range(3):
        session.infer(fakes.observation()).result(5)
    go_on.set()
    policy.close()
    assert [path.name for path in (tmp_path / "r").rglob("*.safetensors")] == ["000000.safetensors"]


def test_nan_latents_are_a_difference():
    tick = RecordedTick(0, 0.0, None, np.ones((2, 2), np.float32), torch.ones(3), {})
    d = Difference()
    d.add(tick, np.ones((2, 2), np.float32), torch.full((3,), float("nan")))

    assert d.exceeds(1e-2)


def test_a_required_camera_that_the_file_lacks_is_refused(policy):
    policy.open_session("arm").infer(fakes.observation()).result(5)
    (recording,) = recordings(policy)
    robot = fakes.embodiment()

    path = recording.folder / "ticks" / "000000.safetensors"
    tensors = load_file(path)
    tensors["frames.renamed"] = tensors.pop("frames.wrist_image_left")
    save_file(tensors, path)
    with pytest.raises(BadRequest):
        list(recording.ticks(robot))
