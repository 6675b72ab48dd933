"""What can be known before weights are loaded: packages, names, files, a port, and whether memory will do.

The cheap checks come first: a mistyped option is told before torch is imported, a taken port before a folder is read.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.attention.names import check_name
from worldkv.cli.errors import UsageError
from worldkv.cli.video import kind_of
from worldkv.engine.room import DoesNotFit, gib, usable_on_gpu
from worldkv.words import count

if TYPE_CHECKING:
    import socket

    import torch

    from worldkv.models.dreamzero.checkpoint import Checkpoint
    from worldkv.server.config import ServerConfig
    from worldkv.server.tracing import TickTracer


def require_packages(extra: str, *names: str, option: str = "") -> None:
    """Raises UsageError with what to install, `option` says what for: before work whose result would be lost. Imports
    none of them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        needed = f"{option}: needs {', '.join(missing)}, which" if option else ", ".join(missing)
        raise UsageError(f"{needed} cannot be found: pip install 'worldkv[{extra}]'")


def check_engine_options(arguments: argparse.Namespace) -> None:
    """Of `add_engine_options`, without torch. Raises ValueError, or CheckpointError for a folder that is not there."""
    check_name(arguments.attention)
    check_folder(arguments.checkpoint)
    check_robot_and_base(arguments)


def check_robot_and_base(arguments: argparse.Namespace) -> None:
    """Of `add_robot_and_base`: folders and files that are named are there. Raises ValueError."""
    for base in arguments.base:
        if not base.is_dir():
            raise UsageError(f"--base: expected a folder of a base Wan model, {base} {_state(base)}")
    name = getattr(arguments, "embodiment", None)
    if name is not None and (Path(name).suffix in (".yaml", ".yml") or Path(name).exists()):
        from worldkv.robots.embodiment_file import load_embodiment_file

        load_embodiment_file(name)


def check_folder(folder: Path) -> None:
    """Raises CheckpointError unless it is a folder."""
    if not folder.is_dir():
        from worldkv.errors import CheckpointError

        raise CheckpointError(f"checkpoint folder {folder} {_state(folder)}; expected a folder with config.json")


def _state(path: Path) -> str:
    return "is a file" if path.is_file() else "does not exist"


def check_before_loading(
    arguments: argparse.Namespace, config: ServerConfig, ends: ExitStack
) -> tuple[list[socket.socket], TickTracer | None]:
    """The port, listening from now on, and the tracer, both closed by `ends`. Raises ValueError and OSError."""
    from worldkv.server.certificate import check_certificate
    from worldkv.server.listening import take_port

    check_name(arguments.attention)
    tracer = None
    if arguments.otlp is not None:
        from worldkv.server.tracing import TickTracer

        tracer = TickTracer.to_collector(arguments.otlp)
    check_certificate(config)
    listening = take_port(config.host, config.port, only_loopback=config.api_key is None)
    for each in listening:
        ends.enter_context(each)
    if tracer is not None:
        ends.callback(tracer.close)
    check_engine_options(arguments)
    if arguments.record is not None:
        if kind_of(arguments.checkpoint) != "robots":
            raise UsageError(f"--record: is for robots' sessions; {arguments.checkpoint} is a model of video")
        _check_recordings(arguments.record, arguments.record_limit_gb)
    return listening, tracer


def _check_recordings(folder: Path, limit_gb: float) -> None:
    """Raises UsageError where the limit is reached already: nothing would be recorded."""
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    if held >= 1e9 * limit_gb:
        raise UsageError(
            f"--record: {folder} holds {held / 1e9:.3g} GB already, --record-limit-gb is {limit_gb:g}: nothing would "
            "be recorded; raise it, or choose another folder"
        )


def check_memory(
    checkpoint: Checkpoint,
    arguments: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
    max_sessions: int | None,
) -> None:
    """Say what weights and sessions take and how many fit. Raises DoesNotFit."""
    from worldkv.bench.plan import sizes_of, weights_and_room
    from worldkv.load import memory_of

    weights, room = weights_and_room(
        sizes_of(checkpoint), arguments.precision, arguments.cfg_scale, arguments.block_size, dtype.itemsize
    )
    free, total = memory_of(device)
    on_gpu = device.type == "cuda"
    left = max(0, free - weights)
    usable = usable_on_gpu(left, total) if on_gpu else left
    fit = room.sessions_in(usable)
    kept = f", {gib(total - usable_on_gpu(total, total))} kept to work in" if on_gpu else ""
    sums = f"{gib(weights)} of weights, {gib(room.bytes_per_session)} a session{kept}; {gib(free)} are free on {device}"
    if fit < (max_sessions or 1):
        what = count(max_sessions or 1, "session")
        ways = ["--max-sessions " + (str(fit) if fit > 1 else "1")] if fit else []
        ways += ["--precision fp8"] if on_gpu and arguments.precision != "fp8" else []
        ways += ["--cfg-scale 1 (half the cache)"] if arguments.cfg_scale != 1 else []
        ways += ["a larger GPU, or a model with a smaller window" if on_gpu else "a larger machine"]
        raise DoesNotFit(f"--max-sessions: {what} will not fit: {sums}; {fit} would; try {', or '.join(ways)}")
    some = room.sessions_in(room.num_blocks(max_sessions, left, total, on_gpu=on_gpu) * room.bytes_per_block)
    print(f"memory: {sums}: room for {count(some, 'session')}", file=sys.stderr)


def check_attention(
    name: str, checkpoint: Checkpoint, block_size: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Try the backend on a few blocks of the model's kind. Raises ValueError where it cannot serve."""
    if name in ("auto", "reference"):
        return
    from dataclasses import replace

    from worldkv.attention.backend import choose_backend
    from worldkv.kv.storage import KVStorage
    from worldkv.models.dreamzero.model import kv_spec

    spec = replace(kv_spec(checkpoint.config), num_layers=1)
    choose_backend(name, KVStorage(spec, 1, block_size, device, dtype))
