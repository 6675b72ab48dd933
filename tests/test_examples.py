"""The examples run and say what they promise."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_planning_by_imagination_shares_history_and_goes_on_with_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("plan_by_imagination", EXAMPLES / "plan_by_imagination.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--futures", "8", "--depth", "2"])
    said = capsys.readouterr().out
    before, forked, dreamt, after = (int(count) for count in re.findall(r"(\d+) blocks in use", said))
    assert forked == before, "a fork copied a block"
    assert dreamt > forked
    assert after < dreamt, "closed futures kept their blocks"
    assert said.count("<- chosen") == 1
    assert "goes on at frame 9: 6 actions of 8 numbers" in said
    assert "for 1 session\n" in said
    assert "nearer to 0 is smoother" in said
