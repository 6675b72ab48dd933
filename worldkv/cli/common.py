"""What the commands share: options, warnings as lines, opening a policy. Imports no torch itself."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldkv.cli.errors import UsageError
from worldkv.cli.numbers import power_of_two, real, whole
from worldkv.cli.video import OF_ROBOTS, add_video_options, expect_options_of, video_choices
from worldkv.engine.config import EngineConfig
from worldkv.show.terminal import progress, spinner
from worldkv.words import count

if TYPE_CHECKING:
    import torch

    from worldkv.app import AnyApp
    from worldkv.engine.sharing import SharedDevice
    from worldkv.models.dreamzero.checkpoint import Checkpoint
    from worldkv.ranks.ranks import Ranks
    from worldkv.robots.policy import Policy


def add_checkpoint(command: argparse.ArgumentParser, *, needed: bool = True, what: str = "checkpoint folder") -> None:
    """DIR by itself, or after `--checkpoint`; where both are given they must agree."""
    command.add_argument("checkpoint", nargs="?", type=Path, action=_Once, metavar="DIR", help=what)
    command.add_argument("--checkpoint", type=Path, action=_Once, metavar="DIR", help="the same, by name")
    if needed:
        command.set_defaults(needed={"checkpoint": "a checkpoint folder, as DIR or --checkpoint DIR,"})


class _Once(argparse.Action):
    """Keeps a value that may be given by two names. Raises UsageError where they contradict each other."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        if values is None:  # the nameless one was left out
            return
        if before is not None and before != values:
            parser.error(f"--checkpoint: two are given, {before} and {values}; give one")
        setattr(namespace, self.dest, values)


def add_engine_options(command: argparse.ArgumentParser, *, robots: bool = True, videos: bool = False) -> None:
    """What `load_app_for` reads, but for the checkpoint; `robots`, `videos`: which families there may be."""
    group = command.add_argument_group("engine")
    add_device(group)
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of weights and cache; auto: bfloat16 on a GPU, float32 on a CPU (auto)",
    )
    add_attention(group)
    add_block_size(group)
    add_precision(group)
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="a session's answers do not depend on who shares its batches, bit for bit; slower",
    )
    if videos:
        add_video_options(command)
    if not robots:
        add_base(group)
        return
    add_robot_and_base(group)
    add_steps(group)
    group.add_argument(
        "--cfg-scale", type=real(), metavar="G", help="guidance (5); 1 turns it off: half the work and half the cache"
    )


def add_precision(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--precision", choices=("model", "fp8"), default="model", help="of the DiT's products, on a GPU (model)"
    )


def add_steps(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--steps",
        type=_steps,
        choices=(5, 6, 7, 8, "all", "dynamic"),
        help="solver steps that run the network; others reuse the last velocity (8, as the reference does)",
    )


def add_device(group: argparse._ActionsContainer, default: str = "auto") -> None:
    what = "cpu, cuda, cuda:N or auto" + (": the GPU if there is one" if default == "auto" else "")
    group.add_argument("--device", type=_device_name, default=default, metavar="NAME", help=f"{what} ({default})")


def _device_name(text: str) -> str:
    """Whether it is there only torch can say, later."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda, cuda:N or auto, got {text!r}")
    return text


def add_attention(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--attention",
        default=EngineConfig.attention,
        metavar="NAME",
        help=f"auto, reference, or cudnn on an NVIDIA GPU ({EngineConfig.attention})",
    )


def add_block_size(group: argparse._ActionsContainer) -> None:
    default = EngineConfig.block_size
    group.add_argument(
        "--block-size",
        type=power_of_two,
        default=default,
        metavar="N",
        help=f"KV slots per block, a power of two ({default})",
    )


def add_robot_and_base(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--embodiment",
        metavar="NAME",
        help="the robot: a packaged one (see `worldkv embodiments`) or a yaml file of your own (the checkpoint's)",
    )
    add_base(group)


def add_base(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--base",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="base Wan folder, for what a checkpoint leaves out; of several the first that has a part brings it",
    )


def fetch_repositories(arguments: argparse.Namespace) -> None:
    """Where a checkpoint's folder is expected, `owner/name` of the hub will do: it becomes what was fetched."""
    from worldkv.models.hub import checkpoint_folder, fetched_folder, is_repository

    for name in ("checkpoint", "folder"):
        given = getattr(arguments, name, None)
        if given is not None and is_repository(given):
            setattr(arguments, name, checkpoint_folder(given, tell=_tell))
    for index, given in enumerate(getattr(arguments, "base", None) or ()):
        if is_repository(given):
            from worldkv.models.wan.base_folder import PATTERNS

            arguments.base[index] = fetched_folder(given, PATTERNS, tell=_tell)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add_server_address(command: argparse._ActionsContainer, default: str | None = "ws://127.0.0.1:8000") -> None:
    what = f"of the server: HOST, HOST:PORT, ws://, wss://, http:// or https:// ({default or 'none'})"
    command.add_argument("--url", default=default, metavar="URL", help=what)
    add_api_key(command, "(WORLDKV_API_KEY)")
    command.add_argument(
        "--proxy",
        default="auto",
        type=lambda text: None if text == "none" else text,
        metavar="URL",
        help="to reach the server through; none: directly (auto: what the environment names, never to this machine)",
    )


