"""The rules that the package keeps about itself, read off its source: who imports whom, and what never occurs."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from worldkv.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "worldkv"

# A part may import itself and what stands left of it.
LAYERS = (
    "words",
    "errors",
    "wire",
    "device",
    "kv",
    "attention",
    "models",
    "engine",
    "ranks",
    "app",
    "robots",
    "videos",
    "load",
    "server",
    "bench",
    "show",
    "demo",
    "cli",
    "__main__",
)
ALLOWED = {part: set(LAYERS[: index + 1]) for index, part in enumerate(LAYERS)}
ALLOWED["client"] = {"client"}  # both are names of worldkv_client, which any part may import
ALLOWED["broker"] = {"broker"}
ALLOWED["cli"] |= {"client"}
ALLOWED["bench"] |= {"client"}
ALLOWED["show"] -= {"bench"}  # measuring is nobody's business but the command line's
ALLOWED["demo"] -= {"bench"}

MAX_LINES = 400
MAX_FUNCTION_LINES = 60
# How often annotations of a part may say Any; others may not at all. Only ever lower these.
MAX_ANY = {
    "app.py": 3,  # of apps of any inputs and results
    "attention": 7,
    "bench": 13,
    "cli": 40,
    "demo": 1,
    "device.py": 1,
    "kv": 7,
    "load.py": 6,  # a folder tells its family, and with it the types, only when it is opened
    "models": 85,
    "robots": 65,
    "server": 28,
    "show": 21,
    "videos": 8,
}
# (file, what it reaches for): what argparse and torch have no public name for. Only ever shorten this.
KNOWN_REACHES = {
    ("cli/common.py", "argparse._ActionsContainer"),
    ("cli/signals.py", "os._exit"),  # its public name
    ("models/checkpoints/modules.py", "owner._buffers"),
    ("models/checkpoints/modules.py", "owner._parameters"),
    ("models/wan/random.py", "owner._parameters"),
    ("models/wan/encoders.py", "module.get_submodule(path)._buffers"),
    ("models/wan/fused.py", "torch._addmm_activation"),
    ("models/wan/fused.py", "torch._scaled_mm"),
}
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Ids, counts and bytes: these work where torch is not installed. See also test_torch_free.py.
TORCH_FREE = [
    path
    for path in SOURCES
    if path.parent.name in ("kv", "engine")
    or path.relative_to(PACKAGE).as_posix() in ("errors.py", "wire.py", "client.py", "broker.py")  # thin: see client/
    if path.relative_to(PACKAGE).as_posix()
    not in ("kv/storage.py", "kv/host.py", "engine/pacing.py")  # pacing: only on a GPU
]


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
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


def test_a_module_imports_only_its_own_part_and_those_below() -> None:
    found = []
    for path in SOURCES:
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":  # lends the names of all parts: see the next test but one
            continue
        assert part in ALLOWED, f"{part} is new: give it a place in LAYERS"
        found += [
            f"{_name(path)}:{line}: {module}; {part} may import {sorted(ALLOWED[part])}"
            for module, line in _imported(_parse(path))
            if module.startswith("worldkv.") and module.split(".")[1] not in ALLOWED[part]
        ]
    _fail_if(found, "imports of parts that stand further right")


def test_general_parts_know_no_family_of_models() -> None:
    families = (*(module.rsplit(".", 1)[0] for module in FAMILIES.values()), "worldkv.models.wan")
    general = ("kv", "attention", "engine", "app.py", "server", "wire.py", "client.py", "broker.py", "device.py")
    found = [
        f"{_name(path)}:{line}: {module}"
        for path in SOURCES
        if path.relative_to(PACKAGE).parts[0] in general
        for module, line in _imported(_parse(path))
        if module.startswith(families)
    ]
    _fail_if(found, "imports of one family; general parts know WorldModel only")


def test_a_part_without_tensors_does_not_import_torch() -> None:
    found = [
        f"{_name(path)}:{line}"
        for path in TORCH_FREE
        for module, line in _imported(_without_type_checking(_parse(path)))
        if module.split(".")[0] == "torch"
    ]
    _fail_if(found, "imports of torch; tensors belong to kv/storage, attention and models")


def test_a_package_imports_nothing_when_it_is_imported() -> None:
    found = [
        f"{_name(path)}:{line}: {module}"
        for path in SOURCES
        if path.name == "__init__.py"
        for node in _without_type_checking(_parse(path)).body
        for module, line in _imported(node)
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) and module not in ("__future__", "typing")
    ]
    _fail_if(found, "imports in an __init__: `import worldkv` must cost nothing")


def test_nothing_that_is_read_can_run_code() -> None:
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    found = []
    for path in SOURCES:
        tree = _parse(path)
        found += [f"{_name(path)}:{line}: {m}" for m, line in _imported(tree) if m.split(".")[0] in unsafe]
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        found += [f"{_name(path)}:{call.lineno}: {ast.unparse(call.func)}" for call in calls if _runs_code(call)]
    _fail_if(found, "what is read could run code")


def _runs_code(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    unpickles = (name == "torch.load" and keywords.get("weights_only") != "True") or (
        name in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False"
    )
    return unpickles or name in ("eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "yaml.full_load")


def test_a_file_can_be_read_in_one_sitting() -> None:
    lengths = {_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    found = [f"{name}: {length} lines" for name, length in lengths.items() if length > MAX_LINES]
    _fail_if(found, f"files of more than {MAX_LINES} lines; split them by what their parts know")


def test_a_function_fits_a_screen() -> None:
    found = [
        f"{_name(path)}:{node.lineno}: {node.name} has {length} lines"
        for path in SOURCES
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := _length(node)) > MAX_FUNCTION_LINES
    ]
    _fail_if(found, f"functions of more than {MAX_FUNCTION_LINES} lines")


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines, the docstring left out: it may say as much as there is to say."""
    assert function.end_lineno is not None
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    assert first.end_lineno is not None
    docstring = first.end_lineno - first.lineno + 1 if is_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


