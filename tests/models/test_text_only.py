"""What a text-to-video family takes from `models/wan`, on recorded weights: no image encoder, other prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from dits import Stage  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from worldkv.errors import CheckpointError  # noqa: E402
from worldkv.models.checkpoints.files import read_headers  # noqa: E402
from worldkv.models.checkpoints.modules import check_complete, load_module, tensor_shapes  # noqa: E402
from worldkv.models.checkpoints.tensors import StoredTensors  # noqa: E402
from worldkv.models.wan.base_folder import read_base  # noqa: E402
from worldkv.models.wan.config import WanConfig  # noqa: E402
from worldkv.models.wan.dit import WanDiT, WanRow  # noqa: E402
from worldkv.models.wan.encoders import WanEncoders, load_encoders  # noqa: E402
from worldkv.models.wan.layout import encoder_shapes  # noqa: E402
from worldkv.models.wan.names import Prefixes  # noqa: E402
from worldkv.models.wan.sizes import read_sizes  # noqa: E402

PREFIXES = Prefixes(dit="model.", vae="vae.", text="text_encoder.")


@pytest.fixture(scope="module")
def folder(golden_i2v: Path) -> Path:
    found = golden_i2v.parent / "tiny_causal_chunk"
    if not found.is_dir():
        pytest.skip("golden/tiny_causal_chunk is not beside this checkout")
    return found


@pytest.fixture(scope="module")
def golden(folder: Path) -> dict[str, Any]:
    return load_file(folder / "golden.safetensors")


@pytest.fixture(scope="module")
def tensors(folder: Path) -> StoredTensors:
    problems: list[str] = []
    stored = read_headers(folder, problems).tensors
    assert not problems
    return StoredTensors(
        folder=folder,
        shapes={name: tensor.shape for name, tensor in stored.items()},
        dtypes={name: tensor.dtype for name, tensor in stored.items()},
        places={name: tensor.place for name, tensor in stored.items()},
        adapters={},
    )


@pytest.fixture(scope="module")
def encoders(tensors: StoredTensors) -> WanEncoders:
    return load_encoders(tensors, read_sizes(tensors, PREFIXES), PREFIXES, device="cpu", dtype=torch.float32)


def meta_dit(folder: Path) -> WanDiT:
    said = json.loads((folder / "config.json").read_text())
    del said["_class_name"]
    with torch.device("meta"):
        return WanDiT(WanConfig(**said))


def error(ours: Any, recorded: Any) -> float:
    assert ours.shape == recorded.shape
    return float((ours - recorded).norm() / recorded.norm())


def test_every_tensor_of_the_folder_has_its_place(folder: Path, tensors: StoredTensors) -> None:
    sizes = read_sizes(tensors, PREFIXES)
    assert sizes.image is None
    dit = {PREFIXES.dit + name: shape for name, shape in tensor_shapes(meta_dit(folder)).items()}
    check_complete(tensors, dit | encoder_shapes(sizes, PREFIXES))


def test_an_encoder_that_is_not_there_is_named_by_its_prefix(tensors: StoredTensors) -> None:
    with pytest.raises(CheckpointError, match=r"visual\.cls_embedding: missing"):
        read_sizes(tensors, Prefixes(dit="model.", vae="vae.", text="text_encoder.", image="visual."))


def test_text_and_video_equal_the_recorded_ones(encoders: WanEncoders, golden: dict[str, Any]) -> None:
    assert encoders.image is None
    embedding = encoders.text.encode(golden["prompt.first.token_ids"], golden["prompt.first.attention_mask"])
    assert error(embedding, golden["prompt.first.embedding"]) < 1e-5
    stream = encoders.vae.new_decode_state()
    for block in range(3):
        video = encoders.vae.decode_stream(stream, golden[f"block{block}.latents"])
        assert error(video, golden[f"block{block}.decoded_video"]) < 1e-5


def test_velocities_over_a_growing_history_equal_the_recorded_ones(
    folder: Path, tensors: StoredTensors, golden: dict[str, Any]
) -> None:
    dit = meta_dit(folder)
    names = {name: PREFIXES.dit + name for name in dit.state_dict()}
    load_module(tensors, dit, names, device="cpu", dtype=torch.float32)
    stage = Stage(dit, num_sessions=1)
    (session,) = stage.sessions
    stage.condition(session, "text", "recorded", dit.project_text(golden["prompt.first.embedding"][0]))
    for block in range(3):  # the window of 9 frames is full then
        for step, timestep in enumerate(golden["schedule.timesteps"].tolist()):
            row = WanRow(golden[f"block{block}.step{step}.input"][0], None, 3 * block, timestep, wants_velocity=True)
            (velocity,) = stage.forward([session], [row])
            assert error(velocity, golden[f"block{block}.step{step}.velocity"][0]) < 1e-5
        clean = WanRow(golden[f"block{block}.latents"][0], None, 3 * block, 0, wants_velocity=False)
        assert stage.forward([session], [clean]) == [None]
        cache = torch.stack(session.layer_kv("a", 2))[:, None]
        assert error(cache, golden[f"block{block}.cache.layer2"]) < 1e-5


def test_a_base_folder_gives_a_family_without_image_encoder_no_image_encoder(tmp_path: Path) -> None:
    for file in ("models_t5_umt5-xxl-enc-bf16.pth", "models_clip_x.pth", "Wan2.1_VAE.pth"):
        torch.save({"visual.weight": torch.zeros(2)}, tmp_path / file)
    assert set(read_base([tmp_path], PREFIXES)) == {"text_encoder.visual.weight", "vae.visual.weight"}
