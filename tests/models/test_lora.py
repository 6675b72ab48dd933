"""A LoRA run's checkpoint loads as the sum that it means."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import make_inputs, random_checkpoint  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from worldkv.errors import CheckpointError  # noqa: E402
from worldkv.load import load_engine  # noqa: E402
from worldkv.models.dreamzero.checkpoint import Checkpoint  # noqa: E402
from worldkv.models.dreamzero.folder import DIT_PREFIX  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RANK, ALPHA = 4, 6
ADAPTED = ("self_attn.q", "self_attn.v", "cross_attn.o", "ffn.0", "ffn.2")
Change = Callable[[dict[str, "torch.Tensor"]], None]


def write_lora(folder: Path, change: Change = lambda _: None, alpha: object = ALPHA) -> tuple[Path, Path]:
    """(a LoRA run's folder, the same with its adapters merged)."""
    run, merged = (Path(shutil.copytree(random_checkpoint("ti2v"), folder / name)) for name in ("run", "merged"))
    plain = load_file(merged / "model.safetensors")
    wrapped = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in list(plain.items()):
        inner = name.removeprefix(DIT_PREFIX)
        if inner == name:
            wrapped[name] = tensor
            continue
        layer, _, leaf = inner.rpartition(".")
        prefix = f"{DIT_PREFIX}base_model.model."
        if not layer.endswith(ADAPTED):
            wrapped[prefix + inner] = tensor
            continue
        wrapped[f"{prefix}{layer}.base_layer.{leaf}"] = tensor
        if leaf == "weight":
            down = torch.randn(RANK, tensor.shape[1], generator=generator) * 0.05
            up = torch.randn(tensor.shape[0], RANK, generator=generator) * 0.05
            wrapped[f"{prefix}{layer}.lora_A.default.weight"] = down
            wrapped[f"{prefix}{layer}.lora_B.default.weight"] = up
            plain[name] = (tensor.double() + ALPHA / RANK * up.double() @ down.double()).float()
    change(wrapped)
    save_file(wrapped, run / "model.safetensors")
    save_file(plain, merged / "model.safetensors")
    config = json.loads((run / "config.json").read_text())
    config["action_head_cfg"]["config"] |= {"train_architecture": "lora", "lora_rank": RANK, "lora_alpha": alpha}
    (run / "config.json").write_text(json.dumps(config))
    return run, merged


def test_every_tensor_is_the_merged_sum_and_a_tick_comes_out_the_same(tmp_path: Path) -> None:
    run, merged = write_lora(tmp_path)
    ours, expected = Checkpoint.open(run), Checkpoint.open(merged)
    assert dict(ours.shapes) == dict(expected.shapes)
    changed = 0
    for name in expected.shapes:
        assert torch.allclose(ours.tensor(name).float(), expected.tensor(name).float(), atol=1e-6), name
        changed += not torch.equal(expected.tensor(name), Checkpoint.open(random_checkpoint("ti2v")).tensor(name))
    assert changed == 2 * len(ADAPTED), "both blocks' adapted layers"
    results = []
    for folder in (run, merged):
        engine = load_engine(folder)
        results.append(engine.submit(engine.open_session(), make_inputs(engine, 0, 1)).result())
        engine.shutdown()
    assert torch.allclose(results[0].result.video_latents, results[1].result.video_latents, atol=1e-4)


def drop(ending: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[next(name for name in tensors if name.endswith(ending))]

    return change


def add(name: str, *shape: int) -> Change:
    key = f"{DIT_PREFIX}base_model.model.blocks.0.self_attn.q.{name}"
    return lambda tensors: tensors.__setitem__(key, torch.zeros(shape))


BAD = {
    "no B": (drop("self_attn.q.lora_B.default.weight"), ALPHA, "lora_B is missing beside"),
    "no A": (drop("self_attn.q.lora_A.default.weight"), ALPHA, "lora_A is missing beside"),
    "no base": (
        drop("self_attn.q.base_layer.weight"),
        ALPHA,
        "1 weights have adapters here and are not here themselves",
    ),
    "two adapters": (add("lora_A.other.weight", 4, 64), ALPHA, "expected one adapter, got ['default', 'other']"),
    "another kind": (add("lora_magnitude_vector.default.weight", 64), ALPHA, "this kind of adapter is not known"),
    "another rank": (add("lora_A.default.weight", 3, 64), ALPHA, "does not fit its adapter, B [64, 4] times A [3, 64]"),
    "no alpha": (lambda _: None, None, "lora_alpha must say how adapters are scaled, got None"),
    "zero alpha": (lambda _: None, 0, "lora_alpha must say how adapters are scaled, got 0"),
}


@pytest.mark.parametrize(("change", "alpha", "reason"), BAD.values(), ids=BAD)
def test_what_cannot_be_merged_is_named(tmp_path: Path, change: Change, alpha: object, reason: str) -> None:
    run, _ = write_lora(tmp_path, change, alpha)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(run)
    assert reason in str(caught.value)
