"""The videos' app: words in, block after block of pictures out. Knows no wire, no cache and no container format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast, get_args

import numpy as np

from worldkv.app import App, Reply, Session
from worldkv.models.causal_wan.inputs import PromptSwitch
from worldkv.videos.program import FRAMES_PER_SECOND, VideoBlock, VideoMaker
from worldkv.videos.request import MAX_PROMPT_CHARACTERS, VideoRequest, read_request
from worldkv.words import count

if TYPE_CHECKING:
    from worldkv.engine.engine import TickReply

__all__ = ["VideoApp", "VideoReply", "VideoSession"]


@dataclass(frozen=True, kw_only=True)
class VideoReply(Reply):
    """What one block answers. `timings`: queue, preprocess, encode, recache, denoise, commit, decode, postprocess, and
    total."""

    block: VideoBlock

    @property
    def output(self) -> Mapping[str, object]:
        return {"frames": self.block.frames}

    @property
    def shown(self) -> Mapping[str, object]:
        return {"prompt": self.block.prompt, "block": self.block.number, "first_frame": self.block.first_frame}

    @property
    def seen(self) -> Mapping[str, np.ndarray] | None:
        return None  # nothing was observed: the model sees its own past

    @property
    def events(self) -> tuple[str, ...]:
        return (f"prompt: {self.block.prompt}",) if self.block.is_new_prompt else ()


class VideoApp(App[VideoRequest, VideoBlock, VideoReply]):
    """Serves one causal video model. Thread-safe; whoever made the engine shuts it down.

    Its sessions take a VideoRequest: see there.
    """

    speaks: ClassVar[str] = "videos"
    frames_per_second: ClassVar[int] = FRAMES_PER_SECOND

    @cached_property
    def maker(self) -> VideoMaker:
        return cast("VideoMaker", self.engine.model)

    @property
    def name(self) -> str:
        return "causal video"

    @property
    def greeting(self) -> dict[str, object]:
        return {"type": "hello", **self.describe()}

    @property
    def frames_per_block(self) -> int:
        """Pictures that a block lasts a viewer; a session's first has 3 fewer."""
        return 4 * self.maker.model.config.blocks.frames_per_block

    @property
    def begins_with_an_image(self) -> bool:
        """Whether a single picture is a beginning: of models with one latent frame a block."""
        return self.maker.model.config.blocks.frames_per_block == 1

    @property
    def frames_of_first_block(self) -> int:
        return self.frames_per_block - 3

    @property
    def window_frames(self) -> int:
        """Latent frames that a block sees at most, its own included."""
        return self.maker.model.config.blocks.held_frames

    @property
    def most_frames(self) -> int | None:
        """Pictures that a session can have, where nothing leaves its window; None: it has no end."""
        if self.maker.model.config.blocks.window_frames != -1:
            return None
        num_blocks = self.window_frames // self.maker.model.config.blocks.frames_per_block
        return self.frames_of_first_block + (num_blocks - 1) * self.frames_per_block

    @property
    def period_s(self) -> float:
        return self.frames_per_block / FRAMES_PER_SECOND

    def describe(self) -> dict[str, object]:
        config = self.maker.model.config
        return {
            "width": config.width,
            "height": config.height,
            "frames_per_second": FRAMES_PER_SECOND,
            "frames_per_block": self.frames_per_block,
            "switches": list(get_args(PromptSwitch)),
            "begins_with_an_image": self.begins_with_an_image,
            "max_prompt_characters": MAX_PROMPT_CHARACTERS,
            "random_weights": self.random_weights,
            "decoder": self.maker.model.encoders.decoder.label,
        }

    @property
    def summary(self) -> dict[str, str]:
        config = self.maker.model.config
        frames = count(self.frames_per_block, "frame")
        text = f"{config.width} x {config.height} at {FRAMES_PER_SECOND} frames a second, blocks of {frames}"
        return {"video": text, "decoder": self.maker.model.encoders.decoder.label}

    def read(self, fields: Mapping[str, Any]) -> VideoRequest:
        return read_request(fields)

    def imagined(self, noise_seed: int | None) -> VideoRequest:
        return VideoRequest(seed=noise_seed)

    def reply(self, ticked: TickReply[VideoBlock]) -> VideoReply:
        block, info = ticked.result, ticked.info
        facts: dict[str, str | int | float | None] = {
            "block": block.number,
            "first_frame": block.first_frame,
            "frames_recached": block.model.num_recached,
            "decoder": self.maker.model.encoders.decoder.label,
            "blocks_used": info.blocks_used,
            "blocks_free": info.blocks_free,
        }
        return VideoReply(
            timings=info.timings, warnings=(), facts=facts, decode_video=lambda: block.frames, block=block
        )


VideoSession: TypeAlias = Session[VideoRequest, VideoBlock, VideoReply]
