"""The command line as a whole: help, versions, exit codes, and errors that are one line."""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from worldkv import __version__
from worldkv.cli import common
from worldkv.cli.main import build_parser, main
from worldkv.errors import CheckpointError, EngineStopped
from worldkv.show import terminal

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("serve", "demo", "replay", "verify", "inspect")


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_s_help_has_an_example_that_parses_and_the_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys)
    assert "exit codes: 0" in text
    example = text.partition("example:\n")[2].splitlines()[0].split()
    assert example[:2] == ["worldkv", command]
    assert build_parser().parse_args(example[1:]).command == command


def test_version_and_help_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\nfrom worldkv.cli.main import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numpy', 'rich', 'msgpack'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"worldkv {__version__}", "[]"], done.stderr


def test_defaults_are_those_of_the_engine_and_the_server() -> None:
    from worldkv.engine.engine import EngineConfig
    from worldkv.server.config import ServerConfig

    parsed = build_parser().parse_args(["serve", "--checkpoint", "x"])
    assert (parsed.host, parsed.port, parsed.episode_gap) == (
        ServerConfig.host,
        ServerConfig.port,
        ServerConfig.episode_gap_s,
    )
    limits = (parsed.max_sessions_per_key, parsed.max_sockets_per_key, parsed.max_snapshots_per_key)
    assert limits == (ServerConfig.max_sessions, ServerConfig.max_connections, ServerConfig.max_snapshots)
    times = (parsed.session_grace, parsed.session_idle)
    assert times == (ServerConfig.session_grace_s, ServerConfig.session_idle_s)
    engine = EngineConfig()
    assert (parsed.block_size, parsed.max_sessions, parsed.attention) == (
        engine.block_size,
        engine.max_sessions,
        engine.attention,
    )


SERVE_NO_SESSIONS = ["serve", "--checkpoint", "x", "--max-sessions-per-key", "0"]


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["serve"], ["inspect"], ["verify", "x", "--unheard-of"], SERVE_NO_SESSIONS]
)
def test_what_cannot_be_parsed_is_exit_code_2(arguments: list[str]) -> None:
    assert main(arguments) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("tensor x is missing"), 2),
        (ValueError("--ticks: expected more"), 2),
        (FileNotFoundError("no such video"), 2),
        (ModuleNotFoundError("No module named 'av'"), 2),
        (EngineStopped("the engine is stuck"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("worldkv.cli.inspect.run", fail)
    assert main(["inspect", "x"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert str(error) in said.err
    if isinstance(error, ModuleNotFoundError):
        assert "pip install 'worldkv[all]'" in said.err


def test_verbose_shows_where_an_error_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # the test run's logging stays as it is
    assert main(["inspect", str(tmp_path / "gone"), "--verbose"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise AssertionError("more was refunded than charged")

    monkeypatch.setattr("worldkv.cli.inspect.run", fail)
    with pytest.raises(AssertionError):
        main(["inspect", "x"])


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1023 * 1024, "1023 KiB"),
        (720896, "704 KiB"),
        (2**30, "1.00 GiB"),
    ],
)
def test_sizes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert terminal.size_text(num_bytes) == text


def test_progress_is_a_bar_on_a_terminal_and_one_plain_line_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    with terminal.progress("reading") as step:
        step(1, 2)
    assert capsys.readouterr().err == "reading ...\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.progress("reading") as step:
        step(2, 2)
    assert "2/2" in capsys.readouterr().err


def test_a_warning_is_one_line_and_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with common.plain_warnings():
        for _ in range(2):
            warnings.warn("no tokenizer here", stacklevel=1)
    assert capsys.readouterr().err == "warning: no tokenizer here\n"
