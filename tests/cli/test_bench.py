"""`worldkv bench` on the tiny model: it runs everywhere, says what it measured, and leaves a file and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("matplotlib")

from worldkv.bench.ticks import flops_of_window
from worldkv.cli.main import main
from worldkv.models.dreamzero.config import dreamzero_5b, dreamzero_14b
from worldkv.models.dreamzero.inputs import tiled_size
from worldkv.models.dreamzero.true_size import random_model


def test_it_measures_each_part_and_leaves_results_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--device", "cpu", "--sessions", "1", "2", "--block-size", "16", "--output", str(tmp_path)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(lines[-1])
    assert json.loads((tmp_path / "bench.json").read_text()) == results
    assert results["weights"] == "random"
    assert {row["backend"] for row in results["attention"]} == {"dense", "reference", "cudnn", "flash4"}
    assert all(("ms" in row) != ("skipped" in row) for row in results["attention"])
    assert len(results["ticks"]["dit_ms_by_history"]) == 4
    assert 0 < results["begun"]["begun_reply_ms"] < results["begun"]["reply_ms"]
    assert [row["sessions"] for row in results["sessions"]] == [1, 2]
    assert results["baseline"]["ratio"] > 0
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert (tmp_path / "bench.svg").exists()


def test_float8_without_a_gpu_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--precision", "fp8"]) == 2
    told = capsys.readouterr()
    assert "--precision: expected 'model' without a GPU, got 'fp8'" in told.err
    assert "ceilings" not in told.out


def test_parking_is_measured_beside_another_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--device", "cpu", "--parts", "parking", "--block-size", "16", "--output", str(tmp_path)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    measured = json.loads(out.splitlines()[-1])["parking"]
    assert measured["moves"] >= 2
    assert measured["parked_gib"] >= 0
    assert len(measured["alone_ms"]) == len(measured["beside_ms"]) == 4
    assert "ticks of another session, by fill, ms: alone" in out


def test_the_work_of_a_window_is_counted_by_hand() -> None:
    config = dreamzero_5b()
    dit, rows = config.dit, 0.0
    for frames in (1, 3, 5, 7):
        committed = 50 if frames == 1 else 100
        for queries, keys, calls in ((committed, 50 * frames, 1), (125, 50 * (frames + 2) + 25, 8)):
            products = queries * (6 * dit.dim * dit.dim + 2 * dit.dim * dit.ffn_dim)
            attention = 2 * queries * (keys + 512 + 257) * dit.dim
            rows += calls * dit.num_layers * 2 * (products + attention)
    assert flops_of_window(config, [8, 8, 8, 8]) == pytest.approx(2 * rows)


def test_the_work_of_fewer_steps_is_counted_as_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = []
    for options in ([], ["--steps", "5"]):
        command = ["bench", "--device", "cpu", "--parts", "ticks", "--block-size", "16", "--output", str(tmp_path)]
        assert main([*command, *options]) == 0
        ticks = json.loads(capsys.readouterr().out.splitlines()[-1])["ticks"]
        done.append(ticks["achieved_tflops"] * sum(ticks["dit_ms_by_history"]) * 1e9)
    config = dreamzero_5b()
    expected = flops_of_window(config, [5] * 4) / flops_of_window(config, [8] * 4)
    assert 0.6 < expected < 0.75
    assert done[1] / done[0] == pytest.approx(expected, rel=0.1)  # of another size of model


def test_what_is_compared_in_the_model_s_own_precision_is_left_out_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "--device", "cpu", "--sessions", "1", "--block-size", "16", "--output", str(tmp_path)]
    assert main([*command, "--steps", "5"]) == 0
    out = capsys.readouterr().out
    assert "baseline and fp8 are left out" in out
    assert "baseline" not in json.loads(out.splitlines()[-1])


def test_true_sizes_have_the_true_number_of_tensors_and_pixels() -> None:
    assert tiled_size(dreamzero_14b()) == (352, 640)
    assert tiled_size(dreamzero_5b()) == (320, 640)
    import torch

    model = random_model(dreamzero_14b(), device="meta", dtype=torch.bfloat16)
    assert len(list(model.dit.parameters())) == 1317
    assert sum(p.numel() for p in model.encoders.text.module.parameters()) > 5e9


@pytest.mark.parametrize("model", ["tiny", "tiny-video"])
def test_a_session_that_leaves_and_comes_back_is_measured_with_and_without_its_pages(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", model, "--device", "cpu", "--parts", "export", "--block-size", "16"]
    assert main(["bench", *options, "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    measured = json.loads(out.splitlines()[-1])["export"]
    pages, compact = measured["pages"], measured["compact"]
    assert 0 < 4 * compact["bytes"] < pages["bytes"]
    assert pages["inexact"] is None
    assert compact["inexact"] is None
    assert all(each["leave_s"] >= 0 and each["back_s"] > 0 for each in (pages, compact, measured["parking"]))
    assert out.count(" back; exact\n") == 3
