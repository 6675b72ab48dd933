"""From a checkpoint folder to an engine and an app: the one place where the parts are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch

from worldkv.app import AnyApp
from worldkv.attention.backend import choose_backend
from worldkv.attention.names import check_name
from worldkv.device import forget_ended_engines
from worldkv.engine.core import Observer
from worldkv.engine.engine import Engine, EngineConfig
from worldkv.engine.executor import Executor
from worldkv.engine.room import MAX_ON_CPU, Room, free_on_host, gib, told_if_full, usable_on_gpu
from worldkv.engine.sharing import SharedDevice
from worldkv.errors import CheckpointError
from worldkv.kv.cache import KVCache
from worldkv.kv.storage import KVStorage
from worldkv.models.base import InputsT, KeepsTensors, ResultT, StateT, WorldModel
from worldkv.models.causal_wan import checkpoint as causal_wan
from worldkv.models.causal_wan.folder import Choices
from worldkv.models.checkpoints.modules import Progress
from worldkv.models.dreamzero.checkpoint import Checkpoint, load, tokenizer_of
from worldkv.models.hub import checkpoint_folder
from worldkv.models.registry import checkpoint_module, family_of
from worldkv.models.wan.fused import Precision
from worldkv.ranks.ranks import Ranks
from worldkv.robots.of_checkpoint import checkpoint_embodiment
from worldkv.robots.policy import Policy
from worldkv.robots.preparation import Preparation
from worldkv.robots.program import RobotPolicy
from worldkv.videos.app import VideoApp
from worldkv.videos.program import VideoMaker
from worldkv.words import count

Opened: TypeAlias = Checkpoint | causal_wan.Checkpoint
_FAMILIES: Mapping[type, str] = {Checkpoint: "dreamzero", causal_wan.Checkpoint: "causal_wan"}


def load_engine(
    checkpoint: Opened | Path | str,
    config: EngineConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    observer: Observer | None = None,
    shared: SharedDevice | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> Engine[Any, Any, Any]:
    """A running engine for a checkpoint of any known family, without a robot around it.

    `checkpoint`: a folder, or a repository's id on the hub, see `models.hub`.

    `shared`: of all engines that use `device`. `ranks`: they run the DiT together, on their own devices. `options`: the
    family's own, see its `checkpoint.load`. Raises CheckpointError with everything that is wrong.
    """
    config = config or EngineConfig()
    check_name(config.attention)
    if not isinstance(checkpoint, Opened):
        checkpoint = checkpoint_folder(checkpoint)
    family = _FAMILIES[type(checkpoint)] if isinstance(checkpoint, Opened) else _family(checkpoint)
    folder = checkpoint.folder if isinstance(checkpoint, Opened) else Path(checkpoint)
    if ranks is not None:
        device, options = ranks.own_device, {**options, "across": ranks}
    with _told_if_weights_do_not_fit(folder, device):
        model = checkpoint_module(family).load(checkpoint, device=device, dtype=dtype, **options)
    return start_engine(model, config, device, dtype, observer=observer, shared=shared, ranks=ranks)


def load_app(checkpoint: Opened | Path | str, config: EngineConfig | None = None, **options: Any) -> AnyApp:
    """The app that serves a checkpoint folder of any known family. `options`: see the family's in `APPS`.

    Raises CheckpointError, also where nothing serves the family.
    """
    if not isinstance(checkpoint, Opened):
        checkpoint = checkpoint_folder(checkpoint)
    family = _FAMILIES[type(checkpoint)] if isinstance(checkpoint, Opened) else served_family(checkpoint)
    return APPS[family](checkpoint, config, **options)


def served_family(checkpoint: Path | str) -> str:
    """The family of a folder. Raises CheckpointError where nothing serves it."""
    family = _family(checkpoint)
    if family not in APPS:
        raise CheckpointError(
            f"{checkpoint} is of the family {family}, which no app serves (those of {', '.join(APPS)} are); "
            "worldkv.load_engine runs it from Python"
        )
    return family


def _family(folder: Path | str) -> str:
    """A folder that no family knows is opened as DreamZero's, whose error says what it lacks."""
    try:
        return family_of(folder)
    except CheckpointError:
        return "dreamzero"


def start_engine(
    model: WorldModel[InputsT, StateT, ResultT],
    config: EngineConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    observer: Observer | None = None,
    shared: SharedDevice | None = None,
    make_executor: Callable[[KVCache], Executor] | None = None,
    ranks: Ranks | None = None,
) -> Engine[InputsT, StateT, ResultT]:
    """A running engine over a model and a cache of the configured size, on each of the `ranks` that run it."""
    forget_ended_engines(device)
    room = room_of(model, config, dtype)
    memory = None if ranks is None else ranks.memory()
    num_blocks = config.num_blocks or _num_blocks(room, config, torch.device(device), memory)
    with told_if_full("making the cache", _cache_needs(room, num_blocks, torch.device(device))):
        if ranks is not None:
            return ranks.engine(model, num_blocks, config, observer=observer, shared=shared)
        storage = KVStorage(model.spec, num_blocks, config.block_size, device, dtype)
    cache = KVCache(model.spec, storage, choose_backend(config.attention, storage))
    executor = None if make_executor is None else make_executor(cache)
    return Engine(model, cache, config, observer=observer, executor=executor, shared=shared)


