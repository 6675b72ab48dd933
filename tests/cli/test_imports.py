"""What does without tensors answers at once: judged by what is imported, not by a clock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("torch", "diffusers", "transformers", "fastapi", "matplotlib", "pydantic", "safetensors", "uvicorn")

CODE = """
import sys
from worldkv.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as stopped:
    code = stopped.code
print("exit", code, *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def imported(*arguments: str) -> tuple[int, set[str], str]:
    """(exit code, top-level modules that were imported, what was said)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])}
    environment.pop("WORLDKV_API_KEY", None)
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    *said, last = done.stderr.splitlines()
    words = last.split()
    assert words[0] == "exit", done.stderr
    return int(words[1]), set(words[2:]), done.stdout + "\n".join(said)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--version"], 0, "worldkv "),
        (["--help"], 0, "COMMAND"),
        (["serve", "--help"], 0, "--max-sessions"),
        (["plan"], 0, "sessions that fit"),
        (["plan", "--memory", "nan"], 2, "--memory: expected"),
        (["serv"], 2, "did you mean serve?"),
        (["serve", "x", "--max-sesions", "3"], 2, "did you mean --max-sessions?"),
        (["serve", "nowhere", "--port", "0"], 2, "nowhere does not exist"),
        (["serve", "nowhere", "--port", "0", "--attention", "hope"], 2, "--attention: expected one of"),
        (["serve", "nowhere", "--host", "0.0.0.0"], 2, "set --api-key"),
        (["replay", "nowhere", "--clip", "nowhere"], 2, "--clip: expected a folder"),
        (["verify", "nowhere"], 2, "nowhere does not exist"),
        (["convert", "nowhere", "-o", "x"], 2, "nowhere does not exist"),
        (["bench", "--sessions", "0"], 2, "--sessions: expected"),
        (["bench", "--device", "toaster"], 2, "--device: expected cpu, cuda, cuda:N or auto, got 'toaster'"),
        (["bench", "--attention", "hope"], 2, "--attention: expected one of"),
        (["demo", "--ticks", "0"], 2, "--ticks: expected"),
        (["top", "--url", "ws://127.0.0.1:9"], 1, "127.0.0.1:9"),
        (["film", "--url", "ws://127.0.0.1:9", "--session", "x"], 1, "127.0.0.1:9"),
        (["sessions", "--url", "ws://127.0.0.1:9"], 1, "127.0.0.1:9"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nothing_slow_is_imported_where_no_tensor_is_needed(
    arguments: list[str], code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("websockets")
    monkeypatch.chdir(tmp_path)
    done = imported(*arguments)
    assert (done[0], told in done[2]) == (code, True), done[2]
    assert not done[1] & set(SLOW)


def test_a_folder_is_inspected_without_a_tensor(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from engines import random_checkpoint

    for arguments in (["inspect"], ["plan", "--memory", "24"]):
        code, modules, said = imported(*arguments, str(random_checkpoint("ti2v")))
        assert code == 0, said
        assert not modules & (set(SLOW) - {"pydantic", "safetensors"}), (
            "these read the robot's file and try the headers"
        )
