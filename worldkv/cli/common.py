"""What the commands share: exit codes, one-line errors, progress bars, opening a policy. Imports no torch itself."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    import torch

    from worldkv.robots.policy import Policy

OK, FAILED, BAD_INPUT = 0, 1, 2
EXIT_CODES = (
    "exit codes: 0 done, 1 a check or the run failed, 2 something given is wrong (one line says what), 130 stopped"
)

Step = Callable[[int, int], None]


@contextlib.contextmanager
def progress(label: str, *, is_bytes: bool = False) -> Iterator[Step]:
    """A progress bar on standard error, driven by step(done, total); one plain line without rich or a terminal."""
    if not (sys.stderr.isatty() and has_rich()):
        print(f"{label} ...", file=sys.stderr, flush=True)
        yield lambda done, total: None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    counts: rich_progress.ProgressColumn = (
        rich_progress.DownloadColumn() if is_bytes else rich_progress.MofNCompleteColumn()
    )
    columns = (
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        counts,
        rich_progress.TimeElapsedColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total or None)


@contextlib.contextmanager
def spinner(label: str) -> Iterator[None]:
    """Something that moves on standard error while nobody can say how long it takes."""
    if not (sys.stderr.isatty() and has_rich()):
        print(f"{label} ...", file=sys.stderr, flush=True)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(label):
        yield


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Show warnings as one line on standard error, each text once."""
    told: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in told:
            told.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises ValueError for a device that is not there."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu, cuda, cuda:N or auto, got {name!r}")
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ValueError(
            f"--device {name}: torch sees {num_gpus} GPUs here; use --device cpu, or a CUDA build of torch on a GPU"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU, as the model was trained, and float32 on a CPU."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_policy_for(arguments: argparse.Namespace, *, max_sessions: int | None) -> Policy:
    """The policy that the options of `main.add_engine_options` describe, with a progress bar. The caller closes it and
    shuts its engine down. Raises CheckpointError with everything that is wrong with the folder."""
    with spinner("starting up"):  # torch and the model libraries take seconds to import
        from worldkv.engine.engine import EngineConfig
        from worldkv.load import load_policy
        from worldkv.models.dreamzero.checkpoint import Checkpoint

        config = EngineConfig(
            block_size=arguments.block_size,
            attention=arguments.attention,
            max_sessions=max_sessions,
            batch_invariant=arguments.batch_invariant,
        )
        checkpoint = Checkpoint.open(arguments.checkpoint, arguments.base)
        device = choose_device(arguments.device)
    with plain_warnings(), progress("loading weights", is_bytes=True) as step:
        return load_policy(
            checkpoint,
            config,
            embodiment=arguments.embodiment,
            device=device,
            dtype=choose_dtype(arguments.dtype, device),
            steps=int(arguments.steps) if arguments.steps.isdigit() else arguments.steps,
            cfg_scale=arguments.cfg_scale,
            precision=arguments.precision,
            progress=step,
        )


def describe_model(policy: Policy, checkpoint_folder: Path) -> list[str]:
    """What was loaded, in lines for people."""
    engine, robot = policy.engine, policy.embodiment
    config, storage = engine.model.config, engine.cache.storage
    dit, camera = config.dit, robot.cameras[0]
    return [
        f"model      {checkpoint_folder.name}: {dit.model_type}, {dit.num_layers} layers, width {dit.dim}, "
        f"{engine.model.steps} of {config.num_inference_steps} solver steps",
        f"robot      {robot.tag}: {len(robot.cameras)} cameras of {camera.width} x {camera.height}, "
        f"{robot.action_horizon} actions of {robot.action_dim} numbers at {robot.fps:g} Hz",
        f"running    on {storage.device} in {str(storage.dtype).removeprefix('torch.')}, "
        f"attention by {engine.cache.backend.name}",
        f"cache      {engine.capacity().explain()}",
    ]


def is_random(checkpoint_folder: Path) -> bool:
    """Whether nobody trained these weights: `worldkv.models.dreamzero.random` wrote them, and says so."""
    from worldkv.models.dreamzero.folder import describe

    return describe(checkpoint_folder, []).random_weights


def size_text(num_bytes: float) -> str:
    """A size for people."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
