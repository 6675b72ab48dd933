"""LoRA runs that hold only what was trained, over base Wan folders as they are published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import make_inputs, random_checkpoint  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from worldkv.errors import CheckpointError  # noqa: E402
from worldkv.load import load_engine  # noqa: E402
from worldkv.models.dreamzero.checkpoint import Checkpoint, check_all_tensors  # noqa: E402
from worldkv.models.dreamzero.folder import DIT_PREFIX  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RANK, ALPHA = 4, 8
TRAINED = ("state_encoder.", "action_encoder.", "action_decoder.")  # not in Wan: a run holds them whole
PTH = {
    "models_t5_umt5-xxl-enc-bf16.pth": ("action_head.text_encoder.", ""),
    "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth": ("action_head.image_encoder.model.visual.", "visual."),
    "Wan2.1_VAE.pth": ("action_head.vae.model.", ""),
}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """One model three times: merged whole; as a LoRA run without its base; the base, split as Wan is published."""
    whole = Path(shutil.copytree(random_checkpoint("i2v"), tmp_path / "whole"))
    run, base = Path(shutil.copytree(whole, tmp_path / "run")), tmp_path / "Wan2.1-I2V-14B-480P"
    base.mkdir()
    tensors = load_file(whole / "model.safetensors")
    for file, (prefix, own) in PTH.items():
        part = {own + name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        torch.save(part | {"textual.unused": torch.zeros(2)} if own else part, base / file)
    dit = {n.removeprefix(DIT_PREFIX): t for n, t in tensors.items() if n.startswith(DIT_PREFIX)}
    wan = {name: tensor.float() for name, tensor in dit.items() if not name.startswith(TRAINED)}
    names = sorted(wan)
    for index, part in enumerate((names[::2], names[1::2]), start=1):
        save_file({n: wan[n] for n in part}, base / f"diffusion_pytorch_model-0000{index}-of-00002.safetensors")
    prefix, stored = f"{DIT_PREFIX}base_model.model.", {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in dit.items():
        if name.startswith(TRAINED):
            stored[prefix + name] = tensor
        elif name.endswith(("self_attn.q.weight", "ffn.0.weight")):
            down = torch.randn(RANK, tensor.shape[1], generator=generator) * 0.05
            up = torch.randn(tensor.shape[0], RANK, generator=generator) * 0.05
            layer = name.removesuffix(".weight")
            stored[f"{prefix}{layer}.lora_A.default.weight"] = down
            stored[f"{prefix}{layer}.lora_B.default.weight"] = up
            tensors[DIT_PREFIX + name] = (tensor.double() + ALPHA / RANK * up.double() @ down.double()).float()
    save_file(tensors, whole / "model.safetensors")
    save_file(stored, run / "model.safetensors")
    config = json.loads((run / "config.json").read_text())
    config["action_head_cfg"]["config"] |= {"train_architecture": "lora", "lora_alpha": ALPHA}
    (run / "config.json").write_text(json.dumps(config))
    return {"whole": whole, "run": run, "base": base}


def test_a_run_and_its_base_are_the_merged_model(folders: dict[str, Path]) -> None:
    ours, expected = Checkpoint.open(folders["run"], [folders["base"]]), Checkpoint.open(folders["whole"])
    check_all_tensors(ours)
    assert dict(ours.shapes) == dict(expected.shapes)
    for name in expected.shapes:
        assert torch.allclose(ours.tensor(name).float(), expected.tensor(name).float(), atol=1e-6), name
    results = []
    for checkpoint in (ours, expected):
        engine = load_engine(checkpoint)
        results.append(engine.submit(engine.open_session(), make_inputs(engine, 0, 1)).result())
        engine.shutdown()
    assert torch.allclose(results[0].result.video_latents, results[1].result.video_latents, atol=1e-4)


def test_each_part_may_come_from_a_folder_of_its_own_and_the_first_one_wins(folders: dict[str, Path]) -> None:
    other = folders["base"].parent / "Wan2.2-TI2V-5B"
    other.mkdir()
    clip = next(folders["base"].glob("models_clip*"))
    clip.rename(other / clip.name)
    vae = torch.load(folders["base"] / "Wan2.1_VAE.pth", weights_only=True)
    torch.save({name: torch.zeros_like(tensor) for name, tensor in vae.items()}, other / "Wan2.1_VAE.pth")
    checkpoint = Checkpoint.open(folders["run"], [folders["base"], other])
    check_all_tensors(checkpoint)
    name = "action_head.vae.model.conv2.weight"
    assert torch.equal(checkpoint.tensor(name), Checkpoint.open(folders["whole"]).tensor(name))


def test_what_is_missing_is_said_once_with_what_to_do(folders: dict[str, Path]) -> None:
    with pytest.raises(
        CheckpointError, match=r"4 weights have adapters here and are not here themselves .* --base DIR"
    ):
        Checkpoint.open(folders["run"])
    with pytest.raises(CheckpointError, match=r"--base: .*nowhere does not exist; looked for diffusion_pytorch_model"):
        Checkpoint.open(folders["run"], [folders["base"] / "nowhere"])
    with pytest.raises(CheckpointError, match="is no base Wan folder"):
        Checkpoint.open(folders["run"], [folders["whole"]])
    next(folders["base"].glob("models_t5*")).unlink()
    with pytest.raises(CheckpointError, match=r"action_head\.text_encoder\."):
        Checkpoint.open(folders["run"], [folders["base"]])


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("a pickle was run",)


ODD_WEIGHTS: dict[str, object] = {
    "a list": [torch.zeros(2)],
    "names that are numbers": {5: torch.zeros(2)},
    "a sparse tensor": {"conv1.weight": torch.zeros(2, 2).to_sparse()},
    "no values": {"conv1.weight": torch.zeros(2, device="meta")},
    "no tensors": {"conv1.weight": "a text"},
    "a name that a terminal obeys": {"\x1b[2J": torch.zeros(2)},
    "a state dict that is none": {"state_dict": {"state_dict": 5}},
}


@pytest.mark.parametrize("content", ODD_WEIGHTS.values(), ids=list(ODD_WEIGHTS))
def test_a_pth_file_of_something_else_is_refused(folders: dict[str, Path], content: object) -> None:
    path = folders["base"] / "Wan2.1_VAE.pth"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"Wan2\.1_VAE\.pth (cannot be read as weights only|holds no tensors)"):
        Checkpoint.open(folders["run"], [folders["base"]])


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_base_that_is_cut_is_refused(folders: dict[str, Path], part: float) -> None:
    for name in ("Wan2.1_VAE.pth", "diffusion_pytorch_model-00001-of-00002.safetensors"):
        path = folders["base"] / name
        whole = path.read_bytes()
        path.write_bytes(whole[: int(part * len(whole))])
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            Checkpoint.open(folders["run"], [folders["base"]])
        path.write_bytes(whole)


@pytest.mark.parametrize("content", ["a pickle that runs code", "noise", "a list"])
def test_a_pth_file_that_is_no_weights_is_refused(
    folders: dict[str, Path], content: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folders["base"] / "Wan2.1_VAE.pth"
    if content == "noise":
        path.write_bytes(b"\x00\x01\x02" * 100)
    else:
        torch.save({"a": Exploit()} if "pickle" in content else [torch.zeros(2)], path)
    with pytest.raises(CheckpointError, match=r"Wan2\.1_VAE\.pth (cannot be read as weights only|holds no tensors)"):
        Checkpoint.open(folders["run"], [folders["base"]])
    assert "a pickle was run" not in capfd.readouterr().out
