"""`worldkv verify` agrees with the recordings at every block size, in company, and notices whatever is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import numpy as np
import torch
from engines import inside, make_engine, make_inputs
from safetensors.torch import load_file, save_file

from worldkv.cli.main import main
from worldkv.models.dreamzero.verify import GoldenObserver, GoldenRecording, relative_error

Tensors = dict[str, torch.Tensor]


def verify(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, float]]:
    """Exit code, and the largest relative error by quantity over all block sizes."""
    code = main(["verify", str(folder), "--tolerance", "1e-4", *options])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("max_relative_error "), lines[-3:]
    errors: dict[str, float] = {}
    for name, value, *_ in (line.split() for line in lines if not line.startswith(("blocks of", "policy.tiled"))):
        errors[name] = max(errors.get(name, 0.0), float(value))
    return code, errors


@pytest.fixture
def one_call(golden_i2v: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a golden folder with its first call only, changed."""

    def make(change: Callable[[Tensors, dict[str, object]], None]) -> Path:
        folder = Path(shutil.copytree(golden_i2v, tmp_path / "golden", copy_function=shutil.copyfile))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        golden = load_file(folder / "golden.safetensors")
        calls = json.loads((folder / "calls.json").read_text())
        calls["calls"] = calls["calls"][:1]
        golden = {name: t for name, t in golden.items() if not name.startswith("call") or name.startswith("call0.")}
        change(golden, calls)
        save_file(golden, folder / "golden.safetensors")
        (folder / "calls.json").write_text(json.dumps(calls))
        return folder

    return make


def test_the_14b_s_kind_equals_the_recording_in_company(golden_i2v: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = verify(golden_i2v, capsys, "--block-size", "16", "--interleave", "1")
    assert code == 0
    assert errors["max_relative_error"] < 1e-4
    recorded = load_file(golden_i2v / "golden.safetensors")
    inputs = ("frames", "state", "noise_video", "noise_action", "token_ids", "attention_mask")
    compared = {name for name in recorded if name.split(".")[-1] not in inputs}
    assert compared <= errors.keys(), "recorded, but not compared"


def test_the_5b_s_kind_equals_the_recording_at_two_more_block_sizes(
    golden_ti2v: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, errors = verify(golden_ti2v, capsys, "--block-size", "64", "128")
    assert code == 0
    assert errors["max_relative_error"] < 1e-4
    assert errors["policy.absolute_actions"] <= 1e-6


def test_a_changed_recording_an_unknown_quantity_and_a_wrong_schedule_all_fail(
    one_call: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def change(golden: Tensors, calls: dict) -> None:
        golden["call0.actions"] = golden["call0.actions"] * 1.001
        golden["call0.unheard_of"] = torch.ones(3)
        golden["latent_mean"] = golden["latent_mean"][:-1].clone()
        calls["calls"][0]["denoise_start_frame"] = 3
        calls["cfg_scale"] = 4.0

    code, errors = verify(one_call(change), capsys)
    assert code == 1
    wrong = {name for name, error in errors.items() if error > 1e-4}
    assert wrong == {
        "call0.actions",
        "call0.unheard_of",
        "latent_mean",
        "call0.reset_start_history",
        "solver.guidance_and_steps",
        "max_relative_error",
    }
    assert errors["max_relative_error"] == float("inf")
    assert errors["call0.actions"] == pytest.approx(1e-3, rel=0.05)


def test_a_single_wrong_pixel_of_the_policy_fails_although_the_model_agrees(
    one_call: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = one_call(lambda golden, calls: None)
    recorded = load_file(folder / "policy.safetensors")
    recorded["tiled_frames"][0, 3, 5, 1] ^= 1
    save_file(recorded, folder / "policy.safetensors")
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "1 pixels differ" in out
    assert float(out.splitlines()[-1].split()[1]) < 1e-4


def test_a_folder_without_a_recording_is_told_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "has no golden.safetensors" in said
    assert "worldkv inspect" in said


def test_a_damaged_recording_is_bad_input(one_call: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    def change(golden: Tensors, calls: dict) -> None:
        del golden["call0.noise_video"]

    folder = one_call(change)
    assert main(["verify", str(folder)]) == 2
    assert "lacks call0.noise_video" in capsys.readouterr().err
    (folder / "golden.safetensors").write_bytes(b"not a tensor in sight")
    assert main(["verify", str(folder)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_what_is_not_finite_is_infinitely_wrong() -> None:
    ones = torch.ones(4)
    assert relative_error(torch.full((4,), torch.nan), ones) == float("inf")
    assert relative_error(ones * 1.5, ones) == pytest.approx(0.5)


def test_under_a_sliding_window_history_is_what_is_visible() -> None:
    observer = GoldenObserver(
        cast("GoldenRecording", SimpleNamespace(prompt=lambda branch: (np.zeros(1), np.zeros(1))))
    )
    engine = make_engine("ti2v", block_size=16, window_policy="slide", observer=observer.observe)
    session = engine.open_session()
    observer.watch(engine.model, inside(engine, session).kv)
    window = engine.model.spec.window
    for tick in range(8):
        observer.begin_call(tick)
        observer.end_call(engine.submit(session, make_inputs(engine, tick, 1 if tick == 0 else 4)).result().result)
    num_chunks = engine.describe(session).num_chunks
    engine.shutdown()
    assert num_chunks > window.max_chunks, "some have left"
    _, start_frame, history = observer.ours["call7.reset_start_history"].tolist()
    assert start_frame == num_chunks
    assert history == window.max_chunks * window.chunk_size
    assert observer.ours["call7.cache.conditional.layer0"].shape[2] == history
