"""`worldkv plan` of causal video: its window, its copy where positions are relative, and its decoder's state."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from worldkv.bench.plan import make_plan, sizes_of_model, sizes_of_video  # noqa: E402
from worldkv.bench.released import VIDEO_ENCODERS, VIDEO_MODELS  # noqa: E402
from worldkv.cli.main import main  # noqa: E402
from worldkv.models.causal_wan.checkpoint import load  # noqa: E402
from worldkv.models.causal_wan.folder import Choices, Survey  # noqa: E402
from worldkv.models.causal_wan.random import write_random_causal_wan  # noqa: E402
from worldkv.models.wan.layout import decoder_state_size  # noqa: E402


def test_a_frame_and_a_decoder_s_state_cost_what_others_have_measured() -> None:
    plan = make_plan(sizes_of_model("longlive-1.3b"), 141, "model", None, "reset", 128)
    assert plan.frame == pytest.approx(287.5e6, rel=1e-3)
    assert plan.state / 2**20 == pytest.approx(2 * (1801 + 2.3 + 8), abs=1), "decoder, newest frames, a mixture; twice"
    assert plan.dit == pytest.approx(2 * 1.42e9, rel=0.01)
    infinity = make_plan(sizes_of_model("longlive-infinity-1.3b"), 141, "model", None, "reset", 128)
    assert infinity.charge - plan.charge == pytest.approx(12 * plan.frame, rel=0.01), "the window once more"
    assert plan.num_sessions * (plan.charge + plan.state) < plan.memory - plan.dit - plan.encoders


@pytest.mark.parametrize("num_frames", [2, 3, 5])
def test_the_state_s_size_is_that_of_a_stream(tmp_path: Path, num_frames: int) -> None:
    folder = write_random_causal_wan(tmp_path / "causal")
    vae = load(folder, height=32, width=48).encoders.vae
    stream = vae.new_decode_state()
    vae.decode_stream(stream, torch.randn(1, 16, num_frames, 4, 6))
    held = sum(tail.numel() for tail in stream._tails if isinstance(tail, torch.Tensor))
    bound = decoder_state_size(vae.sizes, 4, 6)
    assert held <= bound
    assert held == bound or num_frames == 2, "after two frames not every tail is full"


def test_a_folder_and_the_released_runs_can_be_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_random_causal_wan(tmp_path / "causal")
    sizes = sizes_of_video(Survey.open(folder, Choices(height=32, width=48)))
    assert sizes.dit + sizes.encoders == pytest.approx((folder / "model.safetensors").stat().st_size, rel=0.1)
    charges = []
    for window in ("9", "6"):
        options = ["--height", "32", "--width", "48", "--window-frames", window, "--block-size", "16"]
        assert main(["plan", str(folder), *options]) == 0
        told = capsys.readouterr().out
        assert "its decoder's state" in told
        charges.append(next(line for line in told.splitlines() if "a session's charge" in line))
    assert charges[0] != charges[1]
    for model in VIDEO_MODELS:
        assert main(["plan", "--model", model]) == 0
    assert "a block lasts" in capsys.readouterr().out
    assert main(["plan", "--model", "longlive-1.3b", "--cfg-scale", "1"]) == 2
    assert "--cfg-scale: longlive-1.3b is a model of video" in capsys.readouterr().err
    assert main(["plan", "--model", "longlive-1.3b", "--window-frames", "4"]) == 2
    assert VIDEO_ENCODERS.image is None


def test_no_option_of_robots_is_taken_and_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_random_causal_wan(tmp_path / "causal")
    for command, option in (
        (["plan", "--model", "longlive-1.3b", "--window-policy", "slide"], "--window-policy"),
        (["bench", "--model", "tiny-video", "--url", "ws://gpu-box"], "--url"),
        (["bench", "--model", "tiny-video", "--parts", "paced", "--observe", "1"], "--observe"),
        (["serve", str(folder), "--port", "0", "--record", str(tmp_path / "records")], "--record"),
    ):
        assert main(command) == 2
        assert f"error: {option}: is for robots" in capsys.readouterr().err


def test_the_engine_charges_what_is_planned(tmp_path: Path) -> None:
    folder = write_random_causal_wan(tmp_path / "causal")
    choices = Choices(height=32, width=48)
    plan = make_plan(sizes_of_video(Survey.open(folder, choices)), 1, "model", None, "reset", 16)
    model = load(folder, height=32, width=48, dtype=torch.bfloat16)
    assert model.max_state_bytes == plan.state
