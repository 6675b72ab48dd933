"""Recordings that were cut: by a full disk, a killed server, a limit. They go on where they can, and say where."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import policy_fakes as fakes
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import droid_observation, random_checkpoint  # noqa: E402

from worldkv.cli.main import main  # noqa: E402
from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.errors import BadRequest  # noqa: E402
from worldkv.load import load_policy  # noqa: E402
from worldkv.robots import recorder as recorder_module  # noqa: E402
from worldkv.robots.policy import Policy, PolicySession  # noqa: E402
from worldkv.robots.recorder import Recorder  # noqa: E402
from worldkv.robots.recording import Recording  # noqa: E402
from worldkv.server.download import tar_parts  # noqa: E402
from worldkv.show.lerobot import write_lerobot  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[Policy]:
    policy = fakes.make_policy(fakes.FakeModel())
    policy.recorder = Recorder(tmp_path / "recorded", {"checkpoint": "none"}, retry_s=0.05)
    yield policy
    fakes.end(policy)


def drive(session: PolicySession, num_ticks: int) -> None:
    for _ in range(num_ticks):
        session.infer(fakes.observation()).result(20)


def recorded(policy: Policy) -> Recording:
    assert isinstance(policy.recorder, Recorder)
    policy.close()
    (folder,) = policy.recorder.folder.iterdir()
    return Recording.open(folder)


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.01)


def written(policy: Policy, text: str, count: int = 1) -> bool:
    assert isinstance(policy.recorder, Recorder)
    return sum(path.read_text().count(text) for path in policy.recorder.folder.glob("*/events.jsonl")) >= count


@contextmanager
def no_room(num_bytes: int) -> Iterator[None]:
    """As on a full disk: the system takes that many bytes of any file, and no more."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def test_recording_goes_on_once_the_disk_has_room_and_tells_of_the_gap(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    session = policy.open_session("arm")
    drive(session, 2)
    eventually(lambda: written(policy, '"tick"', 4))
    with no_room(20_000):
        drive(session, 3)
        eventually(lambda: "recording stops until there is room" in caplog.text)
    eventually(lambda: written(policy, '"gap"'))  # though the robot asks for nothing
    assert "recording goes on" in caplog.text
    drive(session, 2)
    session.close("done")
    recording = recorded(policy)
    assert [event["event"] for event in recording.events] == ["tick", "tick", "gap", "tick", "tick", "closed"]
    assert [event["tick"] for event in recording.events if event["event"] == "tick"] == [0, 1, 5, 6]
    assert recording.events[2]["missing"] == 3
    (cut,) = recording.cuts()
    assert cut.text == "after tick 1 3 ticks or events are missing: the disk was behind or full"
    assert len([r for r in caplog.records if "recording stops" in r.getMessage()]) == 1
    with pytest.raises(BadRequest, match="ticks are missing that later ones stand on: after tick 1 3 ticks"):
        recording.require_self_contained()


def test_a_disk_that_takes_half_a_line_leaves_whole_lines(policy: Policy) -> None:
    session = policy.open_session("arm")
    drive(session, 2)
    eventually(lambda: written(policy, '"tick"', 4))
    (events,) = policy.recorder.folder.glob("*/events.jsonl")  # type: ignore[union-attr]
    before = events.read_bytes()
    with no_room(len(before) + 10):  # ten bytes of the next line fit
        session.reset().result(20)
        eventually(lambda: policy.recorder._retry.is_waiting)  # type: ignore[union-attr]
        assert events.read_bytes() == before
    eventually(lambda: written(policy, '"gap"'))
    drive(session, 1)
    session.close("done")
    names = [event["event"] for event in recorded(policy).events]
    assert names == ["tick", "tick", "gap", "tick", "closed"]


def test_a_lost_end_is_written_once_there_is_room(policy: Policy) -> None:
    session = policy.open_session("arm")
    drive(session, 1)
    eventually(lambda: written(policy, '"tick"', 2))
    with no_room(10):
        drive(session, 1)
        session.close("done").result(20)
        eventually(lambda: policy.recorder._retry.is_waiting)  # type: ignore[union-attr]
    eventually(lambda: written(policy, '"closed"'))
    events = recorded(policy).events
    assert [event["event"] for event in events] == ["tick", "gap", "closed"]
    assert events[1]["missing"] == 1
    assert events[2]["reason"] == "done"


def test_a_limit_ends_when_somebody_makes_room(policy: Policy) -> None:
    recorder = policy.recorder
    assert isinstance(recorder, Recorder)
    old = recorder.folder / "old"
    old.mkdir()
    (old / "ballast").write_bytes(bytes(10_000_000))
    recorder.num_bytes += 10_000_000
    recorder._limit = 9_000_000
    session = policy.open_session("arm")
    drive(session, 2)
    eventually(lambda: recorder._retry.is_waiting)
    shutil.rmtree(old)
    eventually(lambda: written(policy, '"gap"'))
    drive(session, 1)
    recording = recorded(policy)
    assert [event["tick"] for event in recording.events if event["event"] == "tick"] == [2]


def test_a_folder_that_could_not_be_begun_leaves_nothing(policy: Policy) -> None:
    session = policy.open_session("arm")
    with no_room(5):  # too little for session.json
        drive(session, 1)
        eventually(lambda: policy.recorder._retry.is_waiting)  # type: ignore[union-attr]
        assert not list(policy.recorder.folder.iterdir())  # type: ignore[union-attr]


