"""The random checkpoint: complete, reproducible, plainly labelled, and not degenerate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from worldkv.models.dreamzero.checkpoint import Checkpoint, check_all_tensors, load_encoders
from worldkv.models.dreamzero.random import write_random_checkpoint


@pytest.mark.parametrize("kind", ["i2v", "ti2v"])
@pytest.mark.parametrize("sharded", [False, True], ids=["one_file", "sharded"])
def test_a_random_checkpoint_opens_and_loads_without_complaint(kind: str, sharded: bool, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_random_checkpoint(tmp_path / "made" / kind, kind=kind, sharded=sharded))
    check_all_tensors(checkpoint)
    load_encoders(checkpoint, device="cpu", dtype=torch.bfloat16)
    assert checkpoint.config.dit.model_type == kind
    assert checkpoint.random_weights
    assert len(list(checkpoint.folder.glob("model*.safetensors"))) == (3 if sharded else 1)


@pytest.mark.parametrize("kind", ["i2v", "ti2v"])
def test_its_layout_is_that_of_the_golden_checkpoint(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    golden = Checkpoint.open(request.getfixturevalue(f"golden_{kind}"))
    ours = Checkpoint.open(write_random_checkpoint(tmp_path, kind=kind))
    assert ours.shapes == golden.shapes
    assert ours.dtypes == golden.dtypes
    assert ours.config == golden.config
    assert ours.conf.keys() == golden.conf.keys()
    assert ours.conf["modality_configs"]["oxe_droid"].keys() == golden.conf["modality_configs"]["oxe_droid"].keys()
    statistics, modalities = (golden.metadata["oxe_droid"][part] for part in ("statistics", "modalities"))
    assert ours.metadata["oxe_droid"]["modalities"] == modalities
    for modality, parts in statistics.items():
        for part, values in parts.items():
            mine = ours.metadata["oxe_droid"]["statistics"][modality][part]
            assert {key: len(value) for key, value in mine.items()} == {k: len(v) for k, v in values.items()}
            assert all(low < high for low, high in zip(mine["q01"], mine["q99"], strict=True))


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    one, same, other = (
        (write_random_checkpoint(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == same
    assert one != other


def test_it_says_everywhere_that_its_weights_are_random(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path, seed=7)
    said = json.loads((folder / "config.json").read_text())["worldkv_random_weights"]
    assert "random weights" in said["notice"]
    assert said["seed"] == 7
    assert b"random weights" in (folder / "model.safetensors").read_bytes()[:500_000]


@pytest.mark.parametrize("kind", ["i2v", "ti2v"])
def test_its_encoders_depend_on_their_inputs_and_stay_in_range(kind: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_random_checkpoint(tmp_path, kind=kind))
    encoders = load_encoders(checkpoint, device="cpu", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    video = torch.rand(2, 3, 5, 64, 80, generator=generator) * 2 - 1
    latents = encoders.vae.encode(video)
    decoded = encoders.vae.decode(latents)
    assert encoders.image is not None
    features = encoders.image.encode(video[:, :, 0])
    mask = torch.ones(2, 16, dtype=torch.int64)
    embedding = encoders.text.encode(torch.tensor([[5] * 16, [9] * 16]), mask)
    for output in (latents, decoded, features, embedding):
        assert output.isfinite().all()
        assert 0.05 < output.std() < 20
        assert (output[0] - output[1]).norm() > 0.05 * output[0].norm()
    assert (decoded.abs() == 1).float().mean() < 0.5  # the picture is not all clipped


def test_sizes_can_be_chosen(tmp_path: Path) -> None:
    folder = write_random_checkpoint(
        tmp_path, view_height=176, view_width=320, num_layers=3, dim=96, num_heads=3, text_len=40, max_chunk_size=2
    )
    config = Checkpoint.open(folder).config
    assert (config.dit.frame_tokens, config.dit.num_layers, config.dit.text_len) == (880, 3, 40)
    assert (config.dit.head_dim, config.window_frames) == (32, 5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kind": "t2v"}, "kind must be one of i2v, ti2v"),
        ({"depth": 3}, "unknown sizes depth"),
        ({"view_height": 30}, "multiples of 8"),
        ({"dim": 65}, "dim"),
    ],
)
def test_impossible_wishes_are_refused(arguments: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        write_random_checkpoint(tmp_path / "x", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "x" / "config.json").exists()


def test_only_an_earlier_random_checkpoint_is_overwritten(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "mine", sharded=True)
    write_random_checkpoint(tmp_path / "mine")
    assert [path.name for path in sorted((tmp_path / "mine").glob("model*"))] == ["model.safetensors"]
    Checkpoint.open(tmp_path / "mine")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(ValueError, match="not empty"):
        write_random_checkpoint(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "thesis.txt").read_text() == "irreplaceable"
