"""`worldkv bench` of causal video, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from worldkv.bench.videos import flops_of_block
from worldkv.cli.main import main


def test_blocks_of_one_and_of_several_sessions_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "tiny-video", "--device", "cpu", "--block-size", "16", "--sessions", "1", "2"]
    assert main(["bench", *options, "--output", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results == json.loads((tmp_path / "bench.json").read_text())
    assert results["ticks"]["frames_per_block"] == 12
    assert 0 < results["ticks"]["dit_ms"] < results["ticks"]["block_ms"]
    assert [row["sessions"] for row in results["sessions"]] == [1, 2]


def test_what_is_not_measured_of_video_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--model", "tiny-video", "--parts", "baseline"], "--parts: of causal video ticks and sessions"),
        (["--model", "tiny-video", "--preset", "longlive"], "--preset"),
        (
            ["--model", "tiny-video", "--device", "cpu", "--precision", "fp8"],
            "--precision: expected 'model'",
        ),
        (["--model", "tiny", "--window-frames", "12"], "--window-frames: tiny is a model of robots"),
    ):
        assert main(["bench", *options, "--output", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err


def test_a_block_at_the_true_size_costs_what_others_have_computed() -> None:
    from types import SimpleNamespace
    from typing import Any, cast

    from worldkv.bench.released import VIDEO_MODELS

    for name, tflop in (("longlive-1.3b", 141), ("self-forcing-1.3b", 202)):
        model = cast("Any", SimpleNamespace(config=VIDEO_MODELS[name]()))
        assert flops_of_block(model) / 1e12 == pytest.approx(tflop, rel=0.03)
