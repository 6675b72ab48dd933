"""What a viewer asks of a block, and what is refused before any session is touched for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from worldkv.errors import BadRequest
from worldkv.models.causal_wan.inputs import MAX_BLEND_BLOCKS, PromptSwitch
from worldkv.videos.pictures import read_image

MAX_PROMPT_CHARACTERS = 20_000  # many times what the text encoder reads
FIELDS = ("prompt", "switch", "blend_blocks", "seed", "image")


@dataclass(frozen=True)
class VideoRequest:
    """One block. `prompt` None: the one in force. `switch`: what becomes of history where it is another one, see
    `BlockRequest`. `seed` None: as before. `clip`: pictures uint8 [T, H, W, 3] that the session begins with."""

    prompt: str | None = None
    switch: PromptSwitch = "recache"
    blend_blocks: int = 4
    seed: int | None = None
    clip: np.ndarray | None = None


def read_request(fields: Mapping[str, Any]) -> VideoRequest:
    """Of a client's fields. Raises BadRequest that names the field."""
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise BadRequest(f"{str(unknown[0])[:80]!r} is not known; a block is asked for with {', '.join(FIELDS)}")
    given = {name: value for name, value in fields.items() if name != "image"}
    request = VideoRequest(**given, clip=None if fields.get("image") is None else read_image(fields["image"]))
    check_prompt(request.prompt)
    if request.switch not in get_args(PromptSwitch):
        words = ", ".join(map(repr, get_args(PromptSwitch)))
        raise BadRequest(f"switch: expected one of {words}, got {str(request.switch)[:80]!r}")
    if type(request.blend_blocks) is not int or not 1 <= request.blend_blocks <= MAX_BLEND_BLOCKS:
        said = str(request.blend_blocks)[:80]
        raise BadRequest(f"blend_blocks: expected a whole number from 1 to {MAX_BLEND_BLOCKS}, got {said}")
    if request.seed is not None and (type(request.seed) is not int or not 0 <= request.seed < 2**63):
        raise BadRequest(f"seed: expected a whole number from 0 to 2^63 - 1, got {str(request.seed)[:80]}")
    return request


def check_prompt(prompt: object) -> None:
    """None is one: that in force. Raises BadRequest."""
    if prompt is None:
        return
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadRequest(f"prompt: expected words, got {str(prompt)[:80]!r}")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise BadRequest(f"prompt: expected at most {MAX_PROMPT_CHARACTERS} characters, got {len(prompt)}")


def frames_of(video: np.ndarray) -> np.ndarray:
    """Pixels uint8 [T, 3, H, W] as pictures [T, H, W, 3]."""
    return np.ascontiguousarray(video.transpose(0, 2, 3, 1))
