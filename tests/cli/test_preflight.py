"""`serve` and its like find out all they can before weights are read."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("uvicorn")

import torch
from engines import random_checkpoint

from worldkv import load
from worldkv.cli.main import main
from worldkv.server.listening import take_port


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a tensor has come too far."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read before all was checked")

    monkeypatch.setattr("worldkv.models.dreamzero.checkpoint.load_module", read)
    monkeypatch.delenv("WORLDKV_API_KEY", raising=False)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def told_by(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    said = capsys.readouterr()
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said.err
    assert "Traceback" not in said.err
    return errors[0]


@pytest.mark.parametrize("folder", ["nowhere", "good"])
def test_serve_checks_what_was_typed_before_the_folder(
    folder: str, taken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(random_checkpoint("ti2v")) if folder == "good" else str(tmp_path / folder)
    file = tmp_path / "file"
    file.write_text("x" * 2000)
    full = tmp_path / "full"
    full.mkdir()
    shutil.copy(file, full)
    for options, told in (
        (["--port", str(taken)], f"cannot listen on 127.0.0.1 port {taken}: the address is in use"),
        (["--host", "no.such.host.invalid", "--api-key", "k"], "cannot listen on no.such.host.invalid"),
        (["--host", "0.0.0.0"], "--host: 0.0.0.0 can be reached"),
        (["--api-key", "a,,b"], "--api-key: expected printable"),
        (["--record", str(file)], "--record: expected a folder"),
        (["--record", str(file / "in")], "--record: "),
        (["--attention", "hope"], "--attention: expected one of"),
        (["--cfg-scale", "nan"], "--cfg-scale: expected a number"),
    ):
        said = told_by(capsys, "serve", checkpoint, *(["--port", "0"] if "--port" not in options else []), *options)
        assert told in said


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--embodiment", "octopus.yaml"], "embodiment file octopus.yaml: does not exist"),
        (["--base", "nowhere"], "--base: expected a folder of a base Wan model, nowhere does not exist"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--attention", "cudnn", "--device", "cpu"], "attention: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["replay", "--recording", "r"]], ids=lambda c: c[0])
def test_files_devices_and_backends_are_known_before_weights(
    command: list[str],
    options: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if command[0] == "replay":
        monkeypatch.setattr("worldkv.robots.recording.Recording.open", lambda folder: _Recording())
        command = [*command, "-o", str(tmp_path / "out")]
    assert told in told_by(capsys, *command, str(random_checkpoint("ti2v")), *options)


class _Recording:
    about: dict[str, bool] = {}  # noqa: RUF012

    def require_self_contained(self) -> None:
        return

    def cuts(self) -> list[object]:
        return []

    def before_cuts(self) -> _Recording:
        return self


@pytest.mark.parametrize("command", [["convert", "-o", "new"], ["inspect"], ["plan"], ["serve", "--port", "0"]])
def test_a_robot_and_a_base_are_looked_for_first(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(random_checkpoint("ti2v"))
    for options, told in (
        (["--base", "nowhere"], "--base: expected a folder of a base Wan model, nowhere does not exist"),
        (["--embodiment", "octopus.yaml"], "embodiment file octopus.yaml: does not exist"),
    ):
        assert told in told_by(capsys, *command, folder, *options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("matplotlib", ["doctor", "-o", "p.png"]),
        ("matplotlib", ["plan", "-o", "p.png"]),
        ("matplotlib", ["demo"]),
        ("matplotlib", ["replay", "k", "--clip", "c"]),
        ("av", ["film", "--session", "s"]),
        ("av", ["replay", "k", "--clip", "c"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_packages_for_what_is_written_last_are_looked_for_first(
    package: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    monkeypatch.chdir(tmp_path)
    assert f"--output: needs {package}, which cannot be found: pip install 'worldkv[" in told_by(capsys, *words)
    assert list(tmp_path.iterdir()) == []


def test_recordings_that_fill_their_limit_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ticks").write_bytes(b"x" * 5000)
    options = ["--record", str(tmp_path), "--record-limit-gb", "0.000001", "--port", "0"]
    told = told_by(capsys, "serve", str(random_checkpoint("ti2v")), *options)
    assert "nothing would be recorded" in told


def test_a_collector_without_its_packages_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    told = told_by(capsys, "serve", str(tmp_path / "gone"), "--port", "0", "--otlp", "http://127.0.0.1:1")
    assert "worldkv[otel]" in told


def test_the_port_is_held_from_the_check_on() -> None:
    (listening,) = take_port("127.0.0.1", 0)
    with contextlib.closing(listening) as held, pytest.raises(OSError, match="is in use"):
        take_port("127.0.0.1", held.getsockname()[1])


@pytest.mark.parametrize("command", ["bench", "convert", "replay", "film", "plan", "doctor", "demo"])
def test_outputs_are_checked_first(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("mine")
    folder.mkdir()
    wrong = folder if command in ("film", "plan", "doctor") else file
    more = {
        "convert": ["nowhere"],
        "replay": ["nowhere", "--clip", "nowhere"],
        "film": ["--session", "s"],
    }.get(command, [])
    assert "--output: expected a f" in told_by(capsys, command, *more, "-o", str(wrong))
    assert file.read_text() == "mine"


def test_memory_is_judged_from_sizes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ["serve", str(random_checkpoint("ti2v")), "--port", "0", "--device", "cpu", "--block-size", "16"]
    monkeypatch.setattr(load, "free_on_host", lambda: 4_000_000)
    told = told_by(capsys, *serve, "--max-sessions", "50")
    assert "--max-sessions: 50 sessions will not fit" in told
    assert "of weights" in told
    assert "a session" in told
    monkeypatch.setattr(load, "free_on_host", lambda: 1_000_000)
    told = told_by(capsys, *serve)
    assert "--max-sessions: 1 session will not fit" in told
    assert "--cfg-scale 1 (half the cache)" in told


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.00 GiB.\nMore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_runs_out_while_loading_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("worldkv.models.dreamzero.checkpoint.load_module", full)
    monkeypatch.setattr("warnings.warn", lambda *_, **__: None)  # about the tokenizer
    told = told_by(capsys, "serve", str(random_checkpoint("ti2v")), "--port", "0", "--device", "cpu")
    assert "out of memory while loading weights" in told
    assert "fewer sessions (--max-sessions)" in told
