"""Sizes of a dots model, as its config.json says them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.files import CONFIG_FILE, read_json
from worldkv.models.checkpoints.words import shown

MODEL_TYPE = "dots"
_MAX_SIZE = 2**12  # a toy's


@dataclass(frozen=True)
class DotsConfig:
    """`frame_tokens` tokens of `dim` numbers are a frame; `window` frames are seen; `steps` of the solver."""

    frame_tokens: int = 4
    dim: int = 32
    num_heads: int = 2
    num_layers: int = 2
    window: int = 8
    steps: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 1 <= value <= _MAX_SIZE:
                raise CheckpointError(
                    f"{CONFIG_FILE}: {field.name}: expected a number from 1 to {_MAX_SIZE}, got {shown(value)}"
                )
        if self.dim % self.num_heads:
            raise CheckpointError(f"{CONFIG_FILE}: dim: expected a multiple of num_heads, got {self.dim}")

    @classmethod
    def read(cls, folder: Path) -> DotsConfig:
        """Raises CheckpointError that names the field."""
        said = read_json(folder / CONFIG_FILE)
        known = {field.name for field in fields(cls)}
        unknown = sorted(said.keys() - known - {"model_type"})
        if unknown:
            raise CheckpointError(
                f"{CONFIG_FILE}: {unknown[0]}: not a field of a dots model; known are {sorted(known)}"
            )
        return cls(**{name: said[name] for name in said if name in known})
