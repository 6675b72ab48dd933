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

TINY = ["--model", "tiny-video", "--device", "cpu", "--block-size", "16"]


def test_blocks_of_one_and_of_several_sessions_are_measured_beside_the_plain_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *TINY, "--sessions", "1", "2", "--output", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results == json.loads((tmp_path / "bench.json").read_text())
    ticks, first, plain = (results[name] for name in ("ticks", "first", "baseline"))
    assert ticks["frames_per_block"] == 12
    assert 0 < ticks["dit_ms"] < ticks["block_ms"]
    assert set(first) == {"begin_ms", "recache_ms", "keep_ms"}
    assert plain["dit_ratio"] == pytest.approx(plain["dit_ms"] / ticks["dit_ms"], abs=0.01)
    assert [row["sessions"] for row in results["sessions"]] == [1, 2]
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_viewers_ask_at_their_own_pace_and_who_waits_longer_than_a_block_plays_is_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paced = ["--parts", "paced", "--robots", "1", "2", "--seconds", "2"]
    assert main(["bench", *TINY, *paced, "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    results = json.loads(out.splitlines()[-1])["paced"]
    assert results["period_s"] == 0.75, "12 pictures, 16 a second"
    assert [row["robots"] for row in results["rows"]] == [1, 2]
    assert all(row["replies"] >= 2 * row["robots"] and row["failed"] == 0 for row in results["rows"])
    assert "2 viewers, one reply each 0.75 s" in out
    assert main(["bench", *TINY, *paced, "--period", "1e-3", "--seconds", "0.02", "--output", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["paced"]["rows"][0]["share_late"] > 0.9


def test_the_tiny_decoder_is_measured_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TINY, "--tiny-decoder", "random", "--parts", "ticks", "--output", str(tmp_path)]
    assert main(["bench", *options]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "tiny (TAEHV)" in results["decoder"]
    assert results["ticks"]["decode_ms"] > 0


def test_what_is_not_measured_of_video_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (
            ["--model", "tiny-video", "--parts", "parking"],
            "--parts: of causal video ticks, sessions, baseline, paced, export",
        ),
        (["--model", "tiny-video", "--tiny-decoder", "x.pth"], "--tiny-decoder: expected random"),
        (["--model", "tiny-video", "--find"], "--find: is for viewers at their own pace; give --parts paced"),
        (["--model", "tiny-video", "--observe", "0.1", "--parts", "paced"], "--observe: is for robots"),
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
