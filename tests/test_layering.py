"""The rules that the package keeps about itself, read off its source: who imports whom, and what never occurs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "worldkv"

# A part may import itself and what stands left of it.
LAYERS = (
    "errors",
    "wire",
    "device",
    "kv",
    "attention",
    "models",
    "engine",
    "robots",
    "load",
    "bench",
    "server",
    "show",
    "demo",
    "cli",
)
ALLOWED = {part: set(LAYERS[: index + 1]) for index, part in enumerate(LAYERS)}
ALLOWED["client"] = {"client", "wire", "errors"}
ALLOWED["broker"] = {"broker", "errors"}
ALLOWED["cli"] |= {"client"}
ALLOWED["show"] -= {"bench"}
ALLOWED["server"] -= {"bench"}  # measuring is nobody's business but the command line's

MAX_LINES = 400
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Ids, counts and bytes: these work where torch is not installed. See also test_torch_free.py.
TORCH_FREE = [
    path
    for path in SOURCES
    if path.parent.name in ("kv", "engine")
    or path.relative_to(PACKAGE).as_posix() in ("errors.py", "wire.py", "client.py", "broker.py")
    if path.relative_to(PACKAGE).as_posix() != "kv/storage.py"
]


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, those inside functions and TYPE_CHECKING included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports in this package are absolute"
            assert node.module is not None
            yield node.module, node.lineno
            if node.module == "worldkv":
                names = [alias.name for alias in node.names if not alias.name.startswith("__")]
                yield from ((f"worldkv.{name}", node.lineno) for name in names)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _without_type_checking(tree: ast.Module) -> ast.Module:
    """The module as it runs."""
    return ast.Module([node for node in tree.body if not _is_type_checking(node)], [])


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_a_module_imports_only_its_own_part_and_those_below(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        assert not list(_imported(_parse(path))), "`import worldkv` must cost nothing: keep its __init__ empty"
        return
    assert part in ALLOWED, f"{part} is new: give it a place in LAYERS"
    wrong = [
        f"line {line}: {module}"
        for module, line in _imported(_parse(path))
        if module.startswith("worldkv.") and module.split(".")[1] not in ALLOWED[part]
    ]
    assert not wrong, f"{part} may import {sorted(ALLOWED[part])}, but {_name(path)} imports " + ", ".join(wrong)


@pytest.mark.parametrize("path", TORCH_FREE, ids=_name)
def test_a_part_without_tensors_does_not_import_torch(path: Path) -> None:
    tree = _without_type_checking(_parse(path))
    lines = [line for module, line in _imported(tree) if module.split(".")[0] == "torch"]
    assert not lines, f"imports torch in lines {lines}; tensors belong to kv/storage, attention and models"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=_name)
def test_a_package_imports_nothing_when_it_is_imported(path: Path) -> None:
    assert not [module for node in _parse(path).body for module, _ in _imported(node) if not _in_function(node)]


def _in_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_nothing_that_is_read_can_run_code(path: Path) -> None:
    tree = _parse(path)
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    found = [f"line {line}: {module}" for module, line in _imported(tree) if module.split(".")[0] in unsafe]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        unpickles = (name == "torch.load" and keywords.get("weights_only") != "True") or (
            name in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False"
        )
        if unpickles or name in ("eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            found.append(f"line {call.lineno}: {name}")
    assert not found, f"{_name(path)} could run what it reads: " + ", ".join(found)


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, f"{_name(path)} has {num_lines} lines; split it by what its parts know"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(_parse(path)), f"{_name(path)} has no docstring"


def _texts() -> Iterator[tuple[str, str]]:
    """Every text file that belongs to the project: (name, content)."""
    folders = ["worldkv", "tests", "docs", ".ci"]
    suffixes = {".py", ".md", ".svg", ".toml", ".yaml", ".json", ""}
    files = [path for path in ROOT.iterdir() if path.name in ("Makefile", "LICENSE", ".gitignore")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    for path in sorted(files):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_nothing_names_the_place_where_it_was_written() -> None:
    slash = "/"  # the words are put together here, or this file would be the first to be found
    words = [f"{slash}{folder}{slash}" for folder in ("work", "tmp", "root", "home")]
    words += ["pypi" + ".org", "python" + "hosted", "pytorch" + ".org/whl", "hugging" + "face.co", "open" + "ai"]
    found = [
        f"{name}:{number}: {word}"
        for name, text in _texts()
        for number, line in enumerate(text.splitlines(), 1)
        for word in words
        if word in line.lower()
    ]
    assert not found, "a path of one machine or the address of a registry:\n" + "\n".join(found)


def test_nothing_is_left_to_be_done_later() -> None:
    marks = ["TO" + "DO", "FIX" + "ME", "X" * 3]
    found = [f"{name}: {mark}" for name, text in _texts() for mark in marks if mark in text]
    assert not found, found
