"""What the documents say can be done: their links lead somewhere, their commands exist, their Python runs."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "client/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


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
    missing = []
    for link, anchor in _LINK.findall(path.read_text(encoding="utf-8")):
        target = path.parent / link if link else path
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}" if anchor else link)
    assert not missing, f"{name(path)} links to what is not there: {missing}"


def anchors(document: Path) -> set[str]:
    """As GitHub and mkdocs name a document's headings."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


class _Page(HTMLParser):
    """A page's links and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for attribute, value in attrs:
            if attribute in ("href", "src") and value:
                self.links.append(value)
            if attribute in ("id", "name") and value:
                self.names.add(value)


def test_no_link_of_the_built_site_is_dead(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    done = python(["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")], ROOT)
    assert done.returncode == 0, done.stderr
    pages = {page: _Page(page.read_text(encoding="utf-8")) for page in (tmp_path / "site").rglob("*.html")}
    assert len(pages) > len(list((ROOT / "docs").glob("*.md"))), "the pages that show sources are missing"
    dead = []
    for page, content in pages.items():
        if page.name == "404.html":  # its links start at the address of the site
            continue
        for link in content.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and known is not None and anchor not in known.names):
                dead.append(f"{page.relative_to(tmp_path / 'site')}: {link}")
    assert not dead, "\n".join(dead[:20])


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.parent.name == "docs"], ids=name)
def test_every_document_stands_in_the_sites_navigation(path: Path) -> None:
    assert re.search(rf": {re.escape(path.name)}$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)


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
    compile(code, block, "exec")
    if '"gpu-box"' in code:  # a machine that is not here
        return
    done = python(["-c", code], tmp_path)
    assert done.returncode == 0, f"{block}:\n{done.stderr}"


def test_the_picture_of_the_cache_can_be_drawn_from_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = python([str(ROOT / "docs" / "draw_cache.py"), str(tmp_path / "cache.svg")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<svg" in (tmp_path / "cache.svg").read_text(encoding="utf-8")