def test_the_retry_waits_longer_each_time_and_forgets_that_after_a_good_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: now[0])
    retry, waits = recorder_module._Retry(1.0), []
    for _ in range(7):
        retry.failed()
        waits.append(retry.seconds_left())
        now[0] += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert retry.due()
    assert retry.worked()
    now[0] += 31
    assert retry.failed()
    assert retry.seconds_left() == 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ticks of a tiny checkpoint and an end."""
    folder = tmp_path_factory.mktemp("whole")
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(max_sessions=1))
    policy.recorder = Recorder(folder, {})
    session, rng = policy.open_session("arm"), np.random.default_rng(0)
    for number in range(4):
        session.infer(droid_observation(rng, 1 if number == 0 else 4, size=(45, 80))).result()
    session.close("done")
    policy.close()
    policy.engine.shutdown()
    return next(folder.iterdir())


def lines(folder: Path) -> list[str]:
    return (folder / "events.jsonl").read_text().splitlines(keepends=True)


def write_lines(folder: Path, kept: list[str]) -> None:
    (folder / "events.jsonl").write_text("".join(kept))


def no_end(folder: Path) -> None:
    write_lines(folder, lines(folder)[:-1])


def half_a_line(folder: Path) -> None:
    write_lines(folder, [*lines(folder)[:3], lines(folder)[3][:40]])


def short_file(number: int) -> Callable[[Path], None]:
    def shorten(folder: Path) -> None:
        path = folder / "ticks" / f"{number:06d}.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    return shorten


def missing_file(number: int) -> Callable[[Path], None]:
    return lambda folder: (folder / "ticks" / f"{number:06d}.safetensors").unlink()


def lost_tick(folder: Path) -> None:
    write_lines(folder, lines(folder)[:1] + lines(folder)[2:])


def gap_at_the_end(folder: Path) -> None:
    gap = json.dumps({"event": "gap", "seconds": 1.0, "missing": 2}) + "\n"
    write_lines(folder, [*lines(folder)[:4], gap, lines(folder)[4]])


@pytest.mark.parametrize(
    ("damage", "num_ticks", "words"),
    [
        (no_end, 4, "after tick 3 there is no end"),
        (half_a_line, 3, "after tick 2 a line of events.jsonl is cut off"),
        (short_file(3), 3, "tick 3: 000003.safetensors is cut off or damaged"),
        (missing_file(3), 3, "tick 3: 000003.safetensors is missing"),
        (gap_at_the_end, 4, "after tick 3 2 ticks or events are missing"),
    ],
    ids=["no end", "half a line", "short file", "missing file", "gap at the end"],
)
def test_a_recording_that_is_cut_short_is_replayed_to_there_and_says_so(
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    num_ticks: int,
    words: str,
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = Path(shutil.copytree(whole, tmp_path / "cut"))
    damage(folder)
    command = ["replay", "--checkpoint", str(random_checkpoint("ti2v")), "--recording", str(folder)]
    assert main([*command, "--output", str(tmp_path / "out"), "--lerobot", str(tmp_path / "set")]) == 1
    out = capsys.readouterr().out
    assert f"the recording is cut: {words}" in out
    assert f"{num_ticks} of {num_ticks} ticks are equal to the recording bit for bit" in out
    assert f"only the {num_ticks} ticks before the cut were replayed; hence exit code 1" in out
    assert "of the part before the cut" in out
    assert len(parquet.read_table(tmp_path / "set/data/chunk-000/episode_000000.parquet")) == num_ticks


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lost_tick, "expected tick 1, got tick 2"),
        (short_file(1), "tick 1: 000001.safetensors is cut off or damaged"),
        (missing_file(0), "tick 0: 000000.safetensors is missing"),
        (lambda folder: write_lines(folder, []), "there is no whole tick in it"),
        (lambda folder: (folder / "events.jsonl").unlink(), "there is no whole tick in it"),
    ],
    ids=["lost tick", "short file", "first file missing", "no lines", "no file of lines"],
)
def test_what_stands_on_something_missing_is_refused(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Any], words: str
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "cut"))
    damage(folder)
    command = ["replay", "--checkpoint", str(random_checkpoint("ti2v")), "--recording", str(folder)]
    assert main([*command, "--output", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err


def test_a_dataset_is_written_of_what_is_whole(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = Path(shutil.copytree(whole, tmp_path / "cut"))
    missing_file(0)(folder)
    with pytest.raises(BadRequest, match="no whole tick to write"):
        write_lerobot(tmp_path / "set", Recording.open(folder), fakes.embodiment())


def test_a_whole_recording_has_no_cut(whole: Path) -> None:
    assert Recording.open(whole).cuts() == []


@pytest.mark.parametrize("trouble", ["vanishes", "shrinks"])
def test_a_download_ends_whatever_happens_to_the_files(whole: Path, tmp_path: Path, trouble: str) -> None:
    """The rest of the tar file is whole, and the recording in it says where it is cut."""
    folder = Path(shutil.copytree(whole, tmp_path / "arm"))
    last = folder / "ticks" / "000003.safetensors"
    data, parts = b"", tar_parts(folder)
    while b"000001.safetensors" not in data:
        data += next(parts)
    if trouble == "vanishes":
        last.unlink()
    else:
        last.write_bytes(last.read_bytes()[:100])
    data += b"".join(parts)
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        archive.extractall(tmp_path / "got", filter="data")
    (cut,) = Recording.open(tmp_path / "got" / "arm").cuts()
    assert cut.text.startswith("tick 3: 000003.safetensors is " + ("missing" if trouble == "vanishes" else "cut off"))
