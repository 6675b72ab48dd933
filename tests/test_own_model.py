"""A model of one's own: the example does what its page says, and the type checker rejects what breaks the contract."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from worldkv import EngineConfig, start_engine  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "own_model.py"


def own_model() -> type:
    spec = importlib.util.spec_from_file_location("own_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_model"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module.OwnModel


def test_the_example_is_short_and_runs() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "after its own prediction" in done.stdout
    assert "3 sessions are open" in done.stdout


def test_a_fork_of_it_goes_its_own_way_and_a_session_repeats_bit_for_bit() -> None:
    engine = start_engine(own_model()(), EngineConfig(block_size=4, batch_invariant=True), "cpu", torch.float32)
    first, again = engine.open_session(), engine.open_session()
    frames = [torch.full((4, 32), float(number)) for number in range(12)]  # past its window of eight
    for frame in frames:
        one, two = (engine.submit(session, frame).result().result for session in (first, again))
        assert torch.equal(one, two)
    fork = engine.fork(first)
    dreamed = engine.submit(first, None).result().result
    other = engine.submit(fork, frames[0]).result().result
    assert not torch.equal(dreamed, other)
    assert torch.equal(dreamed, engine.submit(again, None).result().result)
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0


BROKEN = {
    "a program that returns a tensor": ("return Outcome(frame, frame)", "return frame"),
    "rows of another kind": ("rows: Sequence[Row[Frame]]", "rows: Sequence[int]"),
    "no way to begin": ("def new_state(", "def state_of_a_session("),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_type_checker_rejects_a_model_that_breaks_the_contract(fault: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed here; `make check` installs it: then run this again")
    right, wrong = BROKEN[fault]
    source = EXAMPLE.read_text()
    assert right in source
    broken = tmp_path / "broken.py"
    broken.write_text(source.replace(right, wrong))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(broken)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "broken.py" in done.stdout, done.stdout