def room_of(model: WorldModel[InputsT, StateT, ResultT], config: EngineConfig, dtype: torch.dtype) -> Room:
    state_bytes = model.max_state_bytes if isinstance(model, KeepsTensors) else 0
    return Room.of(model.spec, config.block_size, dtype.itemsize, state_bytes)


def _num_blocks(room: Room, config: EngineConfig, device: torch.device, memory: tuple[int, int] | None = None) -> int:
    """See `Room.num_blocks`. `memory`: (free, total) bytes; None: the device's."""
    if device.type not in ("cuda", "cpu"):  # meta: nothing is allocated
        return room.blocks_for(config.max_sessions or MAX_ON_CPU)
    return room.num_blocks(config.max_sessions, *(memory or memory_of(device)), on_gpu=device.type == "cuda")


def memory_of(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of a GPU, or of the host."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    free = free_on_host()
    return free, free


def _cache_needs(room: Room, num_blocks: int, device: torch.device) -> str:
    text = f"{num_blocks} blocks are {gib(num_blocks * room.bytes_per_block)}, a session {gib(room.bytes_per_session)}"
    if device.type not in ("cuda", "cpu"):
        return text
    free, total = memory_of(device)
    fit = room.sessions_in(usable_on_gpu(free, total) if device.type == "cuda" else free)
    return f"{text}; {gib(free)} are free on {device}: {count(fit, 'session')} would fit"


@contextmanager
def _told_if_weights_do_not_fit(folder: Path, device: torch.device | str) -> Iterator[None]:
    """See `told_if_full`; what it takes is read off the sizes of the folder's files."""
    forget_ended_engines(device)
    files = [path for pattern in ("*.safetensors", "*.pt") for path in folder.glob(pattern)]
    num_bytes = sum(path.stat().st_size for path in files)
    with told_if_full("loading weights", f"{folder} holds {gib(num_bytes)} of them for {device}"):
        yield


def load_policy(
    checkpoint: Checkpoint | Path | str,
    config: EngineConfig | None = None,
    *,
    base: Sequence[Path | str] = (),
    embodiment: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    observer: Observer | None = None,
    shared: SharedDevice | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> Policy:
    """An engine and the policy of one embodiment over it; `Policy.engine` is the caller's to shut down.

    `base`: Wan folders for what the checkpoint lacks. `embodiment`: see
    `checkpoint_embodiment`. `ranks`: they run the DiT together. `options`: see `models.dreamzero.checkpoint.load`.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.open(checkpoint_folder(checkpoint), base)
    config = config or EngineConfig()
    check_name(config.attention)
    robot = checkpoint_embodiment(checkpoint, embodiment)
    tokenizer = tokenizer_of(checkpoint)
    device = device if ranks is None else ranks.own_device
    with _told_if_weights_do_not_fit(checkpoint.folder, device):
        model = load(checkpoint, device=device, dtype=dtype, tokenizer=tokenizer, across=ranks, **options)
    preparation = Preparation(robot, tokenizer)
    engine = start_engine(
        RobotPolicy(model, preparation), config, device, dtype, observer=observer, shared=shared, ranks=ranks
    )
    return Policy(engine, preparation, random_weights=checkpoint.random_weights)


def load_videos(
    checkpoint: causal_wan.Checkpoint | Path | str,
    config: EngineConfig | None = None,
    *,
    choices: Choices | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: Precision = "model",
    observer: Observer | None = None,
    shared: SharedDevice | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> VideoApp:
    """An engine and the app that streams its videos; `VideoApp.engine` is the caller's to shut down.

    `choices`: what a folder leaves open. `ranks`: they run the DiT together.
    """
    if not isinstance(checkpoint, causal_wan.Checkpoint):
        checkpoint = causal_wan.Checkpoint.open(checkpoint_folder(checkpoint), choices)
    config = config or EngineConfig()
    check_name(config.attention)
    device = device if ranks is None else ranks.own_device
    with _told_if_weights_do_not_fit(checkpoint.folder, device):
        model = causal_wan.load(
            checkpoint, device=device, dtype=dtype, precision=precision, progress=progress, across=ranks
        )
    maker = VideoMaker(model, causal_wan.tokenizer_of(checkpoint))
    engine = start_engine(maker, config, device, dtype, observer=observer, shared=shared, ranks=ranks)
    return VideoApp(engine, random_weights=checkpoint.random_weights)


# family -> who serves it
APPS: Mapping[str, Callable[..., AnyApp]] = {"dreamzero": load_policy, "causal_wan": load_videos}
