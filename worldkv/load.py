"""From a checkpoint folder to an engine and an app: the one place where the parts are put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from worldkv.app import AnyApp
from worldkv.attention.backend import check_name, choose_backend
from worldkv.engine.core import Observer
from worldkv.engine.engine import Engine, EngineConfig
from worldkv.engine.executor import Executor
from worldkv.errors import CheckpointError
from worldkv.kv.cache import KVCache
from worldkv.kv.spec import KVSpec
from worldkv.kv.storage import KVStorage
from worldkv.models.base import InputsT, ResultT, StateT, WorldModel
from worldkv.models.dreamzero.checkpoint import Checkpoint, load, tokenizer_of
from worldkv.models.registry import checkpoint_module, family_of
from worldkv.robots.of_checkpoint import checkpoint_embodiment
from worldkv.robots.policy import Policy
from worldkv.robots.preparation import Preparation
from worldkv.robots.program import RobotPolicy

WORKSPACE = 0.08  # of a GPU's memory: activations, graphs and libraries' workspaces


def load_engine(
    checkpoint: Checkpoint | Path | str,
    config: EngineConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    observer: Observer | None = None,
    **options: Any,
) -> Engine[Any, Any, Any]:
    """A running engine for a checkpoint folder of any known family, without a robot around it.

    `options`: the family's own, see its `checkpoint.load`. Raises CheckpointError with everything that is wrong.
    """
    config = config or EngineConfig()
    check_name(config.attention)
    family = "dreamzero" if isinstance(checkpoint, Checkpoint) else _family(checkpoint)
    model = checkpoint_module(family).load(checkpoint, device=device, dtype=dtype, **options)
    return start_engine(model, config, device, dtype, observer=observer)


def load_app(checkpoint: Checkpoint | Path | str, config: EngineConfig | None = None, **options: Any) -> AnyApp:
    """The app that serves a checkpoint folder of any known family. `options`: see the family's in `APPS`.

    Raises CheckpointError, also where nothing serves the family.
    """
    family = "dreamzero" if isinstance(checkpoint, Checkpoint) else _family(checkpoint)
    if family not in APPS:
        raise CheckpointError(
            f"{checkpoint} is of the family {family}, which no app serves (those of {', '.join(APPS)} are); "
            "worldkv.load_engine runs it from Python"
        )
    return APPS[family](checkpoint, config, **options)


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
    make_executor: Callable[[KVCache], Executor] | None = None,
) -> Engine[InputsT, StateT, ResultT]:
    """A running engine over a model and a cache of the configured size."""
    num_blocks = config.num_blocks or _num_blocks(model.spec, config, torch.device(device), dtype)
    storage = KVStorage(model.spec, num_blocks, config.block_size, device, dtype)
    cache = KVCache(model.spec, storage, choose_backend(config.attention, storage))
    executor = None if make_executor is None else make_executor(cache)
    return Engine(model, cache, config, observer=observer, executor=executor)


def _num_blocks(spec: KVSpec, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> int:
    """For `max_sessions`; without that, all that is free on the GPU beside the weights and room to work in."""
    per_session, shared = spec.blocks_per_session(config.block_size), spec.blocks_shared(config.block_size)
    if config.max_sessions is not None:
        return config.max_sessions * per_session + shared
    if device.type != "cuda":
        raise ValueError("max_sessions: expected a number without a GPU, whose free memory would tell")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    blocks = (free - round(WORKSPACE * total)) // spec.bytes_per_block(config.block_size, dtype.itemsize)
    if blocks < per_session + shared:
        raise ValueError(
            f"max_sessions: not one session fits: it needs {per_session + shared} blocks, {free / 2**30:.1f} GiB are "
            f"free, {WORKSPACE:.0%} of the GPU is kept to work in; use a smaller window, --cfg-scale 1 or fp8"
        )
    return int(blocks)


def load_policy(
    checkpoint: Checkpoint | Path | str,
    config: EngineConfig | None = None,
    *,
    base: Sequence[Path | str] = (),
    embodiment: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    observer: Observer | None = None,
    **options: Any,
) -> Policy:
    """An engine and the policy of one embodiment over it; `Policy.engine` is the caller's to shut down.

    `base`: Wan folders for what the checkpoint lacks. `embodiment`: see
    `checkpoint_embodiment`. `options`: see `models.dreamzero.checkpoint.load`.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.open(checkpoint, base)
    config = config or EngineConfig()
    check_name(config.attention)
    robot = checkpoint_embodiment(checkpoint, embodiment)
    tokenizer = tokenizer_of(checkpoint)
    model = load(checkpoint, device=device, dtype=dtype, tokenizer=tokenizer, **options)
    preparation = Preparation(robot, tokenizer)
    engine = start_engine(RobotPolicy(model, preparation), config, device, dtype, observer=observer)
    return Policy(engine, preparation, random_weights=checkpoint.random_weights)


APPS: Mapping[str, Callable[..., AnyApp]] = {"dreamzero": load_policy}  # family -> who serves it
