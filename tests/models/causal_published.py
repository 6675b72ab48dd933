"""A tiny causal Wan model in the forms in which such models are published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from causal import random_folder
from safetensors.torch import load_file, save_file
from test_tokenizer import write_word_tokenizer

from worldkv.models.wan.names import DIT_RULES, module_name

RANK = 4
Tensors = dict[str, torch.Tensor]


def plain_tensors() -> Tensors:
    return load_file(random_folder() / "model.safetensors")


def dit_of(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}


def write_base(folder: Path) -> Path:
    """As Wan2.1-T2V-1.3B lies: sizes, encoders as .pth files, and a DiT that is not the distilled one."""
    tensors = plain_tensors()
    folder.mkdir()
    config = json.loads((random_folder() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    parts = {"models_t5_umt5-xxl-enc-bf16.pth": "text_encoder.", "Wan2.1_VAE.pth": "vae."}
    for file, prefix in parts.items():
        torch.save({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, folder / file)
    other = {name: torch.zeros_like(tensor) for name, tensor in dit_of(tensors).items()}
    save_file(other, folder / "diffusion_pytorch_model.safetensors")
    (folder / "google" / "umt5-xxl").mkdir(parents=True)
    write_word_tokenizer(folder / "google" / "umt5-xxl")
    return folder


def write_lora(path: Path, dit: Tensors, rename: Callable[[str], str] = str, group: bool = True) -> Tensors:
    """On every linear layer of the blocks. Returns the DiT with it merged, in float32."""
    generator, factors, merged = torch.Generator().manual_seed(1), {}, dict(dit)
    for name, tensor in dit.items():
        if not name.startswith("blocks.") or tensor.dim() != 2 or not name.endswith(".weight"):
            continue
        down = (torch.randn(RANK, tensor.shape[1], generator=generator) * 0.05).to(torch.bfloat16)
        up = (torch.randn(tensor.shape[0], RANK, generator=generator) * 0.05).to(torch.bfloat16)
        layer = rename(name).removesuffix(".weight")
        factors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
        merged[name] = torch.addmm(tensor.float(), up.float(), down.float())
    if path.suffix == ".safetensors":
        save_file(factors, path)
    else:
        torch.save({"generator_lora": factors, "step": 3000} if group else factors, path)
    return merged


def peft(name: str) -> str:
    return f"base_model.model.{name}"


def in_diffusers(name: str) -> str:
    renamed = module_name(name, DIT_RULES)
    assert renamed is not None, name
    return renamed


def wrapped(name: str) -> str:
    """As FSDP with activation checkpointing leaves it."""
    if name.startswith("blocks."):
        _, number, inner = name.split(".", 2)
        name = f"blocks.{number}._fsdp_wrapped_module._checkpoint_wrapped_module.{inner}"
    return f"model._fsdp_wrapped_module.{name}"


def write_distilled(folder: Path, form: str) -> Path:
    """A folder that holds the distilled weights in one of the forms, and nothing else of the model."""
    dit = dit_of(plain_tensors())
    others = {name: torch.full_like(tensor, 0.5) for name, tensor in dit.items()}
    folder.mkdir()
    whole: dict[str, Any] = {
        "averaged": {"generator": others, "generator_ema": dit, "step": 600},
        "as trained": {"generator": {f"model.{name}": t for name, t in dit.items()}, "critic": {"w": torch.zeros(2)}},
        "model": {"model": dit},
        "flat": dit,
        "wrapped": {"generator_ema": {wrapped(name): t for name, t in dit.items()}},
        "compiled": {"generator": {f"model._orig_mod.{name}": t for name, t in dit.items()}},
    }.get(form, {})
    if whole:
        torch.save(whole, folder / "self_forcing_dmd.pt")
    elif form == "before 1.6":
        torch.save({"generator": dit}, folder / "old.pt", _use_new_zipfile_serialization=False)
    elif form == "safetensors":
        save_file({f"model.diffusion_model.{n}": t for n, t in dit.items()}, folder / "causal_wan_bf16.safetensors")
    else:
        assert form == "diffusers"
        save_file({in_diffusers(n): t for n, t in dit.items()}, folder / "diffusion_pytorch_model.safetensors")
    return folder


FORMS = ("averaged", "as trained", "model", "flat", "wrapped", "compiled", "before 1.6", "safetensors", "diffusers")


def copy_base_into(folder: Path, base: Path) -> None:
    """The distilled file lies in the base's own folder then."""
    for path in base.iterdir():
        if not path.is_dir():
            shutil.copy(path, folder)
