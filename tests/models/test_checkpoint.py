"""Checkpoint folders: whole, sharded, and broken in every way somebody's users met."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.modules import TensorSource, check_complete, load_module, tensor_shapes
from worldkv.models.dreamzero.checkpoint import Checkpoint, check_all_tensors, load_encoders, meta_dit
from worldkv.models.dreamzero.config import dreamzero_5b, dreamzero_14b
from worldkv.models.dreamzero.folder import DIT_PREFIX
from worldkv.models.dreamzero.random import write_random_checkpoint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "single": write_random_checkpoint(root / "single"),
        "sharded": write_random_checkpoint(root / "sharded", sharded=True),
    }


@pytest.fixture
def single(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["single"], tmp_path / "single"))


@pytest.fixture
def sharded(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["sharded"], tmp_path / "sharded"))


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def edit_dit(folder: Path, **values: Any) -> None:
    edit_json(
        folder / "config.json",
        lambda config: config["action_head_cfg"]["config"]["diffusion_model_cfg"].update(values),
    )


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    edit(tensors)
    save_file(tensors, folder / SINGLE)


def error_of(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


# --- whole ones


def test_a_golden_checkpoint_is_complete_and_nothing_in_it_is_unexpected(golden_folder: Path) -> None:
    checkpoint = Checkpoint.open(golden_folder)
    check_all_tensors(checkpoint)
    assert checkpoint.config.dit.image_dim == 64
    assert not checkpoint.random_weights  # the golden ones do not say so of themselves
    assert checkpoint.conf["relative_action_keys"] == ["joint_position"]
    assert "oxe_droid" in checkpoint.metadata
    assert {str(dtype) for dtype in checkpoint.dtypes.values()} == {"bfloat16"}
    name = f"{DIT_PREFIX}patch_embedding.weight"
    assert tuple(checkpoint.tensor(name).shape) == checkpoint.shapes[name]


def test_the_dits_names_and_shapes_follow_from_its_config(golden_folder: Path) -> None:
    checkpoint = Checkpoint.open(golden_folder)
    stored = {
        name.removeprefix(DIT_PREFIX): shape for name, shape in checkpoint.shapes.items() if name.startswith(DIT_PREFIX)
    }
    assert tensor_shapes(meta_dit(checkpoint.config.dit)) == stored


def test_the_true_models_have_the_known_numbers_of_tensors_and_parameters() -> None:
    big, small = (tensor_shapes(meta_dit(config.dit)) for config in (dreamzero_14b(), dreamzero_5b()))
    assert len(big) == 40 * 32 + 37 == 1317
    assert len(small) == 30 * 32 + 37
    assert sum(torch.Size(s).numel() for s in big.values()) == pytest.approx(16.48e9, rel=0.01)
    assert sum(torch.Size(s).numel() for s in small.values()) == pytest.approx(5.605e9, rel=0.01)


def test_shards_hold_the_same_checkpoint_as_one_file(originals: dict[str, Path]) -> None:
    one, many = (Checkpoint.open(originals[form]) for form in ("single", "sharded"))
    assert one.shapes == many.shapes
    assert one.config == many.config
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.shapes)
    assert one.random_weights
    check_all_tensors(many)


# --- broken ones: (which form, how it is broken, what the error must name)

Break = Callable[[Path], Any]


def truncate(name: str, keep: float) -> Break:
    def broken(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return broken


def text(name: str, content: str) -> Break:
    return lambda folder: (folder / name).write_text(content)


def without(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def index(edit: Callable[[dict[str, Any]], Any]) -> Break:
    return lambda folder: edit_json(folder / INDEX, edit)


def dit(**values: Any) -> Break:
    return lambda folder: edit_dit(folder, **values)


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    return lambda folder: edit_tensors(folder, edit)


BROKEN: list[tuple[str, str, Break, list[str]]] = [
    ("a truncated file", "single", truncate(SINGLE, 0.9), [SINGLE, "truncated", "bytes expected", "found"]),
    ("a file cut inside its header", "single", truncate(SINGLE, 0.001), [SINGLE, "truncated", "found"]),
    ("an empty file", "single", text(SINGLE, ""), [SINGLE, "truncated: 0 bytes"]),
    ("a truncated shard", "sharded", truncate(SHARD, 0.5), [SHARD, "truncated", "bytes expected"]),
    ("a shard that is absent", "sharded", without(SHARD), [SHARD, "absent", INDEX]),
    (
        "a Git LFS pointer",
        "single",
        text(SINGLE, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ["Git LFS pointer"],
    ),
    ("a foreign file", "single", text(SINGLE, "PK" * 500), ["not a safetensors file"]),
    ("an index without its map", "sharded", index(lambda i: i.pop("weight_map")), ["weight_map"]),
    (
        "an index that leaves the folder",
        "sharded",
        index(lambda i: i["weight_map"].update({"x": "../other.safetensors"})),
        ["weight_map", "beside it"],
    ),
    (
        "an index that names a tensor no shard has",
        "sharded",
        index(lambda i: i["weight_map"].update({"nowhere": SHARD})),
        [SHARD, "lacks nowhere"],
    ),
    ("a damaged conf.yaml", "single", text("experiment_cfg/conf.yaml", "a: [1"), ["not readable YAML"]),
    ("a conf.yaml that runs code", "single", text("experiment_cfg/conf.yaml", "!!python/name:os.system"), ["YAML"]),
    ("a conf.yaml that is a list", "single", text("experiment_cfg/conf.yaml", "[]"), ["must hold a mapping"]),
    ("a damaged metadata.json", "single", text("experiment_cfg/metadata.json", "{"), ["not readable JSON"]),
    ("a damaged config.json", "single", text("config.json", "{"), ["config.json is not readable JSON"]),
    ("too few layers in the config", "single", dit(num_layers=1), ["num_layers 1", "2 blocks"]),
    ("too many layers in the config", "single", dit(num_layers=3), ["num_layers 3", "2 blocks"]),
    ("another width", "single", dit(dim=128), ["dim 128", "patch_embedding.weight is [64"]),
    ("another ffn_dim", "single", dit(ffn_dim=256), ["ffn_dim 256"]),
    ("another text_dim", "single", dit(text_dim=64), ["text_dim 64", "token_embedding"]),
    ("another hidden_size", "single", dit(hidden_size=64), ["hidden_size 64"]),
    ("the other VAE", "single", dit(out_dim=48, in_dim=100), ["out_dim 48", "vae.model.conv2.weight"]),
    ("another number of tokens", "single", dit(frame_seqlen=30), ["frame_seqlen 30", "64 x 96", "24 tokens"]),
    (
        "an adapter without its scale",
        "single",
        tensors(lambda t: t.update({f"{DIT_PREFIX}base_model.model.x.lora_A.weight": torch.zeros(1)})),
        ["lora_alpha"],
    ),
    (
        "no DiT at all",
        "single",
        tensors(lambda t: [t.pop(name) for name in list(t) if name.startswith(DIT_PREFIX)]),
        [f"missing: {DIT_PREFIX}patch_embedding.weight", "0 blocks"],
    ),
]


@pytest.mark.parametrize(
    ("form", "broken", "named"), [case[1:] for case in BROKEN], ids=[case[0].replace(" ", "_") for case in BROKEN]
)
def test_opening_a_broken_checkpoint_says_what_is_wrong(
    form: str, broken: Break, named: list[str], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(form)
    broken(folder)
    message = error_of(lambda: Checkpoint.open(folder))
    for words in named:
        assert words in message


def test_a_truncated_file_is_reported_with_both_byte_counts(single: Path) -> None:
    whole = (single / SINGLE).stat().st_size
    truncate(SINGLE, 0.5)(single)
    message = error_of(lambda: Checkpoint.open(single))
    assert f"{whole} bytes expected, {whole // 2} found" in message


def test_several_faults_are_reported_together(sharded: Path) -> None:
    (sharded / SHARD).unlink()
    truncate("model-00001-of-00003.safetensors", 0.5)(sharded)
    (sharded / "experiment_cfg/metadata.json").write_text("{")
    message = error_of(lambda: Checkpoint.open(sharded))
    assert "absent" in message
    assert "truncated" in message
    assert "metadata.json is not readable JSON" in message


def test_a_resize_inside_the_head_explains_the_tokens_per_frame(single: Path) -> None:
    edit_dit(single, frame_seqlen=6)
    error_of(lambda: Checkpoint.open(single))
    edit_json(
        single / "config.json",
        lambda config: config["action_head_cfg"]["config"].update(target_video_height=32, target_video_width=48),
    )
    assert Checkpoint.open(single).config.target_video_height == 32


# --- folders of something else


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, ["config.json", "model.safetensors or"]),
        ({"model_index.json": "{}"}, ["diffusers model"]),
        ({"config.json": '{"_class_name": "WanModel"}', "Wan2.1_VAE.pth": ""}, ["base Wan model"]),
        ({"config.json": '{"_class_name": "WanTransformer3DModel"}', SINGLE: ""}, ["diffusers model"]),
        ({"config.json": '{"model_type": "llama"}', SINGLE: ""}, ["transformers model of type 'llama'"]),
        ({"snapshots/abc/config.json": "{}"}, ["did you mean", "snapshots/abc"]),
        ({"config.json": '{"action_head_cfg": {}}', "pytorch_model.bin": ""}, ["pickled weights", "never read"]),
    ],
)
def test_a_folder_of_something_else_is_recognised(files: dict[str, str], named: list[str], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    message = error_of(lambda: Checkpoint.open(tmp_path))
    for words in ["not a DreamZero checkpoint folder", "looked for config.json", *named]:
        assert words in message


def test_a_folder_that_is_not_there_or_is_a_file_is_said_to_be_so(tmp_path: Path) -> None:
    assert "does not exist" in error_of(lambda: Checkpoint.open(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    assert "is a file" in error_of(lambda: Checkpoint.open(tmp_path / "file"))


# --- the whole checkpoint against what is expected


def test_missing_and_unexpected_tensors_of_all_parts_come_in_one_error(single: Path) -> None:
    gone = [
        f"{DIT_PREFIX}blocks.1.norm3.bias",
        "action_head.vae.model.conv1.bias",
        "action_head.text_encoder.norm.weight",
        "action_head.image_encoder.model.visual.transformer.0.norm1.weight",
    ]

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in gone:
            del tensors[name]
        tensors["action_head.surprise"] = torch.zeros(3)
        tensors[f"{DIT_PREFIX}blocks.0.modulation"] = torch.zeros(1, 6, 32)

    edit_tensors(single, edit)
    message = error_of(lambda: check_all_tensors(Checkpoint.open(single)))
    assert all(f"missing: {name}" in message for name in gone)
    assert "unexpected: action_head.surprise [3]" in message
    assert f"shape: {DIT_PREFIX}blocks.0.modulation is [1, 6, 32], expected [1, 6, 64]" in message


def test_what_a_released_checkpoint_holds_and_nobody_reads_is_not_unexpected(single: Path) -> None:
    edit_tensors(single, lambda t: t.update({"action_head.image_encoder.model.log_scale": torch.tensor(2.0)}))
    checkpoint = Checkpoint.open(single)
    assert "action_head.image_encoder.model.visual.transformer.2.norm1.weight" in checkpoint.shapes
    assert "action_head.image_encoder.model.visual.head" in checkpoint.shapes
    check_all_tensors(checkpoint)


def test_a_long_list_of_problems_is_cut(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    message = error_of(lambda: check_complete(checkpoint, {f"tensor{i}": (i,) for i in range(50)}, ["*"]))
    assert len(message.splitlines()) == 22
    assert message.endswith("and 30 more")


# --- filling modules


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(48, 64)
        self.tied = torch.nn.Linear(48, 64, bias=False)
        self.key = torch.nn.Linear(64, 64, bias=False)


def names_of_small() -> dict[str, str | TensorSource]:
    text = f"{DIT_PREFIX}text_embedding.0"
    qkv = "action_head.image_encoder.model.visual.transformer.0.attn.to_qkv.weight"
    return {
        "first.weight": f"{text}.weight",
        "first.bias": f"{text}.bias",
        "tied.weight": f"{text}.weight",
        "key.weight": TensorSource(qkv, part=1, parts=3),
    }


def meta_small() -> Small:
    with torch.device("meta"):
        return Small()


def test_a_module_is_filled_cast_frozen_and_shares_tied_tensors(originals: dict[str, Path]) -> None:
    checkpoint, module = Checkpoint.open(originals["single"]), meta_small()
    seen: list[tuple[int, int]] = []
    load_module(
        checkpoint,
        module,
        names_of_small(),
        device="cpu",
        dtype=torch.float32,
        progress=lambda done, total: seen.append((done, total)),
    )
    stored = checkpoint.tensor(f"{DIT_PREFIX}text_embedding.0.weight")
    assert torch.equal(module.first.weight, stored.float())
    assert module.first.weight.data_ptr() == module.tied.weight.data_ptr()
    qkv = checkpoint.tensor("action_head.image_encoder.model.visual.transformer.0.attn.to_qkv.weight").float()
    assert torch.equal(module.key.weight, qkv[64:128])
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert len(seen) == 3
    assert seen[-1] == (seen[-1][1],) * 2  # ends at the total


def test_a_module_keeps_its_values_when_the_file_is_replaced(single: Path) -> None:
    module = meta_small()
    load_module(Checkpoint.open(single), module, names_of_small(), device="cpu", dtype=torch.bfloat16)
    before = module.first.weight.clone()
    with (single / SINGLE).open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xff" * ((single / SINGLE).stat().st_size - 100_000))
    assert torch.equal(module.first.weight, before)


def test_a_module_that_cannot_be_filled_is_left_alone_and_all_problems_are_listed(
    originals: dict[str, Path],
) -> None:
    module = meta_small()
    names = names_of_small() | {"first.bias": "nowhere", "tied.weight": f"{DIT_PREFIX}text_embedding.2.weight"}
    message = error_of(
        lambda: load_module(Checkpoint.open(originals["single"]), module, names, device="cpu", dtype=torch.float32)
    )
    assert "missing: nowhere [64]" in message
    assert "text_embedding.2.weight is [64, 64], expected [64, 48]" in message
    assert all(parameter.is_meta for parameter in module.parameters())


def test_encoders_of_an_incomplete_checkpoint_are_never_loaded(single: Path) -> None:
    edit_tensors(single, lambda t: t.pop("action_head.vae.model.conv2.weight"))
    message = error_of(lambda: load_encoders(Checkpoint.open(single), device="cpu", dtype=torch.float32))
    assert "action_head.vae.model.conv2.weight" in message
    assert "missing" in message
