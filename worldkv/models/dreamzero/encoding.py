"""DreamZero's encoders by name: payloads in batches, in CUDA graphs where their shapes are few; and what is made of
frames before they are encoded. Holds weights only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from worldkv.device import upload
from worldkv.models.base import batches_of_alike
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.graphs import GraphedCall
from worldkv.models.wan.encoders import WanEncoders

# the largest batch in elements, of an encoder's input and of a decoder's latents: bounds activation memory
_MAX_ELEMENTS, _MAX_LATENTS = 1 << 24, 1 << 18


class Encoding:
    """`device` and `dtype`: the DiT's own, which pixels are rounded to."""

    def __init__(
        self, config: DreamZeroConfig, encoders: WanEncoders, device: torch.device, dtype: torch.dtype
    ) -> None:
        assert encoders.image is not None, "DreamZero reads an image"
        self._config, self._device, self._dtype = config, device, dtype
        self._text = encoders.text
        self.graphed = {
            "image": GraphedCall(encoders.image.encode),
            "video": GraphedCall(encoders.vae.encode),
            "decode": GraphedCall(encoders.vae.decode),
        }

    @torch.no_grad()
    def encode(self, encoder: str, payloads: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        """Run one encoder; payloads of equal shapes are batched, large ones less. Outputs carry a batch axis of 1.

        A payload is a tuple of tensors with a batch axis of 1: "text" (token ids, attention mask; on the host), "image"
        pixels [1, 3, H, W], "video" pixels [1, 3, T, H, W], "decode" latents [1, C, F, h, w].
        """
        outputs: dict[int, torch.Tensor] = {}
        encode: Callable[..., torch.Tensor] = self.graphed.get(encoder, self._text.encode)
        for indices in batches_of_alike(payloads, _most_elements(encoder)):
            batch = [torch.cat(parts) for parts in zip(*(payloads[index] for index in indices), strict=True)]
            for index, output in zip(indices, torch.split(encode(*batch), 1), strict=True):
                outputs[index] = output
        return [outputs[index] for index in range(len(payloads))]

    def largest_batch(self, encoder: str, payload: torch.Tensor) -> int:
        """How many payloads like this one an encoder takes at once."""
        return max(1, _most_elements(encoder) // payload.numel())

    def pixels(self, frames: np.ndarray) -> torch.Tensor:
        """uint8 [T, H, W, 3] to [1, 3, T, H, W] in [-1, 1], rounded as the reference does, resized for the 5B."""
        video = upload(frames, self._device)
        pixels = ((video.permute(3, 0, 1, 2).float() / 255).to(self._dtype) - 0.5) / 0.5
        height, width = self._config.target_video_height, self._config.target_video_width
        if height is not None and width is not None and pixels.shape[-2:] != (height, width):
            resized = F.interpolate(pixels.transpose(0, 1), (height, width), mode="bilinear", align_corners=False)
            pixels = resized.transpose(0, 1)
        return pixels[None]

    def window_start(self, pixels: torch.Tensor) -> torch.Tensor:
        """The video that is encoded where a window starts: the first frame, grey behind it where the model wants that.

        `pixels`: [1, 3, 1, H, W].
        """
        if not self._config.dit.concat_first_frame_latent:
            return pixels
        return F.pad(pixels, (0, 0, 0, 0, 0, self._config.num_frames - 1))


def _most_elements(encoder: str) -> int:
    return _MAX_LATENTS if encoder == "decode" else _MAX_ELEMENTS
