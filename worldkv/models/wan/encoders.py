"""The frozen encoders around the DiT: Wan's VAE, the UMT5 text encoder, the CLIP image tower.

The networks are diffusers' and transformers'; these classes adapt their inputs and outputs to a Wan model. They hold
weights only: the state of a video stream is an object that its caller keeps, so any number of sessions can share
one encoder from any number of threads. They know nothing of windows, prompts' wording or camera tiling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from worldkv.device import moved, upload
from worldkv.errors import BadRequest
from worldkv.models.checkpoints.modules import Progress, TensorReader, load_module
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE
from worldkv.models.wan.fused_vae import fuse_vae
from worldkv.models.wan.layout import decoder_state_size
from worldkv.models.wan.libraries import Built, build_image_encoder, build_text_encoder, build_vae
from worldkv.models.wan.names import LATENT_MEAN, LATENT_STD, Prefixes
from worldkv.models.wan.sizes import IMAGE_PIXELS, EncoderSizes, VAESizes

if TYPE_CHECKING:
    from worldkv.models.wan.tiny_decoder import TinyDecoder

_SETTLED = 3  # latent frames after which a stream's tensors keep their shapes
_FRAMES_AT_ONCE, _LATENTS_AT_ONCE = 8, 3  # on a GPU: fewer launches, and fewer passes over what a piece ends with
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass
class VAEStream:
    """How far one video has been encoded or decoded: the tail of every causal convolution's input.

    A stream belongs to one direction and one video. Its tensors are replaced, never written to, so `copy` is a snapshot
    that costs no tensor memory.
    """

    num_latent_frames: int = 0
    tails: list[torch.Tensor | str | None] = field(default_factory=list, repr=False)  # a text: diffusers' marker "Rep"

    def copy(self) -> VAEStream:
        return VAEStream(self.num_latent_frames, list(self.tails))

    @property
    def num_bytes(self) -> int:
        return sum(tail.numel() * tail.element_size() for tail in self.tails if isinstance(tail, torch.Tensor))

    @property
    def kinds(self) -> list[object]:
        """What its tensors are, but for their numbers."""
        return [(tail.dtype, tail.shape) if isinstance(tail, torch.Tensor) else tail for tail in self.tails]

    def to(self, device: torch.device | str) -> VAEStream:
        """The same on another device, bit for bit."""
        tails = [moved(tail, device) if isinstance(tail, torch.Tensor) else tail for tail in self.tails]
        return VAEStream(self.num_latent_frames, tails)


class WanVAE:
    """Videos of shape [B, 3, T, H, W] in [-1, 1] to normalised latents [B, C, 1 + (T - 1) / 4, H / s, W / s]
    and back; s is `pixel_stride`, 8 (Wan 2.1) or 16 (Wan 2.2)."""

    label = "the model's own"

    def __init__(self, module: nn.Module, sizes: VAESizes) -> None:
        self.module: Any = module  # its parts are called one by one, which nn.Module's types do not allow
        self.sizes = sizes
        self.pixel_stride = sizes.pixel_stride
        self.frames_at_once = VAE_TEMPORAL_STRIDE  # of a video that is encoded; any multiple of it gives the same
        self.latents_at_once = 1  # of a video that is decoded; any number gives the same, up to rounding
        weight = module.get_parameter("quant_conv.weight")
        self._mean = torch.tensor(LATENT_MEAN[sizes.z_dim], device=weight.device).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(LATENT_STD[sizes.z_dim], device=weight.device).view(1, -1, 1, 1, 1)

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """The whole video, T one more than a multiple of 4. Latents are the posterior's mean, normalised."""
        return self.encode_stream(self.new_encode_state(), video)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised latents [B, C, F, h, w] to video [B, 3, 1 + 4 (F - 1), H, W], clamped to [-1, 1]."""
        return self.decode_stream(self.new_decode_state(), latents)

    def accelerate(self) -> None:
        """Run faster on a GPU, by other roundings."""
        if self._mean.device.type == "cuda":
            fuse_vae(self.module)
            self.frames_at_once, self.latents_at_once = _FRAMES_AT_ONCE, _LATENTS_AT_ONCE

    def new_encode_state(self) -> VAEStream:
        return VAEStream(tails=[None] * _num_convolutions(self.module.get_submodule("encoder")))

    def new_decode_state(self) -> VAEStream:
        return VAEStream(tails=[None] * _num_convolutions(self.module.get_submodule("decoder")))

    def state_size(self, height: int, width: int) -> int:
        """See `StreamDecoder`."""
        return decoder_state_size(self.sizes, height, width)

    def check_decode_state(self, state: VAEStream, latent_size: tuple[int, int]) -> None:
        """Raises BadRequest unless it is of one video that was decoded here. Computes shapes only."""
        if state.num_latent_frames < 1:
            raise BadRequest("import: state.decoder: expected one that has begun")
        expected = self._decoded_shapes(min(state.num_latent_frames, _SETTLED), latent_size)
        if state.kinds != expected.kinds:
            raise BadRequest("import: state.decoder: expected the tensors of this model's decoder, got others")

    def _decoded_shapes(self, num_frames: int, latent_size: tuple[int, int]) -> VAEStream:
        with torch.device("meta"):
            module, _ = build_vae(self.sizes, "")
            nn.Module.to(module, self.module.get_parameter("quant_conv.weight").dtype)  # diffusers' own one warns
            shadow = WanVAE(module, self.sizes)
            stream = shadow.new_decode_state()
            shadow.decode_stream(stream, torch.empty(1, self.sizes.z_dim, num_frames, *latent_size))
        return stream

    @torch.no_grad()
    def encode_stream(self, state: VAEStream, video: torch.Tensor) -> torch.Tensor:
        """Encodes the next frames of a video: 1 + 4 n at its start, 4 n later; advances `state`.

        The pieces' latents joined in time equal those of the joined video. Raises ValueError for another
        number of frames or a size that is no multiple of `pixel_stride`; on any error `state` is as it was.
        """
        first = state.num_latent_frames == 0
        self._check_video(video, first)
        weight = self.module.get_parameter("quant_conv.weight")
        x = _fold_pixels(video.to(weight.device, weight.dtype), self.sizes.pixel_patch)
        tails, latents = list(state.tails), []
        # the first frame stands alone, then 4 frames make one latent frame
        parts = torch.split(x[:, :, 1 if first else 0 :], self.frames_at_once, dim=2) if x.shape[2] > first else ()
        for group in (*([x[:, :, :1]] if first else []), *parts):
            moments = self.module.encoder(group, feat_cache=tails, feat_idx=[0])
            latents.append(self.module.quant_conv(moments)[:, : self.sizes.z_dim])
        mu = torch.cat(latents, dim=2)
        state.tails, state.num_latent_frames = tails, state.num_latent_frames + mu.shape[2]
        return ((mu.float() - self._mean) / self._std).to(weight.dtype)

    @torch.no_grad()
    def decode_stream(self, state: VAEStream, latents: torch.Tensor) -> torch.Tensor:
        """Decodes the next latent frames of a video: the very first gives 1 frame, each other 4; advances `state`.

        The pieces joined equal the decoded whole. Raises ValueError for other channels; an error leaves `state` alone.
        """
        if latents.dim() != 5 or latents.shape[1] != self.sizes.z_dim or latents.shape[2] == 0:
            raise ValueError(f"latents must be [B, {self.sizes.z_dim}, F, h, w], got {list(latents.shape)}")
        weight = self.module.get_parameter("quant_conv.weight")
        z = (latents.to(weight.device).float() * self._std + self._mean).to(weight.dtype)
        first = state.num_latent_frames == 0
        tails, frames = list(state.tails), []
        # the first latent frame stands alone
        parts = torch.split(z[:, :, 1 if first else 0 :], self.latents_at_once, dim=2) if z.shape[2] > first else ()
        for index, part in enumerate((*([z[:, :, :1]] if first else []), *parts)):
            x = self.module.post_quant_conv(part)
            frames.append(self.module.decoder(x, feat_cache=tails, feat_idx=[0], first_chunk=first and index == 0))
        video = _unfold_pixels(torch.cat(frames, dim=2), self.sizes.pixel_patch).clamp(-1.0, 1.0)
        state.tails, state.num_latent_frames = tails, state.num_latent_frames + z.shape[2]
        return video

    def _check_video(self, video: torch.Tensor, first: bool) -> None:
        stride = self.pixel_stride
        if video.dim() != 5 or video.shape[1] != 3 or video.shape[3] % stride or video.shape[4] % stride:
            raise ValueError(
                f"video must be [B, 3, T, H, W] with H and W multiples of {stride}, got {list(video.shape)}"
            )
        if video.shape[2] % VAE_TEMPORAL_STRIDE != first or video.shape[2] == 0:
            wanted = "one more than a multiple of 4" if first else "a positive multiple of 4"
            raise ValueError(f"the number of frames must be {wanted}, got {video.shape[2]}")


class TextEncoder:
    """Token ids [B, L] to embeddings [B, L, text_dim]."""

    def __init__(self, module: nn.Module, vocab_size: int) -> None:
        self.module = module
        self.vocab_size = vocab_size

    @torch.no_grad()
    def encode(self, token_ids: np.ndarray | torch.Tensor, attention_mask: np.ndarray | torch.Tensor) -> torch.Tensor:
        """token_ids, attention_mask: integers [B, L]. Positions whose mask is 0 are zero in the result, row
        by row. Raises ValueError for unequal shapes or an id outside the vocabulary."""
        ids, mask = torch.as_tensor(token_ids), torch.as_tensor(attention_mask)
        if ids.dim() != 2 or ids.shape != mask.shape:
            raise ValueError(f"token_ids {list(ids.shape)} and attention_mask {list(mask.shape)} must both be [B, L]")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(f"token_ids must lie in [0, {self.vocab_size}), got {int(ids.min())} to {int(ids.max())}")
        device = self.module.get_parameter("shared.weight").device
        ids, mask = upload(ids, device), upload(mask, device)
        hidden: torch.Tensor = self.module(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden.masked_fill(mask[..., None] == 0, 0.0)


class ImageEncoder:
    """Images [B, 3, H, W] in [-1, 1] to features [B, 257, width]: a class token, then 16 x 16 patches."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        device = next(module.parameters()).device
        self._mean, self._std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (_CLIP_MEAN, _CLIP_STD))

    @torch.no_grad()
    def encode(self, image: torch.Tensor) -> torch.Tensor:
        """Features of the last but one layer, no final norm, of the whole image squashed to 224 x 224. Raises
        ValueError for another shape."""
        if image.dim() != 4 or image.shape[1] != 3:
            raise ValueError(f"image must be [B, 3, H, W], got {list(image.shape)}")
        weight = next(self.module.parameters())
        pixels = image.to(weight.device, torch.float32)
        pixels = F.interpolate(pixels, size=(IMAGE_PIXELS, IMAGE_PIXELS), mode="bicubic", align_corners=False)
        pixels = ((pixels * 0.5 + 0.5) - self._mean) / self._std
        features: torch.Tensor = self.module(pixel_values=pixels.to(weight.dtype)).last_hidden_state
        return features


