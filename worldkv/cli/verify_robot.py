"""`worldkv verify` of a DreamZero folder: the recorded calls, and the transforms around the model."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.cli.common import choose_device
from worldkv.cli.preflight import check_attention
from worldkv.engine.config import EngineConfig
from worldkv.models.dreamzero.checkpoint import Checkpoint
from worldkv.models.dreamzero.verify import GoldenObserver, GoldenRecording, Tensors, relative_error
from worldkv.show.terminal import Step, progress

if TYPE_CHECKING:
    from worldkv.engine.engine import Engine
    from worldkv.models.dreamzero.model import State
    from worldkv.models.world_action import TickInputs, TickResult

_POLICY_TOLERANCE = 1e-6  # of state and actions; pixels must be equal


@dataclass(frozen=True)
class Verification:
    """See `worldkv.cli.verify`."""

    arguments: argparse.Namespace
    checkpoint: Checkpoint
    recording: GoldenRecording

    @classmethod
    def open(cls, arguments: argparse.Namespace, recording: Path) -> Verification:
        import torch

        golden = GoldenRecording.open(recording)
        checkpoint, device = Checkpoint.open(arguments.checkpoint, arguments.base), choose_device(arguments.device)
        for block_size in arguments.block_size:
            check_attention(arguments.attention, checkpoint, block_size, device, torch.float32)
        return cls(arguments, checkpoint, golden)

    def run(self, block_size: int) -> tuple[Tensors, Tensors, str]:
        observer = GoldenObserver(self.recording)
        engine = _load(self.checkpoint, self.arguments, block_size, self.recording, observer)
        engine.make_ready()  # what serves is verified: graphs, where there is a GPU
        try:
            with progress(f"running the recorded calls in blocks of {block_size}") as step:
                expected = _run_calls(engine, self.recording, observer, self.arguments.interleave, step)
        finally:
            engine.shutdown()
        return expected, observer.ours, engine.cache_card.attention

    def around_the_model(self) -> bool:
        return _verify_policy(self.arguments.checkpoint, self.checkpoint)


def _load(
    checkpoint: Checkpoint,
    arguments: argparse.Namespace,
    block_size: int,
    recording: GoldenRecording,
    observer: GoldenObserver,
) -> Engine[TickInputs, State, TickResult]:
    from worldkv.load import load_engine
    from worldkv.models.dreamzero.model import UNCONDITIONAL

    config = EngineConfig(block_size=block_size, attention=arguments.attention, max_sessions=1 + arguments.interleave)
    with progress("loading weights", is_bytes=True) as step:
        return load_engine(
            checkpoint,
            config,
            device=choose_device(arguments.device),
            observer=observer.observe,
            steps=recording.steps,
            window_policy=recording.calls["window_policy"],
            negative_prompt=recording.prompt(UNCONDITIONAL),
            progress=step,
        )


def _run_calls(
    engine: Engine[TickInputs, State, TickResult],
    recording: GoldenRecording,
    observer: GoldenObserver,
    num_others: int,
    step: Step,
) -> Tensors:
    """Run the calls, watched by `observer`; returns what it has to have seen."""
    import torch

    from worldkv.models.base import Encode
    from worldkv.models.dreamzero.model import DreamZero

    model = engine.model
    assert isinstance(model, DreamZero)
    session = engine.open_session()
    observer.watch(model, engine.inspect(lambda core: core.sessions[session].kv))
    others = [engine.open_session() for _ in range(num_others)]
    calls = recording.calls["calls"]
    for done, call in enumerate(calls, start=1):
        number = call["call"]
        observer.begin_call(number)
        disturbance = [recording.inputs_of_another(number, index) for index in range(num_others)]
        beside = [engine.submit(other, inputs) for other, inputs in zip(others, disturbance, strict=True)]
        result = engine.submit(session, recording.inputs(number)).result().result
        observer.end_call(result)
        for future in beside:
            future.result()
        for other, inputs in zip(others, disturbance, strict=True):  # one more of each, before the next call
            engine.submit(other, inputs).result()
        if f"call{number}.decoded_video" in recording.golden:
            video = engine.compute(Encode("decode", (result.video_latents[None],))).result()
            assert isinstance(video, torch.Tensor)
            observer.keep_decoded(video)
        step(done, len(calls))
    return recording.expected(model)


def _verify_policy(folder: Path, checkpoint: Checkpoint) -> bool:
    """The transforms around the model: every pixel equal, numbers to 1e-6. True where nothing was recorded."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from worldkv.models.checkpoints.header import read_header
    from worldkv.robots.of_checkpoint import checkpoint_embodiment
    from worldkv.robots.tiling import tile_views
    from worldkv.robots.transforms import absolute_actions, normalise_state, prepare_view

    path = folder / "policy.safetensors"
    if not path.is_file():
        return True
    read_header(path)  # raises, and says what is wrong with the file
    recorded = {name: tensor.numpy() for name, tensor in load_file(path).items()}
    embodiment = checkpoint_embodiment(checkpoint)
    views = [prepare_view(recorded[f"camera.{camera.name}"], embodiment) for camera in embodiment.cameras]
    tiled = tile_views(views, embodiment.layout)
    state = {quantity.key: recorded[f"state.{quantity.key}"] for quantity in embodiment.state}
    num_wrong = int((tiled != recorded["tiled_frames"]).sum())
    errors = {
        "policy.normalised_state": (normalise_state(state, embodiment), recorded["normalised_state"]),
        "policy.absolute_actions": (
            absolute_actions(recorded["normalised_actions"], state, embodiment),
            recorded["absolute_actions"],
        ),
    }
    print(f"{'policy.tiled_frames':<52} {num_wrong} pixels differ")
    ok = num_wrong == 0
    for name, (ours, expected) in errors.items():
        error = relative_error(torch.from_numpy(np.asarray(ours)), torch.from_numpy(expected))
        print(f"{name:<52} {error:.3e}")
        ok = ok and error <= _POLICY_TOLERANCE
    return ok
