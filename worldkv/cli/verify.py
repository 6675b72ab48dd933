"""`worldkv verify`: the paged engine against recorded outputs of the reference implementation, quantity by quantity."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.attention.names import check_name
from worldkv.cli.common import add_attention, add_checkpoint, add_device, choose_device
from worldkv.cli.errors import FAILED, OK, UsageError
from worldkv.cli.numbers import power_of_two, real, whole
from worldkv.cli.preflight import check_attention, check_folder
from worldkv.engine.config import EngineConfig
from worldkv.show.terminal import Step, progress, spinner
from worldkv.words import count

if TYPE_CHECKING:
    from worldkv.engine.engine import Engine
    from worldkv.models.dreamzero.checkpoint import Checkpoint
    from worldkv.models.dreamzero.model import State
    from worldkv.models.dreamzero.verify import GoldenObserver, GoldenRecording, Tensors
    from worldkv.models.world_action import TickInputs, TickResult

GOLDEN_FILE = "golden.safetensors"
_POLICY_TOLERANCE = 1e-6  # of state and actions; pixels must be equal

MORE = (
    "Runs the calls of golden.safetensors and calls.json in float32 and prints, per recorded quantity,\n"
    "||ours - recorded|| / ||recorded||; the last line is the largest. A recorded quantity that is not computed\n"
    "counts as infinitely wrong. Also checks policy.safetensors, where there is one: pixels must be equal,\n"
    "numbers to 1e-6."
)
EXAMPLE = "worldkv verify golden/tiny_i2v --tolerance 1e-4 --block-size 16 64 128 --interleave 2"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "worldkv verify DIR [options]"  # DIR first: after --block-size it would be taken for a size
    add_checkpoint(parser, what="checkpoint with golden.safetensors and calls.json")
    parser.add_argument(
        "--tolerance", type=real(above=0), default=1e-3, metavar="X", help="largest relative error allowed (1e-3)"
    )
    add_attention(parser)
    parser.add_argument(
        "--block-size",
        type=power_of_two,
        nargs="+",
        default=[EngineConfig.block_size],
        metavar="N",
        help=f"KV slots per block, powers of two: the calls run once with each ({EngineConfig.block_size})",
    )
    add_device(parser, "cpu")
    parser.add_argument(
        "--interleave",
        type=whole(0),
        default=0,
        metavar="N",
        help="run N other sessions' ticks beside the calls and between them (0)",
    )


def run(arguments: argparse.Namespace) -> int:
    check_name(arguments.attention)
    check_folder(arguments.checkpoint)
    if not (arguments.checkpoint / GOLDEN_FILE).is_file():
        raise UsageError(
            f"{arguments.checkpoint} has no {GOLDEN_FILE}: verify needs a checkpoint folder with outputs recorded from "
            "the reference; to look at any other checkpoint use `worldkv inspect`"
        )
    with spinner("starting up"):
        import torch

        from worldkv.models.dreamzero.checkpoint import Checkpoint
        from worldkv.models.dreamzero.verify import GoldenObserver, GoldenRecording

        recording = GoldenRecording.open(arguments.checkpoint)
        checkpoint = Checkpoint.open(arguments.checkpoint)
        device = choose_device(arguments.device)
        for block_size in arguments.block_size:
            check_attention(arguments.attention, checkpoint, block_size, device, torch.float32)
    worst = 0.0
    for block_size in arguments.block_size:
        observer = GoldenObserver(recording)
        engine = _load(checkpoint, arguments, block_size, recording, observer)
        engine.make_ready()  # what serves is verified: graphs, where there is a GPU
        try:
            with progress(f"running the recorded calls in blocks of {block_size}") as step:
                expected = _run_calls(engine, recording, observer, arguments.interleave, step)
        finally:
            engine.shutdown()
        print(
            f"blocks of {block_size}, attention by {engine.cache_card.attention}, "
            f"{count(arguments.interleave, 'other session')}"
        )
        worst = max(worst, _report(expected, observer.ours))
    policy_ok = _verify_policy(arguments.checkpoint, checkpoint)
    print(f"max_relative_error {worst:.3e}")
    return OK if worst <= arguments.tolerance and policy_ok else FAILED


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


def _report(expected: Tensors, ours: Tensors) -> float:
    """Print a line per recorded quantity; the largest relative error, infinite where a quantity is missing."""
    from worldkv.models.dreamzero.verify import relative_error

    worst = 0.0
    for name in sorted(expected):
        wanted, got = expected[name].float(), ours.get(name)
        if got is None or got.shape != wanted.shape:
            error, note = math.inf, "not computed" if got is None else f"{list(got.shape)}, not {list(wanted.shape)}"
        else:
            error, note = relative_error(got, wanted), ""
        print(f"{name:<52} {error:.3e} {note}".rstrip())
        worst = max(worst, error)
    return worst


def _verify_policy(folder: Path, checkpoint: Checkpoint) -> bool:
    """The transforms around the model: every pixel equal, numbers to 1e-6. True where nothing was recorded."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from worldkv.models.checkpoints.header import read_header
    from worldkv.models.dreamzero.verify import relative_error
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