class StreamDecoder(Protocol):
    """What makes pixels of a video's latents, piece by piece: see `WanVAE`."""

    label: str
    latents_at_once: int

    def new_decode_state(self) -> VAEStream: ...

    def decode_stream(self, state: VAEStream, latents: torch.Tensor) -> torch.Tensor: ...

    def check_decode_state(self, state: VAEStream, latent_size: tuple[int, int]) -> None: ...

    def state_size(self, height: int, width: int) -> int:
        """Numbers that a stream holds at most. `height`, `width`: of a latent frame."""
        ...


@dataclass(frozen=True)
class WanEncoders:
    vae: WanVAE
    text: TextEncoder
    image: ImageEncoder | None = None  # None: the model reads no image
    tiny: TinyDecoder | None = None  # decodes in place of the VAE

    @property
    def decoder(self) -> StreamDecoder:
        return self.tiny or self.vae


def load_encoders(
    checkpoint: TensorReader,
    sizes: EncoderSizes,
    prefixes: Prefixes,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> WanEncoders:
    """Builds the encoders of these sizes and fills them; see `load_module` for dtype and progress (which restarts for
    each encoder). Raises CheckpointError, also where diffusers or transformers is missing."""

    def load(built: Built) -> nn.Module:
        module, names = built
        place_position_ids(module, device)
        load_module(checkpoint, module, names, device=device, dtype=dtype, progress=progress)
        return module

    vae = WanVAE(load(build_vae(sizes.vae, prefixes.vae)), sizes.vae)
    text = TextEncoder(load(build_text_encoder(sizes.text, prefixes.text)), sizes.text.vocab_size)
    if sizes.image is None:
        return WanEncoders(vae, text)
    assert prefixes.image is not None, "an image encoder has a place in the checkpoint"
    return WanEncoders(vae, text, ImageEncoder(load(build_image_encoder(sizes.image, prefixes.image))))


def place_position_ids(module: nn.Module, device: torch.device | str) -> None:
    """Buffers that a checkpoint does not hold stay behind on the meta device; the image tower's are 0, 1, 2, ..."""
    for name, buffer in list(module.named_buffers()):
        path, _, leaf = name.rpartition(".")
        if leaf == "position_ids":
            module.get_submodule(path)._buffers[leaf] = torch.arange(buffer.shape[-1], device=device)[None]


def _num_convolutions(part: nn.Module) -> int:
    """An upper bound of how many tails the part's causal convolutions keep."""
    return sum(isinstance(module, nn.Conv3d) for module in part.modules())


def _fold_pixels(video: torch.Tensor, patch: int) -> torch.Tensor:
    """[B, 3, T, H, W] -> [B, 3 patch^2, T, H / patch, W / patch]; a channel's pixels ordered by column, then row."""
    if patch == 1:
        return video
    B, C, T, H, W = video.shape
    x = video.reshape(B, C, T, H // patch, patch, W // patch, patch).permute(0, 1, 6, 4, 2, 3, 5)
    return x.reshape(B, C * patch * patch, T, H // patch, W // patch)


def _unfold_pixels(x: torch.Tensor, patch: int) -> torch.Tensor:
    """The inverse of `_fold_pixels`."""
    if patch == 1:
        return x
    B, C, T, H, W = x.shape
    video = x.reshape(B, C // (patch * patch), patch, patch, T, H, W).permute(0, 1, 4, 5, 3, 6, 2)
    return video.reshape(B, C // (patch * patch), T, H * patch, W * patch)
