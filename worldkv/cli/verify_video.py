"""`worldkv verify` of a causal Wan folder: the recorded blocks of video."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from worldkv.cli.common import choose_device
from worldkv.cli.errors import UsageError
from worldkv.cli.video import video_choices
from worldkv.engine.config import EngineConfig
from worldkv.engine.engine import Engine
from worldkv.load import start_engine
from worldkv.models.base import Encode
from worldkv.models.causal_wan.checkpoint import Checkpoint, load
from worldkv.models.causal_wan.inputs import Block, BlockRequest, State
from worldkv.models.causal_wan.model import CausalWan
from worldkv.models.causal_wan.verify import GoldenObserver, GoldenRecording, Tensors
from worldkv.show.terminal import Step, progress

VideoEngine = Engine[BlockRequest, State, Block]


@dataclass(frozen=True)
class Verification:
    """See `worldkv.cli.verify`."""

    arguments: argparse.Namespace
    checkpoint: Checkpoint
    recording: GoldenRecording

    @classmethod
    def open(cls, arguments: argparse.Namespace, recording: Path) -> Verification:
        if arguments.tiny_decoder is not None:
            raise UsageError("--tiny-decoder: gives other pixels than a recording; leave it out")
        golden, choices = GoldenRecording.open(recording), video_choices(arguments)
        height, width = golden.pixel_size
        choices = replace(choices, height=choices.height or height, width=choices.width or width)
        return cls(arguments, Checkpoint.open(arguments.checkpoint, choices), golden)

    def run(self, block_size: int) -> tuple[Tensors, Tensors, str]:
        arguments, observer, device = self.arguments, GoldenObserver(self.recording), self._device
        config = EngineConfig(
            block_size=block_size, attention=arguments.attention, max_sessions=1 + arguments.interleave
        )
        with progress("loading weights", is_bytes=True) as step:
            model = load(self.checkpoint, device=device, progress=step)
        engine = start_engine(model, config, device, torch.float32, observer=observer.observe)
        engine.make_ready()
        try:
            with progress(f"running the recorded blocks in blocks of {block_size}") as step:
                expected = _run_blocks(engine, model, self.recording, observer, arguments.interleave, step)
        finally:
            engine.shutdown()
        return expected, observer.ours, engine.cache_card.attention

    def around_the_model(self) -> bool:
        return True

    @property
    def _device(self) -> torch.device:
        return choose_device(self.arguments.device)


def _run_blocks(
    engine: VideoEngine,
    model: CausalWan,
    recording: GoldenRecording,
    observer: GoldenObserver,
    num_others: int,
    step: Step,
) -> Tensors:
    """Run the blocks, watched by `observer`; returns what it has to have seen."""
    session = engine.open_session()
    observer.watch(model, engine.inspect(lambda core: core.sessions[session].kv))
    if recording.start_image is not None:
        latents = engine.compute(Encode("video", (recording.start_image,))).result()
        assert isinstance(latents, torch.Tensor)
        observer.keep_start(latents)
    others = [engine.open_session() for _ in range(num_others)]
    for number in range(len(recording.blocks)):
        observer.begin_block(number)
        disturbance = [recording.request_of_another(number, index) for index in range(num_others)]
        beside = [engine.submit(other, request) for other, request in zip(others, disturbance, strict=True)]
        block = engine.submit(session, recording.request(number)).result().result
        observer.end_block(block)
        for future in beside:
            future.result()
        for other, request in zip(others, disturbance, strict=True):  # one more of each, before the next block
            engine.submit(other, request).result()
        step(number + 1, len(recording.blocks))
    return recording.expected()
