"""What a session of causal video is given for a block, what it gives, and what it remembers; and what is refused."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F

from worldkv.device import moved
from worldkv.errors import BadRequest
from worldkv.models.causal_wan.config import CausalWanConfig
from worldkv.models.causal_wan.past import Passage, Past
from worldkv.models.causal_wan.past import Prompt as Prompt
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE
from worldkv.models.wan.encoders import VAEStream

PromptSwitch = Literal["recache", "keep", "blend"]
MAX_BLEND_BLOCKS = 1000
_MAX_PIXELS = 8192  # of a side; and pictures of a clip


@dataclass(frozen=True)
class BlockRequest:
    """One block. `switch`: what happens where the prompt is another one than before. History is computed anew under
    it, or kept as it is; or it is kept while the text goes over to the new prompt within `blend_blocks` blocks, this
    one included, see `Blend`. Noise that is not given is drawn from the session's seed and the block's place in the
    session."""

    token_ids: np.ndarray  # int64 [1, text_len]
    attention_mask: np.ndarray  # int64 [1, text_len]
    switch: PromptSwitch = "recache"
    blend_blocks: int = 4
    seed: int | None = None  # of the session from now on; None: as before, at first 0
    noise: torch.Tensor | None = None  # [1, C, F, h, w]
    epsilons: tuple[torch.Tensor, ...] | None = None  # of all steps but the last, each as `noise`
    given: torch.Tensor | None = None  # [1, C, frames, h, w]: latents that the session starts from
    clip: np.ndarray | None = None  # uint8 [T, H, W, 3]: pictures of any size that it starts from, instead


@dataclass(frozen=True)
class Block:
    """A finished block. `video` has the session's beginning in front, where it starts from given latents."""

    latents: torch.Tensor  # [C, F, h, w]
    video: torch.Tensor | None  # [3, T, H, W] in [-1, 1]; 4 frames a latent one, the session's first gives 1
    first_frame: int
    num_recached: int  # frames that were computed anew before it


@dataclass(frozen=True)
class Blend:
    """Text on its way from what it was, `old`, to a session's prompt: of `num_blocks` blocks, block i (from 0 on) has
    (1 - a) old + a new with a = (i + 1) / num_blocks. `num_begun` of them have come; the last one is the prompt itself,
    and there is no blend any more."""

    old: torch.Tensor  # [text_len, text_dim]: an embedding, or the mixture in force at the switch
    old_name: str  # of its conditioning entry
    num_blocks: int
    num_begun: int = 0

    def next(self) -> Blend | None:
        """With one block more begun; None where that one has the new prompt alone."""
        begun = replace(self, num_begun=self.num_begun + 1)
        return begun if begun.num_begun < begun.num_blocks else None

    def mixture(self, new: torch.Tensor) -> torch.Tensor:
        """Of the block that begins, in float32."""
        return mixture(self.old, new, self.share)

    @property
    def share(self) -> float:
        """Of the new prompt."""
        return self.num_begun / self.num_blocks

    def name(self, prompt_key: str) -> str:
        """Of the mixture's conditioning entry: everything that it is made of."""
        made_of = f"{self.old_name} {prompt_key} {self.num_begun} {self.num_blocks}"
        return f"text:blend:{hashlib.sha256(made_of.encode()).hexdigest()}"


@dataclass(frozen=True)
class State:
    """Beside its K/V. Values are replaced, never written to: keeping one is a snapshot."""

    prompt_key: str | None = None  # digest of the prompt in force
    prompt: Prompt | None = None
    blend: Blend | None = None  # None: the prompt alone
    seed: int = 0
    num_blocks: int = 0  # denoised so far; given latents are none
    recent: torch.Tensor | None = None  # [C, frames, h, w], clean, as many as the window holds
    decoder: VAEStream | None = None
    past: Past | None = None  # what its history was computed from; on the host
    num_skipped: int = 0  # frames that were never in this cache, behind the sink

    @property
    def num_bytes(self) -> int:
        """Of tensors."""
        recent = 0 if self.recent is None else self.recent.numel() * self.recent.element_size()
        blend = 0 if self.blend is None else self.blend.old.numel() * self.blend.old.element_size()
        return recent + blend + (0 if self.decoder is None else self.decoder.num_bytes)

    def to(self, device: torch.device | str) -> State:
        """The same on another device, bit for bit."""
        return replace(
            self,
            blend=None if self.blend is None else replace(self.blend, old=moved(self.blend.old, device)),
            recent=None if self.recent is None else moved(self.recent, device),
            decoder=None if self.decoder is None else self.decoder.to(device),
        )

    @property
    def passage(self) -> Passage:
        """Of one block under the text in force."""
        assert self.prompt is not None, "a block has a prompt"
        return Passage(self.prompt, 1, None if self.blend is None else self.blend.share)

    @property
    def text_name(self) -> str | None:
        """Of the conditioning entry in force."""
        if self.prompt_key is None:
            return None
        return f"text:{self.prompt_key}" if self.blend is None else self.blend.name(self.prompt_key)


