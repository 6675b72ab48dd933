"""`worldkv inspect` and `convert` of causal video, in every published form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from causal import SIZE, random_folder  # noqa: E402
from causal_published import dit_of, peft, plain_tensors, write_base, write_distilled, write_lora  # noqa: E402

from worldkv.cli.main import main  # noqa: E402
from worldkv.models.causal_wan.checkpoint import Checkpoint, load, tokenizer_of  # noqa: E402
from worldkv.models.causal_wan.config import PRESETS  # noqa: E402


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "Wan2.1-T2V-1.3B")


def test_inspect_tells_what_comes_from_where(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_distilled(tmp_path / "published", "averaged")
    write_lora(folder / "lora.pt", dit_of(plain_tensors()), peft)
    assert main(["inspect", str(folder), "--base", str(base), "--preset", "longlive-infinity"]) == 0
    told = capsys.readouterr().out
    for words in (
        "self_forcing_dmd.pt",
        "Wan2.1_VAE.pth",
        "models_t5_umt5-xxl-enc-bf16.pth",
        "a LoRA of 20 weights is merged",
        "12 frames, the block among them, the first 3 kept for ever",
        "places in the window",
        "832 x 480 pixels, 1560 tokens",
        "google/umt5-xxl",
        "nothing is missing",
    ):
        assert words in told, words


def test_inspect_tells_what_is_wrong(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_distilled(tmp_path / "published", "averaged")
    assert main(["inspect", str(folder)]) == 1
    assert "config.json is absent" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--base", str(base)]) == 1
    assert "choose a preset: self-forcing" in capsys.readouterr().out
    (folder / "self_forcing_dmd.pt").write_bytes(b"nothing")
    assert main(["inspect", str(folder), "--base", str(base), "--preset", "longlive"]) == 1
    assert "cannot be read as weights only" in capsys.readouterr().out
    torch.save({"generator": {**dit_of(plain_tensors()), "more": torch.zeros(2)}}, folder / "self_forcing_dmd.pt")
    assert main(["inspect", str(folder), "--base", str(base), "--preset", "longlive"]) == 1
    assert "unexpected: model.more" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--base", str(base), "--embodiment", "droid"]) == 2
    assert "--embodiment" in capsys.readouterr().err


def test_convert_writes_one_folder_that_is_the_same_model(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = write_distilled(tmp_path / "published", "wrapped"), tmp_path / "clean"
    lora = tmp_path / "lora.pt"
    write_lora(lora, dit_of(plain_tensors()), peft)
    options = ["--base", str(base), "--preset", "longlive-infinity", "--lora", str(lora), "--dtype", "float32"]
    command = ["convert", str(folder), "--output", str(output), *options]
    assert main(command) == 0
    assert main(["inspect", str(output)]) == 0
    ours = load(output, **SIZE)
    expected = load(folder, base=[base], preset="longlive-infinity", lora=lora, **SIZE)
    assert ours.config == expected.config
    assert ours.config.blocks == PRESETS["longlive-infinity"]
    for mine, theirs in (
        (ours.dit, expected.dit),
        (ours.encoders.vae.module, expected.encoders.vae.module),
        (ours.encoders.text.module, expected.encoders.text.module),
    ):
        state = theirs.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in mine.state_dict().items())
    assert type(tokenizer_of(Checkpoint.open(output))).__name__ == "HFTokenizer"
    capsys.readouterr()
    assert main(command) == 0, "a second run keeps the shards"
    assert "1 kept from before" in capsys.readouterr().out
    assert main(["convert", str(random_folder()), "--output", str(output)]) == 2
    assert "holds a conversion of published" in capsys.readouterr().err
    assert json.loads((output / "causal.json").read_text())["rope"] == "relative"


def test_convert_brings_recordings_along_and_refuses_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "clean"
    assert main(["convert", str(random_folder()), "--output", str(output), "--height", "32"]) == 2
    assert "--height" in capsys.readouterr().err
    assert main(["convert", str(random_folder()), "--output", str(output), "--window-frames", "12"]) == 0
    assert load(output, **SIZE).config.blocks.window_frames == 12
