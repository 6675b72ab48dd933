"""What the documents say can be done: their links lead somewhere, their commands exist, their Python runs."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(language: str) -> list[tuple[str, str]]:
    """(id, content) of every code block in that language."""
    found = []
    for path in DOCUMENTS:
        contents = [content for kind, content in _BLOCK.findall(path.read_text(encoding="utf-8")) if kind == language]
        found += [(f"{name(path)}-{number}", content) for number, content in enumerate(contents, 1)]
    return found


def commands(program: str) -> list[list[str]]:
    """Every call of `program` in a bash block, split into words; settings of variables before it are left out."""
    found = []
    for _, content in blocks("bash"):
        for line in content.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words and words[0] == program:
                found.append(words)
    return found


def python(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@functools.cache
def help_of(command: str) -> str:
    code = "import sys; from worldkv.cli.main import main; sys.exit(main())"
    done = python(["-c", code, command, "--help"], ROOT)
    assert done.returncode == 0, f"worldkv {command} --help failed:\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_to_files_that_exist(path: Path) -> None:
    links = [link for link in _LINK.findall(path.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing, f"{name(path)} links to what is not there: {missing}"


def test_the_readme_shows_every_command() -> None:
    assert {words[1] for words in commands("worldkv")} >= {"serve", "replay", "verify", "inspect"}


@pytest.mark.parametrize("words", commands("worldkv"), ids=" ".join)
def test_a_command_that_is_shown_exists_with_its_options(words: list[str]) -> None:
    shown = help_of(words[1])
    options = [word.partition("=")[0] for word in words[2:] if word.startswith("-")]
    missing = [option for option in options if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", shown)]
    assert not missing, f"`worldkv {words[1]} --help` does not know {missing}"


@pytest.mark.parametrize("words", commands("make"), ids=" ".join)
def test_a_make_target_and_variable_that_is_shown_exists(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words[1:]:
        pattern = rf"^{re.escape(word.partition('=')[0])} \?=" if "=" in word else rf"^{re.escape(word)}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile has no {word}"


@pytest.mark.parametrize(("block", "code"), [pytest.param(*block, id=block[0]) for block in blocks("python")])
def test_python_that_is_shown_runs(block: str, code: str, tmp_path: Path) -> None:
    for module in ("torch", "diffusers", "starlette"):
        if f"worldkv.{'server' if module == 'starlette' else 'policy'}" in code:
            pytest.importorskip(module)
    done = python(["-c", code], tmp_path)
    assert done.returncode == 0, f"{block}:\n{done.stderr}"


def test_the_picture_of_the_cache_can_be_drawn_from_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = python([str(ROOT / "docs" / "draw_cache.py"), str(tmp_path / "cache.svg")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<svg" in (tmp_path / "cache.svg").read_text(encoding="utf-8")
