"""How a window of DreamZero begins: its text, its first frame, and the condition that the frame leaves.

Holds weights and constants, and the prompts that were encoded last; nothing of a session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from worldkv.kv.spec import KVSpec
from worldkv.kv.state import KVState
from worldkv.kv.transfer import joined_key
from worldkv.models.base import Encode, Request
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.dit import DreamZeroDiT
from worldkv.models.dreamzero.encoding import Encoding
from worldkv.models.dreamzero.spec import CONDITIONAL, GUIDED, UNCONDITIONAL
from worldkv.models.dreamzero.state import Past
from worldkv.models.wan.network import Network
from worldkv.models.wan.tokenizer import Tokens

_MAX_EMBEDDINGS = 64  # prompts whose text is not encoded again; 4 MB each at the true sizes
_MASK_CHANNELS = 4  # mark the first frame on the channels of the first-frame condition


class Beginning:
    """`negative_prompt` is the tokenised negative prompt of all sessions."""

    def __init__(
        self,
        config: DreamZeroConfig,
        spec: KVSpec,
        dit: DreamZeroDiT,
        network: Network,
        encoding: Encoding,
        negative_prompt: Tokens,
    ) -> None:
        self._config, self._spec, self._dit, self._network, self._encoding = config, spec, dit, network, encoding
        self._negative_prompt = negative_prompt
        self._embeddings: dict[str, torch.Tensor] = {}  # of the prompts encoded last, by digest

    def set_text(self, kv: KVState, past: Past) -> Generator[Request, Any, None]:
        """Attach the text to each branch; a stored one is neither encoded nor projected again."""
        prompt, store = (past.token_ids, past.attention_mask), kv.cache.conditioning
        prompts = {
            CONDITIONAL: (prompt,),
            UNCONDITIONAL: (self._negative_prompt,),
            GUIDED: (prompt, self._negative_prompt),
        }
        for branch in self._spec.branches:
            keys = [f"text:{digest(*each)}" for each in prompts[branch]]
            key = joined_key(keys)
            attached = kv.branches[branch].conditioning.get("text")
            if attached is not None and attached.key == key:
                continue
            for each, name in zip(prompts[branch], keys, strict=True):
                if key not in store and name not in self._embeddings:
                    embedding = yield Encode("text", tuple(torch.from_numpy(part) for part in each))
                    self._embeddings[name] = embedding
                    if len(self._embeddings) > _MAX_EMBEDDINGS:
                        self._embeddings.pop(next(iter(self._embeddings)))
            # acquired and attached without a yield between: a generator closed at the yield would leak the reference
            entry = store.acquire(key)
            if entry is None:
                layers = self._network.project("text", tuple(self._embeddings[name][0] for name in keys))
                entry = store.publish(key, self._spec.conditioning["text"], layers)
            kv.set_conditioning(branch, "text", entry)

    def set_image(self, kv: KVState, past: Past) -> Generator[Request, Any, torch.Tensor]:
        """Attach the image of the window's first frame. Returns the frame's pixels [1, 3, 1, H, W]."""
        if past.image is None:
            assert past.imagined is not None, "a window begins with one of them"
            latents = past.imagined.to(self._dit.device, self._dit.dtype)
            video = yield Encode("decode", (latents[None],))
            pixels, key = video[:, :, -1:].to(self._dit.dtype), f"imagined:{digest(past.imagined.float().numpy())}"
        else:
            pixels, key = self._encoding.pixels(past.image), f"image:{digest(past.image)}"
        store = kv.cache.conditioning
        feature = None if key in store else (yield Encode("image", (pixels[:, :, 0],)))
        entry = store.acquire(key)
        if entry is None:
            assert feature is not None
            layers = self._network.project("image", (feature[0],))
            entry = store.publish(key, self._spec.conditioning["image"], layers)
        for branch in self._spec.branches:
            kv.set_conditioning(branch, "image", store.share(entry))
        store.release(entry)
        first: torch.Tensor = pixels
        return first

    def first_frame(self, pixels: torch.Tensor) -> Generator[Request, Any, tuple[torch.Tensor | None, torch.Tensor]]:
        """(The condition that it leaves, where the model has one; its latents [C, 1, h, w])."""
        latents = yield Encode("video", (self._encoding.window_start(pixels),))
        if not self._config.dit.concat_first_frame_latent:
            return None, latents[0]
        mask = latents.new_zeros(1, _MASK_CHANNELS, *latents.shape[2:])
        mask[:, :, 0] = 1
        condition = torch.cat([mask, latents], dim=1)
        return condition[0], latents[0, :, :1]  # causal: the first latent frame is the first frame's own


def first_image(frames: np.ndarray) -> np.ndarray:
    """Of the frames of a tick, uint8 [T, H, W, 3], that with which a window starts. A request of 4 or 9 frames ends
    now, so its last frame is the newest; otherwise the reference takes the first."""
    return frames[-1:] if frames.shape[0] in (4, 9) else frames[:1]


def digest(*arrays: np.ndarray) -> str:
    """Of shapes, types and bytes."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.shape}{array.dtype.str}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