def add_api_key(command: argparse._ActionsContainer, what: str) -> None:
    default = os.environ.get("WORLDKV_API_KEY") or None
    command.add_argument("--api-key", default=default, metavar="KEY", help=what)


def add_ticks(command: argparse.ArgumentParser, default: int | None, what: str) -> None:
    """How much of it, wherever there are ticks."""
    told = "all" if default is None else default
    command.add_argument("--ticks", type=whole(1), default=default, metavar="N", help=f"{what} ({told})")


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
            f"--device {name}: torch sees {count(num_gpus, 'GPU')} here; use --device cpu, or a CUDA build of torch on "
            "a GPU"
        )
    return device


def check_precision(precision: str, device: torch.device) -> None:
    """Raises UsageError."""
    if precision != "model" and device.type != "cuda":
        raise UsageError(f"--precision: expected 'model' without a GPU, got {precision!r}")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU, as the model was trained, and float32 on a CPU."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_app_for(
    arguments: argparse.Namespace,
    *,
    max_sessions: int | None,
    only_family: str | None = None,
    shared: SharedDevice | None = None,
    ranks: Ranks | None = None,
) -> AnyApp:
    """The app that the options of `add_engine_options` describe, with a progress bar. The caller closes it and
    shuts its engine down. Raises CheckpointError with everything that is wrong with the folder."""
    from worldkv.cli.preflight import check_attention, check_engine_options, check_memory

    config = EngineConfig(
        block_size=arguments.block_size,
        attention=arguments.attention,
        max_sessions=max_sessions,
        batch_invariant=arguments.batch_invariant,
        max_parked_bytes=_bytes(getattr(arguments, "park_memory", None)),
    )
    check_engine_options(arguments)
    with spinner("starting up"):  # torch and the model libraries take seconds to import
        device = choose_device(arguments.device) if ranks is None else ranks.own_device
        check_precision(arguments.precision, device)
        dtype = choose_dtype(arguments.dtype, device)

        from worldkv.load import load_app, served_family

        checkpoint: Checkpoint | Path = arguments.checkpoint
        family = served_family(arguments.checkpoint)
        if only_family not in (None, family):
            raise UsageError(f"--checkpoint: expected a model of {only_family}, {arguments.checkpoint} is of {family}")
        expect_options_of(family, arguments)
        own: dict[str, object] = {}
        if family == "dreamzero":
            from worldkv.models.dreamzero.checkpoint import Checkpoint

            checkpoint = Checkpoint.open(arguments.checkpoint, arguments.base)
            check_attention(arguments.attention, checkpoint, arguments.block_size, device, dtype)
            if ranks is None:  # else each rank has a part, and the cache says what fits
                check_memory(checkpoint, arguments, device, dtype, max_sessions)
            given = {name: getattr(arguments, name) for name in OF_ROBOTS}
            own = {name: value for name, value in given.items() if value is not None}
        else:
            own["choices"] = video_choices(arguments)
    with plain_warnings(), progress("loading weights", is_bytes=True) as step:
        return load_app(
            checkpoint,
            config,
            device=device,
            dtype=dtype,
            precision=arguments.precision,
            progress=step,
            shared=shared,
            ranks=ranks,
            **own,
        )


def _steps(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(1e9 * gigabytes)


def load_policy_for(arguments: argparse.Namespace, *, max_sessions: int | None) -> Policy:
    """Like `load_app_for`, where only a robot's will do."""
    app = load_app_for(arguments, max_sessions=max_sessions)
    from worldkv.errors import CheckpointError
    from worldkv.robots.policy import Policy

    if not isinstance(app, Policy):
        app.close()
        app.engine.shutdown()
        raise CheckpointError(f"{arguments.checkpoint}: expected the policy of a robot, got {app.name}")
    return app


def describe_model(app: AnyApp, checkpoint_folder: Path) -> list[str]:
    """What was loaded, in lines for people."""
    engine, card, cache = app.engine, app.engine.card, app.engine.cache_card
    steps = ""
    if "solver_steps" in card.facts:
        steps = f", {card.facts['steps']} of {card.facts['solver_steps']} solver steps"
    return [
        f"model      {checkpoint_folder.name}: {card.sizes}{steps}",
        *(f"{subject:<10} {text}" for subject, text in app.summary.items()),
        f"running    on {cache.device} in {cache.dtype}, attention by {cache.attention}",
        f"cache      {engine.capacity().explain()}",
    ]
