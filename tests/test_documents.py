"""What the documents say can be done: their links lead somewhere, their commands exist, their Python runs."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from test_layering import LAYERS

from worldkv.cli.parser import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "client/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
# Programs whose options the text names, and the options of the reference's server.
NOT_OURS = {
    *("pip", "hf", "docker", "mypy", "torchrun", "openssl", "apt-get", "python", "make"),
    *("--enable-dit-cache", "--max-chunk-size", "--model-path"),
}

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
    """Every call of `program` in a bash block of any document."""
    return [words for path in DOCUMENTS for words in calls_in(path.read_text(encoding="utf-8"), program)]


def calls_in(text: str, program: str) -> list[list[str]]:
    """Split into words; settings of variables before it and where the output goes are left out."""
    found = []
    for language, content in _BLOCK.findall(text):
        if language != "bash":
            continue
        for line in content.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words and words[0] == program:
                found.append(words[: words.index(">")] if ">" in words else words)
    return found


@functools.cache
def options_by_command() -> dict[str, set[str]]:
    """The options of each command, by its help."""
    parser = build_parser(learned=True)
    (commands_of,) = (action for action in parser._actions if isinstance(action.choices, dict))
    return {command: set(of._option_string_actions) for command, of in dict(commands_of.choices or {}).items()}


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


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name not in ("CHANGELOG.md", "log.md")], ids=name)
def test_a_name_that_links_to_code_is_defined_there(path: Path) -> None:
    """[`Class.method`](file.py), [`function`](file.py), [`module`](file.py): whoever follows a tick finds each hop."""
    missing = []
    for shown, link in re.findall(r"\[`([\w.]+)`\]\(([^)#\s]+\.py)\)", path.read_text(encoding="utf-8")):
        target = (path.parent / link).resolve()
        modules = {target.stem, target.name, ".".join(target.with_suffix("").parts[-2:])}
        known = {*modules, ".".join(target.parts[-3:-1]), target.parts[-2], target.relative_to(ROOT).as_posix()}
        if shown not in known | names_in(target) and f"{shown}.py" != target.name:
            missing.append(f"{shown} in {link}")
    assert not missing, f"{name(path)}: {missing}"


def names_in(module: Path) -> set[str]:
    """Functions, classes, and the methods and fields of those."""
    found = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(f"{node.name}.{member.name}")
            elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                found.add(f"{node.name}.{member.target.id}")
    return found


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


# How each word of docs/words.md occurs in sentences; of a frame there are two kinds, so the page says which.
WORDS = {
    "tick": "ticks?",
    "chunk": "chunks?",
    "session": "sessions?",
    "embodiment": "embodiments?",
    "dialect": "dialects?",
    "denoising": "denois(?:e|es|ed|ing)",
    "conditioning": "conditioning",
    "branch": "branch(?:es)?",
    "slot": "slots?",
    "block": "blocks?",
    "pool": "pools?",
    "window": "windows?",
    "sink": "sinks?",
    "draft": "drafts?",
    "commit": "commit(?:s|ted|ting)?",
    "snapshot": "snapshots?",
    "fork": "fork(?:s|ed)?",
    "park": "park(?:s|ed|ing)?",
    "row": "rows?",
    "forward": "forwards?",
    "charge": "charge[sd]?",
    "stage": "stages?",
}
# Where such a word means something else: git's branches, a table's rows, to let something wait.
OTHER_SENSES = (
    r"a branch, a tag or a commit",
    r"public forks",
    r"Say in the commit",
    r"something blocks its",
    r"a row a tick, a video a camera",
    r"branches one history",
    r"branch one history",
)
# The words themselves, what was written once for all, what is made of docstrings, and pages that begin with the words.
WITHOUT_WORDS = {"words.md", "log.md", "CHANGELOG.md", "reference.md", "benchmarks.md", "client/README.md"}


def test_the_page_of_words_has_all_that_are_looked_for() -> None:
    missing = set(WORDS) - anchors(ROOT / "docs" / "words.md")
    assert not missing, f"docs/words.md does not explain {sorted(missing)}"


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if not WITHOUT_WORDS & {path.name, name(path)}], ids=name)
def test_a_word_of_ours_is_explained_where_a_page_uses_it_first(path: Path) -> None:
    """By a link to the page of words, or there and then, which sets it in bold."""
    text, unexplained = path.read_text(encoding="utf-8"), []
    sentences = prose(text)
    for word, pattern in WORDS.items():
        found = re.search(rf"(?<![\w-])(?:{pattern})(?![\w-])", sentences, re.IGNORECASE)
        if found is None:
            continue
        before, after = text[: found.start()], text[found.end() :]
        links = re.search(r"\[[^\]\[]*$", before) and re.match(r"[^\]\[]*\]\([^)]*(?:words\.md#|\.md\))", after)
        in_bold = before.rpartition("\n\n")[2].count("**") % 2 == 1
        if not links and not in_bold:
            line = before.count("\n") + 1
            unexplained.append(f"line {line}: {found[0]}, see words.md#{word}")
    assert not unexplained, f"{name(path)}: " + "; ".join(unexplained)


def prose(text: str) -> str:
    """Of the same length: code, headings, pictures, where links lead to and words in other senses are blanks."""
    for pattern in (
        r"^```.*?^```$",
        r"`[^`]*`",
        r"^#.*?$",
        r"!\[[^\]]*\]\([^)]*\)",
        r"\]\([^)]*\)",
        r"^    .*?$",
        *OTHER_SENSES,
    ):
        text = re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.MULTILINE | re.DOTALL)
    return text


def test_the_order_of_imports_that_is_shown_is_the_one_that_is_kept() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Who may import whom")[2]
    shown = re.search(r"^    (words, .*?)\n +\(", text, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert re.findall(r"\w+", shown[1]) == [part for part in LAYERS if part != "__main__"]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.parent.name == "docs"], ids=name)
def test_every_document_stands_in_the_sites_navigation(path: Path) -> None:
    assert re.search(rf": {re.escape(path.name)}$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_readme_shows_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = {words[1] for words in calls_in(text, "worldkv")} | {"demo"}  # which `make demo` runs
    assert shown >= set(COMMANDS)


@pytest.mark.parametrize("words", commands("worldkv"), ids=" ".join)
def test_a_command_that_is_shown_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WORLDKV_")]:
        monkeypatch.delenv(name)
    build_parser().parse_args(words[1:])


# An option in the text: of the command that is named before it in the same `...`, or of any.
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name not in ("CHANGELOG.md", "log.md")], ids=name)
def test_an_option_that_the_text_names_exists(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    known = options_by_command()
    missing = []
    for code in re.findall(r"`([^`]+)`", text):
        words = code.split()
        if words[0] in NOT_OURS or "/" in words[0]:
            continue
        command = next((word for word in words[1:2] if words[0] == "worldkv" and word in COMMANDS), None)
        known_here = known[command] if command else set().union(*known.values())
        missing += [
            f"{option} in `{code}`"
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
            if option not in known_here and option not in NOT_OURS
        ]
        if words[0] == "worldkv" and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]) and command is None:
            missing.append(f"the command `{code}`")
    assert not missing, f"{name(path)} names what worldkv has not: {missing}"


@pytest.mark.parametrize("words", commands("make"), ids=" ".join)
def test_a_make_target_and_variable_that_is_shown_exists(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words[1:]:
        pattern = rf"^{re.escape(word.partition('=')[0])} \?=" if "=" in word else rf"^{re.escape(word)}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile has no {word}"


@pytest.mark.parametrize("words", commands("python"), ids=" ".join)
def test_a_script_or_module_that_is_shown_exists(words: list[str]) -> None:
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
    else:
        assert (ROOT / words[1]).is_file()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_an_extra_that_is_named_exists(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"(?:worldkv|\./?)\[([\w,-]+)\]", path.read_text(encoding="utf-8"))
    wanted = {extra for extras in named for extra in extras.split(",")}
    assert wanted <= set(project["optional-dependencies"])


def test_what_is_installed_first_comes_from_a_checkout() -> None:
    """worldkv is on no package index: only who has it can ask for its extras."""
    for path in DOCUMENTS:
        installs = calls_in(path.read_text(encoding="utf-8"), "pip")
        by_name = [words for words in installs if any(re.match(r"worldkv(-client)?(\[|$)", word) for word in words)]
        first = [words for words in installs if any(word.startswith(("./", ".[", "dist/")) for word in words)]
        assert not by_name or (first and installs.index(first[0]) < installs.index(by_name[0])), name(path)


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
