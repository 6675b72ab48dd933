"""From a checkpoint folder to an engine and a policy: the one place where the parts are put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from worldkv.attention.backend import check_name, choose_backend
from worldkv.engine.engine import Engine, EngineConfig
from worldkv.errors import CheckpointError
from worldkv.kv.cache import KVCache
from worldkv.kv.spec import KVSpec
from worldkv.kv.storage import KVStorage
from worldkv.kv.window import WindowPolicy
from worldkv.models.dreamzero.checkpoint import Checkpoint, load_module
from worldkv.models.dreamzero.config import VAE_TEMPORAL_STRIDE, DreamZeroConfig
from worldkv.models.dreamzero.folder import DIT_PREFIX, WORLDKV_FILE
from worldkv.models.dreamzero.inputs import Prompt
from worldkv.models.dreamzero.model import DreamZero
from worldkv.models.dreamzero.prompts import NEGATIVE_PROMPT
from worldkv.models.dreamzero.steps import Steps
from worldkv.models.wan.dit import WanDiT
from worldkv.models.wan.encoders import check_all_tensors, load_encoders
from worldkv.models.wan.fused import FusedBlocks, Precision
from worldkv.models.wan.graphs import GraphedBlocks
from worldkv.models.wan.sizes import read_sizes
from worldkv.models.wan.tokenizer import Tokenizer, load_tokenizer
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.embodiment_file import EmbodimentFile, from_mapping
from worldkv.robots.experiment_cfg import ModelSizes, find_embodiment, read_embodiment
from worldkv.robots.policy import Policy

_WORKSPACE = 0.08  # of a GPU's memory: activations, graphs and libraries' workspaces
Progress = Callable[[int, int], None]  # bytes read, bytes in all; restarts for each part


def load_engine(
    checkpoint: Checkpoint | Path | str,
    config: EngineConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: Steps = 8,
    cfg_scale: float | None = None,
    window_policy: WindowPolicy = "reset",
    tokenizer: Tokenizer | None = None,
    negative_prompt: Prompt | None = None,
    precision: Precision = "model",
    progress: Progress | None = None,
) -> Engine:
    """A running engine for a DreamZero checkpoint folder. Raises CheckpointError with everything that is wrong.

    `cfg_scale` 1 turns guidance off, and one branch runs instead of two; None is the reference's 5. `negative_prompt`
    is for verification.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.open(checkpoint)
    config = config or EngineConfig()
    check_name(config.attention)
    check_all_tensors(checkpoint)
    with torch.device("meta"):
        dit = WanDiT(checkpoint.config.dit)
    names = {name: DIT_PREFIX + name for name in dit.state_dict()}
    load_module(checkpoint, dit, names, device=device, dtype=dtype, progress=progress)
    encoders = load_encoders(checkpoint, device=device, dtype=dtype, progress=progress)
    if tokenizer is None:
        tokenizer = load_tokenizer(
            checkpoint.folder, checkpoint.config.dit.text_len, read_sizes(checkpoint).text.vocab_size
        )
    model = DreamZero(
        checkpoint.config if cfg_scale is None else replace(checkpoint.config, cfg_scale=cfg_scale),
        dit,
        encoders,
        negative_prompt or tokenizer.encode(NEGATIVE_PROMPT),
        window_policy=window_policy,
        steps=steps,
    )
    accelerate(dit, precision)
    return start_engine(model, config, device, dtype)


def accelerate(dit: WanDiT, precision: Precision = "model") -> None:
    """On a GPU, run the blocks fused and in CUDA graphs; float8 is an option. On a CPU nothing changes."""
    if dit.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # the encoders' convolutions have few shapes: the best kernel for each
        dit.run_blocks = GraphedBlocks(FusedBlocks(dit, precision))
    elif precision != "model":
        raise ValueError(f"precision: expected 'model' without a GPU, got {precision!r}")


def start_engine(model: DreamZero, config: EngineConfig, device: torch.device | str, dtype: torch.dtype) -> Engine:
    """A running engine over a model and a cache of the configured size."""
    num_blocks = config.num_blocks or _num_blocks(model.spec, config, torch.device(device), dtype)
    storage = KVStorage(model.spec, num_blocks, config.block_size, device, dtype)
    return Engine(model, KVCache(model.spec, storage, choose_backend(config.attention, storage)), config)


