"""What must run where torch is not installed, really run in an interpreter that cannot import it.

`make test-core` goes further: it runs the cache core's tests in an environment that has no torch at all.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FORBID = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "diffusers", "transformers", "safetensors"):
            raise ImportError(f"{name} was imported, in an interpreter that has to do without")
sys.meta_path.insert(0, Forbid())
"""

MODULES = ["worldkv", "worldkv.errors", "worldkv.wire", "worldkv.client", "worldkv.broker", "worldkv.server.config"]
MODULES += [
    f"worldkv.{part}.{path.stem}"
    for part in ("kv", "engine")
    for path in sorted((ROOT / "worldkv" / part).glob("*.py"))
    if path.stem != "__init__" and (part, path.stem) not in (("kv", "storage"), ("kv", "host"))
]


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FORBID + code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_hook_does_forbid_torch() -> None:
    assert "has to do without" in run_without_torch("import torch").stderr


@pytest.mark.parametrize("module", MODULES)
def test_it_is_imported_without_torch(module: str) -> None:
    done = run_without_torch(f"import {module}")
    assert done.returncode == 0, done.stderr


def test_importing_worldkv_costs_nothing() -> None:
    done = run_without_torch("import worldkv; print([m for m in sys.modules if m in ('numpy', 'msgpack', 'asyncio')])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("command", [[], ["serve"], ["demo"], ["replay"], ["verify"], ["inspect"]], ids=" ".join)
def test_help_appears_at_once_since_it_does_without_torch(command: list[str]) -> None:
    arguments = ["worldkv", *command, "--help"]
    done = run_without_torch(f"sys.argv = {arguments}\nfrom worldkv.cli.main import main\nsys.exit(main())")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


HISTORY = """
from worldkv.kv.block_pool import BlockPool
from worldkv.kv.block_table import BlockTable
from worldkv.kv.window import Window

pool, window = BlockPool(16), Window(chunk_size=24, window=3, sink=1)
table = BlockTable(pool, block_size=16)
for chunk in range(6):
    place = window.place(chunk, 1, num_draft_tokens=5)
    staged = table.stage(place.writes, window.num_slots(chunk), place.num_visible)
    table.commit(staged, window.num_slots(chunk + 1))
pool.check()
print(window.visible_chunks(6), len(table.blocks), pool.num_free)
"""


def test_a_window_slides_without_torch() -> None:
    done = run_without_torch(HISTORY)
    assert done.stdout.split("\n")[0] == "[0, 3, 4, 5] 6 10", done.stdout + done.stderr


def test_the_client_does_not_need_the_server_s_libraries() -> None:
    if importlib.util.find_spec("websockets") is None:
        pytest.skip("websockets is not installed")
    code = "import worldkv.client; print([m for m in sys.modules if m in ('starlette', 'uvicorn', 'yaml', 'rich')])"
    done = run_without_torch(code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
