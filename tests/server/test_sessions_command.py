"""`worldkv sessions`: what is open, one in a file, and one from a file, against a server as it runs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from test_rest import call, delete, serving, tick

from worldkv.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_a_session_goes_through_a_file_with_and_without_its_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLDKV_API_KEY", "one")
    with serving(api_key="one,two") as server:
        url = ["--url", f"http://127.0.0.1:{server.port}"]
        for number in range(2):
            tick(server, "lab/arm", number, "one")
        tick(server, "private", 0, "two")
        assert main(["sessions", *url]) == 0
        told = capsys.readouterr().out
        assert "1 open session\n" in told
        assert "lab/arm" in told
        assert "3 frames" in told
        sizes = {}
        for kind, flags in (("pages", []), ("compact", ["--compact"])):
            file = tmp_path / kind / "arm.session"
            assert main(["sessions", "export", "lab/arm", *flags, "-o", str(file), *url]) == 0
            assert f"{file}: session lab/arm" in capsys.readouterr().out
            assert [path.name for path in file.parent.iterdir()] == ["arm.session"]
            sizes[kind] = file.stat().st_size
            assert main(["sessions", "import", str(file), "--as", kind, "--exact", *url]) == 0
            assert f"session {kind}: goes on after 3 frames, bit for bit" in capsys.readouterr().out
        assert sizes["compact"] < sizes["pages"]
        expected = tick(server, "lab/arm", 2, "one")
        for kind in sizes:
            assert np.array_equal(tick(server, kind, 2, "one"), expected), kind

        file = tmp_path / "pages" / "arm.session"
        cut = tmp_path / "cut.session"
        cut.write_bytes(file.read_bytes()[:-1])
        for arguments, status, words in (
            (["export", "nobody"], 1, "session nobody is not known here"),
            (["export", "private"], 1, "session private is not known here"),
            (["import", str(cut)], 1, "bad_request: import: truncated"),
            (["import", str(file), "--as", "pages"], 1, "'pages' is open already"),
            (["import", str(tmp_path / "none")], 2, "none"),
            (["export", "lab/arm", "--api-key", "three"], 1, "unauthorised"),
        ):
            assert main(["sessions", *arguments, *url]) == status, arguments
            assert words in capsys.readouterr().err, arguments
        assert sorted(path.name for path in tmp_path.iterdir()) == ["compact", "cut.session", "pages"]
        assert call(server, "GET", "/v1/sessions", key="one")[1]["sessions"][0]["session_id"] == "lab/arm"
        for name in ("lab/arm", *sizes):
            delete(server, name, key="one")
        delete(server, "private", key="two")


@contextmanager
def answering(text: bytes) -> Iterator[int]:
    """A port where one caller gets this text, and then the end of the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(text)

        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "ended"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nnginx", "the server answered 404, and not as worldkv"),
        (b"", "closed connection without response"),
    ],
)
def test_a_connection_that_breaks_leaves_no_file(
    text: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(text) as port:
        arguments = ["sessions", "export", "arm", "--output", str(tmp_path / "arm"), "--url", f"127.0.0.1:{port}"]
        assert main(arguments) > 0
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_option_is_taken_and_then_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["export"], "export: a session's ID is needed"),
        (["import"], "import: a FILE is needed"),
        (["list", "arm"], "list: takes nothing more, got 'arm'"),
        (["import", "file", "--compact"], "--compact: is for export"),
        (["export", "arm", "--as", "other"], "--as: is for import"),
        (["--output", "file"], "--output: is for export"),
        (["delete", "arm"], "delete"),
    ):
        assert main(["sessions", *arguments]) == 2
        assert words in capsys.readouterr().err, arguments
