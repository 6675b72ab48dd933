"""The published forms of causal Wan models are the plain folder, bit for bit; what does not fit is listed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from causal import SIZE, make_request, random_folder, run, same  # noqa: E402
from causal_published import (  # noqa: E402
    FORMS,
    RANK,
    copy_base_into,
    dit_of,
    in_diffusers,
    peft,
    plain_tensors,
    write_base,
    write_distilled,
    write_lora,
)
from safetensors.torch import load_file, save_file  # noqa: E402

from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.errors import CheckpointError  # noqa: E402
from worldkv.load import load_engine  # noqa: E402
from worldkv.models.causal_wan.checkpoint import Checkpoint, load, tokenizer_of  # noqa: E402
from worldkv.models.causal_wan.folder import Choices  # noqa: E402
from worldkv.models.checkpoints.tensors import StoredTensors  # noqa: E402
from worldkv.models.registry import family_of  # noqa: E402

PRESET = {"preset": "longlive", "window_frames": 9, **SIZE}  # what random_folder says of itself


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "Wan2.1-T2V-1.3B")


def weights(folder: Path, **options: Any) -> dict[str, Any]:
    model = load(folder, **{**PRESET, **options})
    modules = {"dit": model.dit, "vae": model.encoders.vae.module, "text": model.encoders.text.module}
    return {f"{part}.{name}": t for part, module in modules.items() for name, t in module.state_dict().items()}


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours.keys() == expected.keys()
    differ = [name for name in expected if not torch.equal(ours[name], expected[name])]
    assert not differ, differ[:5]


@pytest.mark.parametrize("form", FORMS)
def test_a_published_form_is_the_plain_folder_bit_for_bit(form: str, base: Path, tmp_path: Path) -> None:
    folder = write_distilled(tmp_path / "published", form)
    assert_same(weights(folder, base=[base]), weights(random_folder()))
    if form not in ("safetensors", "diffusers"):  # whose folder says nothing of the family
        assert family_of(folder) == "causal_wan"
    copy_base_into(folder, base) if form != "diffusers" else None
    if form != "diffusers":
        assert_same(weights(folder), weights(random_folder()))


def test_a_published_folder_runs_as_the_plain_one(base: Path, tmp_path: Path) -> None:
    folder = write_distilled(tmp_path / "published", "averaged")
    blocks = []
    for each, options in ((folder, {"base": [base]}), (random_folder(), {})):
        engine = load_engine(each, EngineConfig(max_sessions=1), **PRESET, **options)
        blocks.append(run(engine, engine.open_session(), make_request()))
        engine.shutdown()
    assert same(*blocks)


def test_averaged_weights_are_taken_where_they_are_wanted(base: Path, tmp_path: Path) -> None:
    folder = write_distilled(tmp_path / "published", "averaged")
    trained = weights(folder, base=[base], averaged=False)
    assert all(bool((t == 0.5).all()) for name, t in trained.items() if name.startswith("dit."))


def test_diffusers_own_module_has_these_names_and_computes_the_same(tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    module = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        text_dim=48,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
    )
    dit = {in_diffusers(name): tensor.float() for name, tensor in dit_of(plain_tensors()).items()}
    assert dit.keys() == module.state_dict().keys()
    assert {name: t.shape for name, t in dit.items()} == {name: t.shape for name, t in module.state_dict().items()}


def test_a_config_of_diffusers_has_the_sizes(base: Path, tmp_path: Path) -> None:
    folder = write_distilled(tmp_path / "transformer", "diffusers")
    said = {
        "_class_name": "WanTransformer3DModel",
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 48,
        "freq_dim": 32,
        "ffn_dim": 128,
        "num_layers": 2,
        "qk_norm": "rms_norm_across_heads",
        "cross_attn_norm": True,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "patch_size": [1, 2, 2],
        "eps": 1e-6,
        "rope_max_seq_len": 1024,
    }
    (folder / "config.json").write_text(json.dumps(said))
    assert family_of(folder) == "causal_wan"
    ours, plain = (Checkpoint.open(each, Choices(base=[base], **PRESET)) for each in (folder, random_folder()))
    assert ours.config.dit.text_len == 512, "diffusers leaves it to the pipeline"
    assert ours.config.dit.dim == plain.config.dit.dim
    assert_same(weights(folder, base=[base]), weights(random_folder()))
    for wrong, words in (
        ({"image_dim": 1280}, "image_dim: expected null"),
        ({"num_attention_heads": "2"}, "attention_head_dim: expected|num_heads: expected"),
        ({"attention_head_dim": None}, "attention_head_dim: expected a whole number"),
        ({"qk_norm": None}, "qk_norm must be true"),
        ({"in_channels": 36}, "in_dim must be 16"),
    ):
        (folder / "config.json").write_text(json.dumps(said | wrong))
        with pytest.raises(CheckpointError, match=words):
            load(folder, base=[base], **PRESET)


@pytest.mark.parametrize("form", ["group", "flat", "safetensors", "diffusers", "beside"])
def test_a_lora_is_merged_in_float32(form: str, base: Path, tmp_path: Path) -> None:
    folder = write_distilled(tmp_path / "published", "averaged")
    path = (folder if form == "beside" else tmp_path) / ("lora.safetensors" if form == "safetensors" else "lora.pt")
    rename = {"diffusers": lambda name: f"transformer.{in_diffusers(name)}"}.get(form, peft)
    merged = write_lora(path, dit_of(plain_tensors()), rename, group=form == "group")
    ours = weights(folder, base=[base], lora=None if form == "beside" else path)
    expected = weights(random_folder()) | {f"dit.{name}": tensor.float() for name, tensor in merged.items()}
    assert_same(ours, expected)
    if form == "group":
        twice = weights(folder, base=[base], lora=path, lora_alpha=2 * RANK)
        name = "blocks.0.ffn.0.weight"
        before = weights(random_folder())[f"dit.{name}"]
        assert torch.allclose(twice[f"dit.{name}"] - before, 2 * (merged[name] - before), atol=1e-6)


def test_a_lora_beside_whole_weights_is_neither_merged_nor_dropped_silently(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    shutil.copytree(random_folder(), folder)
    write_lora(folder / "lora.pt", dit_of(plain_tensors()), peft)
    with pytest.raises(CheckpointError, match=r"lora\.pt lies beside whole weights.*name it with --lora FILE"):
        load(folder, **SIZE)
    assert load(folder, lora=folder / "lora.pt", **SIZE)


def test_a_lora_that_does_not_fit_is_listed(base: Path, tmp_path: Path) -> None:
    folder = write_distilled(tmp_path / "published", "averaged")
    write_lora(tmp_path / "lora.safetensors", dit_of(plain_tensors()), peft)
    factors = load_file(tmp_path / "lora.safetensors")
    down = factors.pop("base_model.model.blocks.0.ffn.0.lora_A.weight")
    factors["base_model.model.blocks.7.ffn.0.lora_A.weight"] = down
    factors["base_model.model.blocks.1.ffn.0.lora_A.weight"] = down[:, :5].contiguous()
    factors["base_model.model.head.head.lora_magnitude_vector"] = torch.zeros(3)
    save_file(factors, tmp_path / "lora.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder, base=[base], lora=tmp_path / "lora.safetensors", **PRESET)
    for words in (
        "blocks.7.ffn.0.lora_A.weight adapts blocks.7.ffn.0.weight, which the model does not have",
        "head.head.lora_magnitude_vector is no factor of a LoRA",
        "blocks.0.ffn.0.weight: lora_A is missing",
        "blocks.1.ffn.0.weight: [128, 64] does not fit its adapter",
    ):
        assert words in str(caught.value)
    with pytest.raises(CheckpointError, match=r"nowhere\.pt is no file"):
        load(folder, base=[base], lora=tmp_path / "nowhere.pt", **PRESET)


def test_names_that_do_not_match_are_listed(base: Path, tmp_path: Path) -> None:
    folder, dit = tmp_path / "published", dit_of(plain_tensors())
    folder.mkdir()
    bias = dit.pop("blocks.1.cross_attn.q.bias")
    dit["blocks.0.action.weight"] = bias
    torch.save({"generator": dit}, folder / "model.pt")
    with pytest.raises(CheckpointError) as caught:
        load(folder, base=[base], **PRESET)
    assert "missing: model.blocks.1.cross_attn.q.bias" in str(caught.value), "the base's is another model's"
    assert "unexpected: model.blocks.0.action.weight" in str(caught.value)
    dit["blocks.1.cross_attn.q.bias"] = dit.pop("blocks.0.action.weight")
    torch.save({"generator": dit | {"model.head.head.bias": dit["head.head.bias"]}}, folder / "model.pt")
    with pytest.raises(CheckpointError, match=r"are both head\.head\.bias: two models seem to be mixed"):
        load(folder, base=[base], **PRESET)
    torch.save({"critic": dit}, folder / "model.pt")
    with pytest.raises(CheckpointError, match=r"expected one of generator_ema, generator, model|in no known way"):
        load(folder, base=[base], **PRESET)


def test_what_a_folder_lacks_is_asked_for(base: Path, tmp_path: Path) -> None:
    folder = write_distilled(tmp_path / "published", "averaged")
    with pytest.raises(
        CheckpointError, match=r"config\.json is absent; name the folder of the base model .* --base DIR"
    ):
        load(folder, **PRESET)
    with pytest.raises(CheckpointError, match="choose a preset: self-forcing, "):
        load(folder, base=[base], **SIZE)
    (folder / "config.json").write_text((base / "config.json").read_text())
    with pytest.raises(CheckpointError, match="has no VAE and no text encoder: name the folder of the base model"):
        load(folder, **PRESET)
    torch.save({"generator": dit_of(plain_tensors())}, folder / "other.pt")
    with pytest.raises(CheckpointError, match=r"several models \(other\.pt, self_forcing_dmd\.pt\)"):
        load(folder, base=[base], **PRESET)
    assert_same(weights(folder, base=[base], file="other.pt"), weights(random_folder()))
    with pytest.raises(CheckpointError, match="file: expected a name within"):
        load(folder, base=[base], file="../other.pt", **PRESET)


def test_the_tokenizer_is_the_base_s_where_the_folder_has_none(base: Path, tmp_path: Path) -> None:
    folder = write_distilled(tmp_path / "published", "averaged")
    with_base = Checkpoint.open(folder, Choices(base=[base], **PRESET))
    assert type(tokenizer_of(with_base)).__name__ == "HFTokenizer"
    with pytest.warns(UserWarning, match="has no tokenizer"):
        assert type(tokenizer_of(replace(with_base, bases=(), random_weights=False))).__name__ == "ByteTokenizer"


def test_each_tensor_is_read_once(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = write_distilled(tmp_path / "published", "averaged"), []
    whole = StoredTensors._as_stored  # the DiT is read as part of a checkpoint, the encoders as that itself

    def as_stored(self: StoredTensors, name: str) -> Any:
        read.append(name)
        return whole(self, name)

    monkeypatch.setattr(StoredTensors, "_as_stored", as_stored)
    load(folder, base=[base], **PRESET)
    assert len(read) == len(set(read)) == len(plain_tensors())


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("a pickle was run",)


@pytest.mark.parametrize("where", ["distilled", "lora", "text", "vae", "config", "settings", "dit"])
@pytest.mark.parametrize("damage", ["empty", "cut", "text", "binary", "pickle", "list"])
def test_damaged_files_are_told(where: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = write_base(tmp_path / "base")
    folder = write_distilled(tmp_path / "published", "safetensors" if where == "dit" else "averaged")
    write_lora(folder / "lora.pt", dit_of(plain_tensors()), peft)
    (folder / "causal.json").write_text('{"preset": "longlive", "window_frames": 9}')
    path = {
        "distilled": folder / "self_forcing_dmd.pt",
        "lora": folder / "lora.pt",
        "text": own / "models_t5_umt5-xxl-enc-bf16.pth",
        "vae": own / "Wan2.1_VAE.pth",
        "config": own / "config.json",
        "settings": folder / "causal.json",
        "dit": folder / "causal_wan_bf16.safetensors",
    }[where]
    load(folder, base=[own], **SIZE)
    data = path.read_bytes()
    if damage == "pickle":
        torch.save({"generator": Exploit()}, path)
    elif damage == "list":
        torch.save([torch.zeros(2)], path) if path.suffix in (".pt", ".pth") else path.write_bytes(b"[1, 2]")
    else:
        path.write_bytes(
            {"empty": b"", "cut": data[: len(data) // 2], "text": b"not weights", "binary": bytes(range(256)) * 40}[
                damage
            ]
        )
    with pytest.raises(CheckpointError) as caught:
        load(folder, base=[own], **SIZE)
    assert all(line.isprintable() for line in str(caught.value).splitlines())
    assert "a pickle was run" not in capsys.readouterr().out