def test_a_module_says_what_it_is() -> None:
    _fail_if([_name(path) for path in SOURCES if not ast.get_docstring(_parse(path))], "modules without a docstring")


def test_no_module_reaches_into_another_s_privates() -> None:
    found = {reach for path in SOURCES for reach in _reaches(_name(path), _parse(path))}
    print("known exceptions: " + ", ".join(f"{name}: {what}" for name, what in sorted(KNOWN_REACHES)))
    _fail_if(sorted(f"{name}: {what}" for name, what in found - KNOWN_REACHES), "privates of others are used")
    unused = sorted(f"{name}: {what}" for name, what in KNOWN_REACHES - found)
    _fail_if(unused, "exceptions that are needed no more: take them out of KNOWN_REACHES")


def _reaches(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(file, what) of every private name that is imported, and of every private attribute that is read or set on
    something else than self, cls, super() or an object of the class that the code stands in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((name, f"{node.module}.{alias.name}") for alias in node.names if _is_private(alias.name))
    yield from ((name, what) for what in _attributes(tree, frozenset()))


def _attributes(node: ast.AST, own: frozenset[str]) -> Iterator[str]:
    """Private attributes of others. `own`: the names that the class around has for itself."""
    if isinstance(node, ast.ClassDef):
        own = _own_privates(node)
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        base = ast.unparse(node.value)
        if base not in ("self", "cls", "super()") and node.attr not in own:
            yield ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from _attributes(child, own)


def _own_privates(owner: ast.ClassDef) -> frozenset[str]:
    """Private names that a class defines, or sets on itself."""
    names = {node.name for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    names |= {node.id for node in ast.walk(owner) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return frozenset(names)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_any_stays_within_its_budget() -> None:
    counts: Counter[str] = Counter()
    for path in SOURCES:
        counts[path.relative_to(PACKAGE).parts[0]] += _num_any(_parse(path))
    found = [
        f"{part}: {count}, at most {MAX_ANY.get(part, 0)} are allowed"
        for part, count in sorted(counts.items())
        if count > MAX_ANY.get(part, 0)
    ]
    _fail_if(found, "annotations say Any too often; name the type, or make the function generic")


def _num_any(tree: ast.Module) -> int:
    """How often annotations name Any."""
    annotations: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            annotations.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotations.append(node.returns)
    inner = (node for annotation in annotations if annotation is not None for node in ast.walk(annotation))
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in inner)


def _fail_if(found: Sequence[str], what: str) -> None:
    assert not found, f"{what}:\n" + "\n".join(found)


def _texts() -> Iterator[tuple[str, str]]:
    """Every text file that belongs to the project: (name, content)."""
    folders = ["worldkv", "client/worldkv_client", "client/tests", "tests", "docs", ".ci"]
    suffixes = {".py", ".md", ".svg", ".toml", ".yaml", ".json", ""}
    files = [path for path in ROOT.iterdir() if path.name in ("Makefile", "LICENSE", ".gitignore")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("client/*.md"), *ROOT.glob("client/*.toml")]
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
