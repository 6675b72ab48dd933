"""Shared fixtures: where the golden checkpoints and the recorded robot episode lie, if they are there at all. No proxy
of this machine's surroundings comes between the tests and their servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[variable]

SHARED = Path(__file__).resolve().parents[2] / "shared"


def _shared_folder(*parts: str) -> Path:
    folder = SHARED.joinpath(*parts)
    if not folder.is_dir():
        pytest.skip(f"{'/'.join(parts)} is not beside this checkout (expected at ../shared/{'/'.join(parts)})")
    return folder


@pytest.fixture(params=["tiny_i2v", "tiny_ti2v"], scope="session")
def golden_folder(request: pytest.FixtureRequest) -> Path:
    """Each golden checkpoint folder in turn."""
    return _shared_folder("golden", request.param)


@pytest.fixture(scope="session")
def golden_i2v() -> Path:
    return _shared_folder("golden", "tiny_i2v")


@pytest.fixture(scope="session")
def golden_ti2v() -> Path:
    return _shared_folder("golden", "tiny_ti2v")


@pytest.fixture(scope="session")
def droid_clip() -> Path:
    return _shared_folder("droid_clip")
