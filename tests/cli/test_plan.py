"""`worldkv plan`: the sum of a GPU's memory, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("matplotlib")

import torch
from engines import random_checkpoint

from worldkv.bench.plan import make_plan, sizes_of_checkpoint, sizes_of_model
from worldkv.bench.released import RELEASED
from worldkv.cli.main import main
from worldkv.models.dreamzero.config import dreamzero_14b
from worldkv.models.dreamzero.true_size import random_model, write_true_structure


@pytest.mark.parametrize("model", ["dreamzero-14b", "dreamzero-5b"])
def test_weights_are_those_of_the_modules(model: str) -> None:
    made = random_model(RELEASED[model](), device="meta", dtype=torch.bfloat16)
    plan = make_plan(sizes_of_model(model), 141, "model", None, "reset", 128)
    assert plan.dit == 2 * sum(parameter.numel() for parameter in made.dit.parameters())
    encoders = (made.encoders.vae.module, made.encoders.text.module, made.encoders.image.module)
    assert plan.encoders == pytest.approx(2 * sum(p.numel() for m in encoders for p in m.parameters()), rel=1e-3)


def test_what_the_weights_leave_is_divided_by_a_session() -> None:
    plan = make_plan(sizes_of_model("dreamzero-14b"), 141, "model", None, "reset", 128)
    assert plan.charge / 2**30 == pytest.approx(15.0, abs=0.1)
    used = plan.dit + plan.encoders + plan.shared + plan.workspace + plan.driver
    assert plan.num_sessions == (plan.memory - used) // plan.charge == 5
    assert make_plan(sizes_of_model("dreamzero-5b"), 141, "model", None, "reset", 128).num_sessions > 64


def test_fp8_and_no_guidance_make_room() -> None:
    plain, fp8 = (
        make_plan(sizes_of_model("dreamzero-14b"), 80, precision, None, "reset", 128) for precision in ("model", "fp8")
    )
    alone = make_plan(sizes_of_model("dreamzero-14b"), 80, "model", 1.0, "reset", 128)
    products = 40 * (6 * 5120 * 5120 + 2 * 5120 * 13824)
    assert plain.dit - fp8.dit == products
    assert plain.num_sessions < fp8.num_sessions
    assert alone.charge < 0.55 * plain.charge
    assert alone.shared == 0, "no negative prompt"


@pytest.mark.parametrize(
    ("memory", "says"), [("141", "sessions that fit"), ("48", "robots in time                               0")]
)
def test_a_table_and_a_picture(memory: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    assert main(["plan", "--model", "dreamzero-14b", "--memory", memory, "--output", str(picture)]) == 0
    text = capsys.readouterr().out
    assert says in text
    assert "a parked session, on the host" in text
    assert picture.stat().st_size > 5_000


def test_a_folder_is_planned_from_its_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_true_structure(tmp_path / "DreamZero-DROID", dreamzero_14b())
    found, named = sizes_of_checkpoint(folder, [], None), sizes_of_model("dreamzero-14b")
    assert (found.dit, found.encoders, found.model, found.chunk_s) == (
        named.dit,
        named.encoders,
        "dreamzero-14b",
        pytest.approx(6 / 15),  # of the tiny conf.yaml that stands beside it
    )
    assert main(["plan", "--checkpoint", str(random_checkpoint("ti2v")), "--memory", "24"]) == 0
    assert "not measured for these sizes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("memory", "way"),
    [
        (60, "try --precision fp8, or a GPU of 69 GB"),
        (67, "try --precision fp8, or --cfg-scale 1 (half the cache), or a GPU of 69 GB"),
        (48, "try --precision fp8 with --cfg-scale 1 (half the cache), or a GPU of 69 GB"),
        (24, "are missing: try a GPU of 69 GB"),
    ],
)
def test_only_what_makes_room_is_advised(memory: int, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", str(memory)]) == 0
    text = capsys.readouterr().out
    assert way in text
    assert "no session fits, so no robot is served" in text
    assert main(["plan", "--memory", "69"]) == 0
    assert "sessions that fit                            1" in capsys.readouterr().out
