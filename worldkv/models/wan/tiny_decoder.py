"""A tiny decoder of Wan 2.1's latents: a tenth of the time and a thirtieth of the memory, and other pixels.

TAEHV of Ollin Boer Bohan (github.com/madebyollin/taehv, MIT), whose released file for these latents is taew2_1. Every
convolution sees one frame; a few see the frame before as well, which is all that a stream remembers.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from worldkv.errors import BadRequest, CheckpointError
from worldkv.models.checkpoints.tensors import read_all
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE
from worldkv.models.wan.encoders import VAEStream

_LATENTS, _WIDTHS, _FRAMES = 16, (256, 128, 64, 64), (1, 2, 2)  # frames that each level makes of one
_BLOCKS = 3  # of a level
_PREFIX = "decoder."
LABEL = "tiny (TAEHV): other pixels than the model's own decoder"


class TinyDecoder:
    """Normalised latents [1, 16, F, h, w] to video [1, 3, T, 8 h, 8 w] in [-1, 1], as `WanVAE.decode_stream` does."""

    latents_at_once: int | None = None  # any number

    def __init__(self, layers: nn.Sequential) -> None:
        self._layers = layers
        for each in layers.modules():
            if isinstance(each, nn.Conv2d):  # as a GPU's convolutions are fast in
                each.weight.data = each.weight.data.contiguous(memory_format=torch.channels_last)

    @classmethod
    def load(cls, path: Path, device: torch.device | str, dtype: torch.dtype) -> TinyDecoder:
        """Of a .pth or .safetensors file. Raises CheckpointError for one of other tensors."""
        stored = {name.removeprefix(_PREFIX): t for name, t in read_all(path).items() if name.startswith(_PREFIX)}
        with torch.device("meta"):
            layers = tiny_layers()
        wanted = {name: tuple(tensor.shape) for name, tensor in layers.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        if found != wanted:
            wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            first = f"{_PREFIX}{wrong[0]}: expected {wanted.get(wrong[0])}, got {found.get(wrong[0])}"
            raise CheckpointError(
                f"{path} is no tiny decoder of Wan 2.1's latents (taew2_1): {len(wrong)} tensors differ; {first}"
            )
        layers.load_state_dict(stored, assign=True)
        return cls(layers.to(device, dtype))

    def new_decode_state(self) -> VAEStream:
        return VAEStream(_tails=[None] * sum(isinstance(layer, _SeesBefore) for layer in self._layers))

    def state_size(self, height: int, width: int) -> int:
        """Numbers that a stream holds. `height`, `width`: of a latent frame."""
        return sum(_BLOCKS * channels * (height << n) * (width << n) for n, channels in enumerate(_WIDTHS[:-1]))

    def check_decode_state(self, state: VAEStream, latent_size: tuple[int, int]) -> None:
        """Raises BadRequest unless it is of one video that was decoded here."""
        if state.num_latent_frames < 1:
            raise BadRequest("import: state.decoder: expected one that has begun")
        height, width = latent_size
        dtype = next(self._layers.parameters()).dtype
        expected = [
            (dtype, torch.Size((1, channels, height << level, width << level)))
            for level, channels in enumerate(_WIDTHS[:-1])
            for _ in range(_BLOCKS)
        ]
        if state.kinds != expected:
            raise BadRequest("import: state.decoder: expected the tensors of the tiny decoder, got others")

    @torch.no_grad()
    def decode_stream(self, state: VAEStream, latents: torch.Tensor) -> torch.Tensor:
        """The next latent frames of a video: the very first gives 1 frame, each other 4; advances `state`."""
        if latents.dim() != 5 or latents.shape[:2] != (1, _LATENTS) or latents.shape[2] == 0:
            raise ValueError(f"latents must be [1, {_LATENTS}, F, h, w], got {list(latents.shape)}")
        weight = next(self._layers.parameters())
        x = latents[0].transpose(0, 1).to(weight.device, weight.dtype).contiguous(memory_format=torch.channels_last)
        tails = iter(state._tails)
        newest: list[torch.Tensor | str | None] = []
        for layer in self._layers:
            if isinstance(layer, _SeesBefore):
                before = next(tails)
                newest.append(x[-1:].clone())
                x = layer(x, before if isinstance(before, torch.Tensor) else torch.zeros_like(x[:1]))
            else:
                x = layer(x)
        begins = state.num_latent_frames == 0
        state._tails, state.num_latent_frames = newest, state.num_latent_frames + latents.shape[2]
        x = x[VAE_TEMPORAL_STRIDE - 1 if begins else 0 :]  # nothing is before a video's first frame
        return (2 * x.clamp(0.0, 1.0) - 1).transpose(0, 1)[None]


def tiny_layers() -> nn.Sequential:
    """Without weights that mean anything; numbered as the released file numbers them."""
    layers: list[nn.Module] = [_Bounded(), _conv(_LATENTS, _WIDTHS[0]), nn.ReLU(inplace=True)]
    for channels, wider, num_frames in zip(_WIDTHS[:-1], _WIDTHS[1:], _FRAMES, strict=True):
        layers += [_SeesBefore(channels) for _ in range(_BLOCKS)]
        layers += [nn.Upsample(scale_factor=2), _MakesFrames(channels, num_frames), _conv(channels, wider, bias=False)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True), _conv(_WIDTHS[-1], 3))


def _conv(channels: int, out: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, padding=1, bias=bias)


class _Bounded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * torch.tanh(x / 3)


class _SeesBefore(nn.Module):
    """A residual of each frame [T, C, H, W] and of the frame before it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            *(_conv(2 * channels, channels), nn.ReLU(inplace=True)),
            *(_conv(channels, channels), nn.ReLU(inplace=True)),
            _conv(channels, channels),
        )

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """`before`: the input's frame before the first one, [1, C, H, W]."""
        past = torch.cat([before, x[:-1]])
        return F.relu(self.conv(torch.cat([x, past], dim=1)) + x)


class _MakesFrames(nn.Module):
    """`count` frames of each."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        self._count = count
        self.conv = nn.Conv2d(channels, count * channels, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.conv(x)
        if self._count == 1:
            return made
        return torch.stack(made.chunk(self._count, dim=1), dim=1).flatten(0, 1)
