"""Base Wan folders, as they are published, for what a checkpoint leaves out of its base model.

A folder of Wan2.1-I2V-14B-480P or Wan2.2-TI2V-5B holds the DiT as safetensors and the encoders as .pth files, which are
read with weights_only (nothing in them is run) and mapped, not loaded. Of several folders the first that has a part
brings it: the 5B takes its image encoder from a Wan2.1 folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.dtypes import of_torch
from worldkv.models.checkpoints.header import read_header
from worldkv.models.checkpoints.source import Place, Stored
from worldkv.models.wan.names import Prefixes


@dataclass(frozen=True)
class _Part:
    pattern: str
    kind: str  # field of Prefixes
    strip: str = ""  # of the file's names; what does not begin with it is left out


_PARTS = (
    _Part("diffusion_pytorch_model*.safetensors", "dit"),
    _Part("models_t5_*.pth", "text"),
    _Part("models_clip_*.pth", "image", strip="visual."),
    _Part("Wan*_VAE.pth", "vae"),
)
PATTERNS = tuple(part.pattern for part in _PARTS)


def looks_like_base(folder: Path) -> bool:
    """Whether it holds encoders as they are published with Wan."""
    return any(next(folder.glob(part.pattern), None) for part in _PARTS if part.kind in ("text", "vae"))


def read_base(folders: Iterable[Path], prefixes: Prefixes) -> dict[str, Stored]:
    """Checkpoint's name -> what the folders have of it. Raises CheckpointError for a folder without any part."""
    found: dict[str, Stored] = {}
    for folder in folders:
        files = {part: sorted(folder.glob(part.pattern)) for part in _PARTS}
        if not any(files.values()):
            state = "is no base Wan folder" if folder.is_dir() else "does not exist"
            raise CheckpointError(f"--base: {folder} {state}; looked for {', '.join(PATTERNS)}")
        for part, paths in files.items():
            prefix = getattr(prefixes, part.kind)
            if prefix is None or any(name.startswith(prefix) for name in found):
                continue  # not of this family, or an earlier folder has brought it
            for path in paths:
                found |= _read_part(part, prefix, path)
    return found


def _read_part(part: _Part, prefix: str, path: Path) -> dict[str, Stored]:
    if path.suffix == ".safetensors":
        entries = {name: (shape, dtype) for name, (dtype, shape) in read_header(path).items()}
    else:
        from worldkv.models.checkpoints.tensors import PthFile  # torch, which alone reads such a file

        tensors = PthFile(path).tensors
        entries = {name: (tuple(tensor.shape), of_torch(tensor.dtype)) for name, tensor in tensors.items()}
    return {
        prefix + name.removeprefix(part.strip): Stored(Place(path, name), *entry)
        for name, entry in entries.items()
        if name.startswith(part.strip)
    }
