"""What model families share knows no family."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from worldkv.models.registry import FAMILIES

MODELS = Path(__file__).resolve().parents[2] / "worldkv" / "models"
ROOMS = {module.split(".")[2] for module in FAMILIES.values()}  # folders of families
SHARED = sorted(path for path in MODELS.rglob("*.py") if path.relative_to(MODELS).parts[0] not in ROOMS)


def imported(path: Path) -> set[str]:
    """Modules, those imported inside functions included."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.relative_to(MODELS).as_posix())
def test_what_families_share_imports_none_of_them(path: Path) -> None:
    families = tuple(f"worldkv.models.{room}" for room in ROOMS)
    assert not [name for name in imported(path) if name.startswith(families)]


@pytest.mark.parametrize(
    "path", sorted((MODELS / "checkpoints").glob("*.py")), ids=lambda path: path.relative_to(MODELS).as_posix()
)
def test_checkpoints_know_no_architecture_either(path: Path) -> None:
    allowed = ("worldkv.errors", "worldkv.models.checkpoints")
    assert not [name for name in imported(path) if name.startswith("worldkv") and not name.startswith(allowed)]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_each_family_has_files_of_the_same_names(room: str) -> None:
    names = {path.name for path in (MODELS / room).glob("*.py")}
    assert names >= {"config.py", "checkpoint.py", "model.py", "random.py"}