def _num_blocks(spec: KVSpec, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> int:
    """For `max_sessions`; without that, all that is free on the GPU beside the weights and room to work in."""
    per_session, shared = spec.blocks_per_session(config.block_size), spec.blocks_shared(config.block_size)
    if config.max_sessions is not None:
        return config.max_sessions * per_session + shared
    if device.type != "cuda":
        raise ValueError("max_sessions: expected a number without a GPU, whose free memory would tell")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    blocks = (free - round(_WORKSPACE * total)) // spec.bytes_per_block(config.block_size, dtype.itemsize)
    if blocks < per_session + shared:
        raise ValueError(
            f"max_sessions: not one session fits: it needs {per_session + shared} blocks, {free / 2**30:.1f} GiB are "
            f"free, {_WORKSPACE:.0%} of the GPU is kept to work in; use a smaller window, --cfg-scale 1 or fp8"
        )
    return int(blocks)


def load_policy(
    checkpoint: Checkpoint | Path | str,
    config: EngineConfig | None = None,
    *,
    embodiment: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: Steps = 8,
    cfg_scale: float | None = None,
    precision: Precision = "model",
    progress: Progress | None = None,
) -> Policy:
    """An engine and the policy of one embodiment over it; `Policy.engine` is the caller's to shut down.

    `embodiment`: see `checkpoint_embodiment`.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.open(checkpoint)
    model = checkpoint.config
    robot = checkpoint_embodiment(checkpoint, embodiment)
    vocab_size = read_sizes(checkpoint).text.vocab_size
    tokenizer = load_tokenizer(checkpoint.folder, model.dit.text_len, vocab_size)
    engine = load_engine(
        checkpoint,
        config,
        device=device,
        dtype=dtype,
        steps=steps,
        cfg_scale=cfg_scale,
        tokenizer=tokenizer,
        precision=precision,
        progress=progress,
    )
    return Policy(engine, robot, tokenizer, random_weights=checkpoint.random_weights)


class Described(Protocol):
    """A folder's own words: a Checkpoint, or its Description where it cannot be opened as one."""

    @property
    def config(self) -> DreamZeroConfig: ...
    @property
    def conf(self) -> Mapping[str, Any]: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def embodiments(self) -> Mapping[str, Any]: ...


def checkpoint_embodiment(described: Described, name: str | Path | None = None) -> Embodiment:
    """The robot that a checkpoint is for. `name`: a packaged embodiment, a tag in metadata.json, or a file; None is the
    checkpoint's own. Raises CheckpointError with all that is missing or contradicts itself."""
    model, conf, metadata, own = described.config, described.conf, described.metadata, described.embodiments
    camera_size = None
    if model.target_video_height is not None and model.target_video_width is not None:
        camera_size = (model.target_video_height, model.target_video_width)
    sizes = ModelSizes(model.action_horizon, model.dit.max_state_dim, model.dit.action_dim, model.dit.text_len)
    tag = next(iter(own), "") if name is None else str(name)
    file: EmbodimentFile | None
    if tag in own:
        file = from_mapping(own[tag], f"{WORLDKV_FILE}: embodiments.{tag}")
    else:
        tag, file = find_embodiment(name, conf, metadata)
    robot = read_embodiment(conf, metadata, tag, file=file, sizes=sizes, camera_size=camera_size)
    stride, (_, patch_height, patch_width) = model.dit.pixel_stride, model.dit.patch_size
    height, width = camera_size or robot.image_size
    tokens = (height // stride // patch_height) * (width // stride // patch_width)
    if tokens != model.dit.frame_tokens:
        raise CheckpointError(
            f"embodiment {robot.tag!r}: view_size makes an image of {height} x {width} pixels, {tokens} tokens, but "
            f"config.json says frame_seqlen {model.dit.frame_tokens}"
        )
    counts = [VAE_TEMPORAL_STRIDE * n for n in range(1, model.frames_per_chunk + 1) if model.frames_per_chunk % n == 0]
    if robot.frames_per_tick not in counts:
        raise CheckpointError(
            f"embodiment {robot.tag!r}: frames_per_tick: expected one of {counts} for this model, got "
            f"{robot.frames_per_tick}"
        )
    return robot