def mixture(old: torch.Tensor, new: torch.Tensor, share: float) -> torch.Tensor:
    """Of two embeddings, in float32."""
    return (1 - share) * old.float() + share * new.float()


def prompt_key(prompt: Prompt) -> str:
    """A digest."""
    digest = hashlib.sha256()
    for array in prompt:
        digest.update(f"{array.shape}{array.dtype.str}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def check_request(config: CausalWanConfig, request: BlockRequest, num_frames: int, num_steps: int) -> None:
    """`num_frames`: of the session so far. Raises BadRequest that names the field."""
    text = (1, config.dit.text_len)
    for name in ("token_ids", "attention_mask"):
        value = getattr(request, name)
        if value.shape != text or value.dtype != np.int64:
            raise BadRequest(f"{name}: expected int64 of shape {text}, got {value.dtype} of {value.shape}")
    if request.switch not in get_args(PromptSwitch):
        raise BadRequest(f"switch: expected 'recache', 'keep' or 'blend', got {request.switch!r}")
    blocks = request.blend_blocks
    if type(blocks) is not int or not 1 <= blocks <= MAX_BLEND_BLOCKS:
        raise BadRequest(f"blend_blocks: expected 1 to {MAX_BLEND_BLOCKS}, got {blocks!r}")
    if request.seed is not None and not 0 <= request.seed < 2**63:
        raise BadRequest(f"seed: expected 0 to 2^63 - 1, got {request.seed}")
    per_block = config.blocks.frames_per_block
    shape = (1, config.dit.out_dim, per_block, *config.latent_size)
    tensors = [("noise", request.noise)]
    if request.epsilons is not None:
        if len(request.epsilons) != num_steps - 1:
            raise BadRequest(f"epsilons: expected {num_steps - 1}, one less than steps, got {len(request.epsilons)}")
        tensors += [(f"epsilons[{index}]", epsilon) for index, epsilon in enumerate(request.epsilons)]
    for name, tensor in tensors:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise BadRequest(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    for name, what in (("given", "latents"), ("clip", "pictures")):
        if getattr(request, name) is not None and num_frames:
            raise BadRequest(f"{name}: a session starts from {what} before its first frame, and {num_frames} are there")
    if request.given is not None:
        _check_given(request.given, shape)
    if request.clip is not None:
        if request.given is not None:
            raise BadRequest("clip: a session starts from a clip or from given latents, and both came")
        _check_clip(request.clip, per_block)


def num_given_frames(request: BlockRequest) -> int:
    """Latent frames that the session starts from."""
    if request.clip is not None:
        return 1 + (len(request.clip) - 1) // VAE_TEMPORAL_STRIDE
    return 0 if request.given is None else request.given.shape[2]


def _check_clip(clip: np.ndarray, per_block: int) -> None:
    if clip.ndim != 4 or clip.shape[3] != 3 or clip.dtype != np.uint8 or 0 in clip.shape:
        raise BadRequest(
            f"clip: expected uint8 of shape [pictures, height, width, 3], got {clip.dtype} of {clip.shape}"
        )
    if max(clip.shape) > _MAX_PIXELS:
        raise BadRequest(f"clip: expected up to {_MAX_PIXELS} pictures, rows and columns, got shape {clip.shape}")
    stride = VAE_TEMPORAL_STRIDE
    more, least = stride * per_block, 1 + stride * (per_block - 1)
    if len(clip) >= least and (len(clip) - least) % more == 0:
        return
    why = f"a block has {per_block} latent frames, a session's first is 1 picture, each other {stride}"
    if len(clip) == 1:
        why += "; a single picture starts models of one frame a block, which this one is not"
    raise BadRequest(f"clip: expected {least} pictures, or {more} more any number of times, got {len(clip)}: {why}")


def pixels_of(clip: np.ndarray, height: int, width: int) -> torch.Tensor:
    """[1, 3, T, height, width] in [-1, 1]: resized as the reference does it, bilinear with all pixels counted, the
    proportions not kept."""
    pictures = torch.from_numpy(clip).permute(0, 3, 1, 2)
    if pictures.shape[2:] != (height, width):
        pictures = F.interpolate(pictures, (height, width), mode="bilinear", antialias=True, align_corners=False)
    return (pictures.float() / 127.5 - 1).transpose(0, 1)[None]


def _check_given(given: torch.Tensor, block: tuple[int, ...]) -> None:
    if given.dim() != 5 or (*given.shape[:2], *given.shape[3:]) != (*block[:2], *block[3:]):
        raise BadRequest(f"given: expected shape {block} with any whole blocks of frames, got {tuple(given.shape)}")
    if given.shape[2] == 0 or given.shape[2] % block[2]:
        raise BadRequest(f"given: expected whole blocks of {block[2]} frames, got {given.shape[2]} frames")
