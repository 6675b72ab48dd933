"""One way to say checkpoint, output, limits; what is mistyped is named, and what was meant is guessed."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worldkv.cli import errors, numbers
from worldkv.cli.main import main
from worldkv.cli.parser import COMMANDS, build_parser
from worldkv.cli.places import check_place
from worldkv.errors import AdmissionRefused
from worldkv.words import count, of_os_error, without_errno

ROOT = Path(__file__).resolve().parents[2]
OF_CHECKPOINTS = {
    "serve": [],
    "replay": ["--clip", "c"],
    "verify": [],
    "inspect": [],
    "convert": ["-o", "o"],
    "plan": [],
}


@pytest.mark.parametrize("command", OF_CHECKPOINTS)
def test_a_checkpoint_is_a_folder_by_itself_or_by_name(command: str) -> None:
    more = OF_CHECKPOINTS[command]
    for words in (["k", *more], [*more, "k"], ["--checkpoint", "k", *more], ["k", "--checkpoint", "k", *more]):
        assert build_parser().parse_args([command, *words]).checkpoint == Path("k")
    with pytest.raises(errors.UsageError, match="--checkpoint: two are given, k and other; give one"):
        build_parser().parse_args([command, "k", "--checkpoint", "other", *more])


@pytest.mark.parametrize("command", ["serve", "verify", "inspect", "convert"])
def test_a_checkpoint_that_is_needed_is_asked_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *OF_CHECKPOINTS[command]]) == 2
    assert "a checkpoint folder, as DIR or --checkpoint DIR, is needed" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "convert", "demo", "doctor", "film", "plan", "replay"])
def test_every_output_is_a_file_or_a_folder_and_says_which(command: str, tmp_path: Path) -> None:
    parser = build_parser(learned=True)
    helped = subprocess_free_help(parser, command)
    said = re.search(r"-o(?: (?:DIR|FILE))?, --output (DIR|FILE)\s+(file|folder) to write", helped)
    assert said is not None, helped
    assert (said[1], said[2]) in (("DIR", "folder"), ("FILE", "file"))


def subprocess_free_help(parser: argparse.ArgumentParser, command: str) -> str:
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return str(commands.choices[command].format_help())


def test_a_place_that_is_the_other_kind_or_cannot_be_written_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    check_place("--output", tmp_path / "new" / "folder", "folder")
    check_place("--output", tmp_path / "new" / "film.mp4", "file", (".mp4",))
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is made by looking"
    for path, kind, told in (
        (file, "folder", "expected a folder"),
        (tmp_path, "file", "expected a file"),
        (file / "x", "folder", "is a file"),
        (tmp_path / "film.gif", "file", "ends in .mp4"),
        (Path("/proc/nothing"), "folder", "cannot be written"),
    ):
        with pytest.raises(errors.UsageError, match=f"--output: .*{re.escape(told)}"):
            check_place("--output", path, kind, (".mp4",) if kind == "file" else ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["servee"], "did you mean serve?"),
        (["inspekt", "x"], "did you mean inspect?"),
        (["zzz"], "see worldkv --help"),
        (["film", "--sesion", "x"], "did you mean --session?"),
        (["serve", "k", "--record-limt-gb", "3"], "did you mean --record-limit-gb?"),
        (["top", "extra"], "takes no 'extra'"),
        (["plan", "--precision", "fp9"], "--precision: invalid choice: 'fp9'"),
        (["convert", "k"], "what is missing: -o/--output"),
        (["replay", "k"], "what is missing: --clip or --recording"),
        (["replay", "k", "--clip", "c", "--recording", "r"], "--recording: cannot be given with --clip"),
        (["plan", "--base", "b"], "--base: expected a folder of a base Wan model, b does not exist"),
        (["plan", "--embodiment", "oxe_droid"], "--embodiment: is for a checkpoint folder; give one, or leave it out"),
        (["bench", "--url", "ws://"], "--url: 'ws://' has no host"),
        (
            ["bench", "--url", "h", "--device", "cpu"],
            "--device: is for an engine in this process; leave it",
        ),
        (["bench", "--url", "h", "--parts", "ticks"], "--parts: of a server only paced can be measured"),
        (["bench", "--parts", "baseline", "--precision", "fp8"], "--precision: baseline compares with 8 steps"),
        (["bench", "--parts", "fp8", "--steps", "5"], "--steps: fp8 compares with 8 steps"),
        (["bench", "--parts", "attention", "--steps", "5"], "--steps: is for parts that run an engine"),
        (["bench", "--robots", "3"], "--robots: is for robots at their own pace; give --parts paced as well"),
        (["bench", "--parts", "paced", "--proxy", "none"], "--proxy: is for a server; give its --url"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert told in said.err


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "-inf", "x", ""])
@pytest.mark.parametrize(
    "words",
    [
        ["convert", "k", "-o", "o", "--shard-gb"],
        ["serve", "k", "--record-limit-gb"],
        ["serve", "k", "--max-sessions"],
        ["serve", "k", "--block-size"],
        ["serve", "k", "--episode-gap"],
        ["plan", "--memory"],
        ["verify", "k", "--tolerance"],
        ["bench", "--sessions"],
        ["demo", "--ticks"],
        ["doctor", "--ticks"],
        ["film", "--session", "s", "--ticks"],
        ["replay", "k", "--clip", "c", "--ticks"],
    ],
    ids=lambda value: f"{value[0]} {value[-1]}" if isinstance(value, list) else "",
)
def test_a_number_out_of_range_names_its_option(
    words: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words[:-1], f"{words[-1]}={value}"]) == 2
    assert re.search(rf"{words[-1]}: expected .*, got {value!r}", capsys.readouterr().err)


def test_park_memory_may_be_nothing_and_not_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_parser().parse_args(["serve", "k", "--park-memory", "0"]).park_memory == 0
    assert main(["serve", "k", "--park-memory", "-1"]) == 2
    assert "--park-memory: expected a number of GB of at least 0, got '-1'" in capsys.readouterr().err


def test_fields_are_named_as_they_are_typed() -> None:
    options = build_parser().parse_args(["serve", "k"]).options
    for told, expected in (
        ("max_sessions: expected more than 0, got 0", "--max-sessions: expected more than 0, got 0"),
        ("episode_gap_s: expected seconds > 0", "--episode-gap: expected seconds > 0"),
        ("port: expected 0 to 65535", "--port: expected 0 to 65535"),
        ("max_parked_bytes: expected 0 or more", "--park-memory: expected 0 or more"),
        ("block_size: expected a power of two", "--block-size: expected a power of two"),
        ("host: x; set api_key, or listen elsewhere", "--host: x; set --api-key, or listen elsewhere"),
        ("the port is open", "the port is open"),
        ("max_chunk_size must be positive", "max_chunk_size must be positive"),
        ("a/max_sessions/b and 'max_sessions' are the user's", "a/max_sessions/b and 'max_sessions' are the user's"),
    ):
        assert errors.as_typed(told, options) == expected
    refused = AdmissionRefused("start with a larger max_sessions")
    assert errors.explain(refused, options) == "start with a larger --max-sessions"


def test_no_error_says_errno() -> None:
    assert of_os_error(PermissionError(errno.EACCES, "Permission denied", "a/b")) == "a/b: permission denied"
    assert of_os_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == "no space is left on the disk"
    assert of_os_error(FileNotFoundError("a: no such video file")) == "a: no such video file"
    made = OSError(errno.EADDRINUSE, "cannot listen on ::1 port 80: in use")
    assert of_os_error(made) == "cannot listen on ::1 port 80: in use"
    assert without_errno("x: [Errno 111] Connection refused; check") == "x: Connection refused; check"
    assert without_errno("[Errno -2] Name or service not known") == "Name or service not known"
    refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    assert errors.explain(refused, {}) == "nothing listens there"


def test_one_is_not_many() -> None:
    assert [count(n, "file") for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    assert count(2, "history", "histories") == "2 histories"


def test_a_session_count_is_a_number_or_auto() -> None:
    assert (numbers.session_count("auto"), numbers.session_count("3")) == (None, 3)


def run_it(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_python_runs_it_as_a_module_and_help_keeps_its_lines() -> None:
    done = run_it(sys.executable, "-m", "worldkv", "--help")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("start with") and line.endswith("worldkv demo") for line in lines)
    assert any(line.startswith("more about a command") for line in lines)
    assert all(command in done.stdout for command in COMMANDS)


ASK = """
eval "$COMPLETION"
function=$(complete -p worldkv | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
$function worldkv "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}" 2>/dev/null
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["se"], ["serve", "sessions"]),
        (["serve", "--episode"], ["--episode-gap"]),
        (["plan", "--precision", ""], ["model", "fp8"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
    ids=str,
)
def test_bash_really_completes(
    words: list[str], completed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    assert main(["completion", "bash"]) == 0
    monkeypatch.setenv("COMPLETION", capsys.readouterr().out)
    done = run_it("bash", "-c", ASK, "bash", "worldkv", *words)
    assert sorted(done.stdout.split()) == sorted(completed), done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_of_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    assert "max-sessions" in script
