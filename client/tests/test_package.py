"""The package as a robot's program sees it: names at the root, nothing loaded too early, errors of one family."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import worldkv_client
from worldkv_client import errors
from worldkv_client.wire import Dialect


@pytest.mark.parametrize("name", worldkv_client.__all__)
def test_a_public_name_is_found_at_the_root(name: str) -> None:
    assert getattr(worldkv_client, name).__name__ == name
    assert name in dir(worldkv_client)


def test_every_error_is_at_the_root_and_has_a_code_of_its_own() -> None:
    found = dict(inspect.getmembers(errors, inspect.isclass))
    assert found.keys() <= set(worldkv_client.__all__)
    assert all(issubclass(error, errors.WorldKVError) for error in found.values())
    codes = [error.code for error in found.values()]
    assert len(set(codes)) == len(codes)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'worldkv_client' has no attribute 'Engine'"):
        worldkv_client.Engine  # noqa: B018


def test_importing_the_package_costs_nothing() -> None:
    code = "import sys, worldkv_client as client; client.ConnectionLost; print({'numpy', 'msgpack'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_dialect_s_text_is_its_value() -> None:
    assert [str(dialect) for dialect in Dialect] == [f"{dialect}" for dialect in Dialect] == ["openpi", "roboarena"]
