"""The sizes of a causal Wan DiT, checked once, and what its VAE does to time. Knows no family and no file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.words import shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_SIZE = 2**20  # of any size in a description; products of a few still fit 64 bits
VAE_TEMPORAL_STRIDE = 4  # RGB frames per latent frame after the first, which stands alone

_LEAST = {"image_tokens": 0, "seed": 0, "max_chunk_size": -1, "num_states": 0}


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """Sizes of the DiT. `image_dim` is in no config.json: it is read off the checkpoint's tensors.

    Raises CheckpointError for sizes that cannot be, named as fields of `origin`.
    """

    origin: ClassVar[str] = "config.json: "  # where these fields are said
    model_types: ClassVar[tuple[str, ...]] = ("t2v", "i2v", "ti2v")

    model_type: str  # "t2v", "i2v" (Wan 2.1 VAE) or "ti2v" (Wan 2.2 VAE)
    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    in_dim: int
    out_dim: int  # channels of a video latent
    concat_first_frame_latent: bool = False
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    image_dim: int = 1280
    image_tokens: int = 0  # of one image's features; 0: cross-attention reads text only
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        expect_ranges(self, self.origin)
        self._expect_one_of("model_type", self.model_type, self.model_types)
        self._expect_one_of("out_dim (channels of a video latent)", self.out_dim, (16, 48))
        # even: rotary embedding turns pairs of elements
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise CheckpointError(
                f"{self.origin}dim ({self.dim}) must be num_heads ({self.num_heads}) times an even head size"
            )
        if self.freq_dim % 2:
            raise CheckpointError(f"{self.origin}freq_dim must be even, got {self.freq_dim}")
        condition = self.out_dim + VAE_TEMPORAL_STRIDE if self.concat_first_frame_latent else 0
        if self.in_dim != self.out_dim + condition:
            raise CheckpointError(
                f"{self.origin}in_dim must be {self.out_dim + condition} for out_dim {self.out_dim} "
                f"and concat_first_frame_latent {self.concat_first_frame_latent}, got {self.in_dim}"
            )

    def _expect_one_of(self, field: str, value: object, allowed: tuple[object, ...]) -> None:
        if value not in allowed:
            raise CheckpointError(
                f"{self.origin}{field} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def tokens_of_image(self, height: int, width: int) -> int:
        """Tokens of one latent frame of images of this size in pixels."""
        _, patch_height, patch_width = self.patch_size
        return (height // self.pixel_stride // patch_height) * (width // self.pixel_stride // patch_width)

    @property
    def pixel_stride(self) -> int:
        """Pixels per latent row or column: 8 for the Wan 2.1 VAE, 16 for the Wan 2.2 VAE."""
        return 8 if self.out_dim == 16 else 16


def expect_ranges(config: DataclassInstance, origin: str) -> None:
    """Raises CheckpointError for a number that no model has. Where 0 or -1 mean something, they pass."""
    for field in fields(config):
        value, least = getattr(config, field.name), _LEAST.get(field.name, 1)
        if field.type in ("int", "int | None") and value is not None and not least <= value <= MAX_SIZE:
            raise CheckpointError(f"{origin}{field.name} must lie in {least} to {MAX_SIZE}, got {shown(value)}")
        if field.type == "float" and not 0 <= value <= MAX_SIZE:
            raise CheckpointError(f"{origin}{field.name} must be a number from 0 to {MAX_SIZE}, got {shown(value)}")
