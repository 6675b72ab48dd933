"""A session's frames for viewers: an mp4 of what runs, and a stream that players show."""

from __future__ import annotations

import re
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from io import BytesIO
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")
pytest.importorskip("av")

import av
from server_fakes import eventually
from test_console import call, observation, serving

from worldkv.cli.main import main
from worldkv.client import PolicyClient
from worldkv.robots.recorder import Recorder
from worldkv.robots.recording import Recording
from worldkv.server.console import stream
from worldkv.server.console.history import Latest
from worldkv.server.console.stream import jpeg_of
from worldkv.server.server import PolicyServer
from worldkv.show.video import read_video

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def robot(server: PolicyServer) -> Iterator[None]:
    stop = threading.Event()

    def drive() -> None:
        with PolicyClient(port=server.port, session_id="arm") as client:
            number = 0
            while not stop.wait(0.05):
                client.infer(observation(number))
                number += 1

    thread = threading.Thread(target=drive)
    thread.start()
    eventually(lambda: "arm" in server._service.app.engine.core.names, 20)
    yield
    stop.set()
    thread.join()
    call(server, "DELETE", "sessions/arm")


def test_a_running_session_is_filmed(
    server: PolicyServer, robot: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, output = f"ws://127.0.0.1:{server.port}", tmp_path / "arm.mp4"
    assert main(["film", "--url", url, "--session", "arm", "--ticks", "3", "--output", str(output)]) == 0
    video = read_video(output)
    assert len(video) == 3 * 8
    assert video[:, :, : video.shape[2] // 2 - 8].std() > 20, "the cameras are to be seen"
    assert main(["film", "--url", url, "--session", "leg", "--output", str(tmp_path / "leg.mp4")]) == 1
    assert "session 'leg' is not open; open are arm" in capsys.readouterr().err
    assert not (tmp_path / "leg.mp4").exists()
    assert main(["film", "--url", "ws://127.0.0.1:9", "--session", "arm"]) == 1
    eventually(lambda: server._service.sessions.get("arm").history.num_viewers == 0)


def next_picture(answer: HTTPResponse) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += answer.read(1)
    found = re.search(rb"content-length: (\d+)", head)
    assert found is not None
    return answer.read(int(found[1]))


def test_a_stream_holds_a_picture_a_tick(server: PolicyServer, robot: None) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/sessions/arm/stream", timeout=20) as answer:
        assert answer.headers["content-type"] == "multipart/x-mixed-replace; boundary=frame"
        for _ in range(3):
            with av.open(BytesIO(next_picture(answer)), format="mjpeg") as container:
                (frame,) = container.decode(video=0)
            assert (frame.height, frame.width) == (180, 3 * 320)
    eventually(lambda: server._service.sessions.get("arm").history.num_viewers == 0)


def test_many_viewers_see_what_was_drawn_once(
    server: PolicyServer, robot: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[bytes] = []

    def counted(latest: Latest) -> bytes:
        drawn.append(jpeg_of(latest))
        return drawn[-1]

    monkeypatch.setattr(stream, "jpeg_of", counted)
    url, seen = f"http://127.0.0.1:{server.port}/v1/sessions/arm/stream", list[list[bytes]]()

    def watch() -> None:
        with urllib.request.urlopen(url, timeout=20) as answer:
            seen.append([next_picture(answer) for _ in range(6)])

    viewers = [threading.Thread(target=watch) for _ in range(8)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    assert len(seen) == 8
    assert {picture for pictures in seen for picture in pictures} <= set(drawn)
    assert len(drawn) == len(set(drawn)), "a tick was drawn again"
    assert len(drawn) < sum(map(len, seen)) / 2, "nobody shared anything"
    eventually(lambda: server._service.sessions.get("arm").history.num_viewers == 0)


def test_a_recording_is_downloaded_while_it_runs_and_replays(tmp_path: Path) -> None:
    with serving() as server:
        server._service.app.recorder = Recorder(tmp_path / "recorded", {"embodiment": "oxe_droid"})
        with PolicyClient(port=server.port, session_id="arm") as client:
            client.infer(observation(0))
            url = f"http://127.0.0.1:{server.port}/v1/sessions/arm/recording"
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url.replace("arm", "leg"), timeout=20)
            with refused.value:
                assert refused.value.code == 404
            recorder = server._service.sessions.get("arm").session.record
            assert recorder is not None
            eventually(lambda: recorder.folder is not None and (recorder.folder / "events.jsonl").is_file())
            client.infer(observation(1))
            with urllib.request.urlopen(url, timeout=20) as answer, tarfile.open(fileobj=answer, mode="r|") as tar:
                assert ".tar" in answer.headers["content-disposition"]
                for member in tar:
                    path, content = tmp_path / "out" / member.name, tar.extractfile(member)
                    assert content is not None
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())
        server._service.app.recorder.close()
    (folder,) = (tmp_path / "out").iterdir()
    recording = Recording.open(folder)
    recording.require_self_contained()
    assert recording.num_ticks >= 1
    assert list(recording.ticks(server._service.app.embodiment))
