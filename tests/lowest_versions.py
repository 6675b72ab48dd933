"""Prints the lowest versions that the pyproject.toml files allow, as constraints for pip: `name==version`, a line each.

    python tests/lowest_versions.py EXTRA ... > lowest.txt

What stands in no extra that is named is left out, and so is torch: the Makefile says which one it takes.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = ("pyproject.toml", "client/pyproject.toml")
OURS = ("worldkv", "worldkv-client")

_REQUIREMENT = re.compile(r"^([\w.-]+)(\[[\w,-]+\])?\s*(.*)$")
_FLOOR = re.compile(r"(?:>=|==)\s*([\w.]+)")


def lowest(extras: Iterable[str]) -> dict[str, str]:
    """By name; of two floors of one package the higher one. Raises ValueError for a requirement without a floor."""
    found: dict[str, str] = {}
    for line in _requirements(list(extras)):
        name, floor = floor_of(line)
        if name not in (*OURS, "torch") and (name not in found or _order(floor) > _order(found[name])):
            found[name] = floor
    return dict(sorted(found.items()))


def floor_of(requirement: str) -> tuple[str, str]:
    """(name, the lowest version that is allowed). Raises ValueError where there is none."""
    matched = _REQUIREMENT.match(requirement)
    assert matched is not None, requirement
    name, _, versions = matched.groups()
    if name in OURS:
        return name, ""
    floor = _FLOOR.search(versions)
    if floor is None:
        raise ValueError(f"{requirement}: expected a lowest version (>= or ==): nobody knows what it needs")
    return name, floor[1]


def _requirements(extras: list[str]) -> Iterator[str]:
    for path in PROJECTS:
        project: dict[str, Any] = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]
        yield from project["dependencies"]
        for extra, requirements in project["optional-dependencies"].items():
            if extra in extras:
                yield from requirements


def _order(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


if __name__ == "__main__":
    for name, version in lowest(sys.argv[1:]).items():
        print(f"{name}=={version}")
