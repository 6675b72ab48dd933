"""What DreamZero makes before its first tick, so that none waits for it: graphs, attention plans, tuned convolutions.

Every batch that the engine can put together is then of a shape that was made, or fills one up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from worldkv.kv.cache import KVCache
from worldkv.kv.spec import Step
from worldkv.models.base import BatchLimits
from worldkv.models.dreamzero.dit import DreamZeroRow
from worldkv.models.dreamzero.inputs import latent_size, tiled_size
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE
from worldkv.models.wan.graphs import GraphedBlocks
from worldkv.models.wan.ready import reading_rows, sizes_up_to

if TYPE_CHECKING:
    from worldkv.models.dreamzero.model import DreamZero
    from worldkv.models.dreamzero.network import DreamZeroNetwork
    from worldkv.models.wan.network import Pages

_LEVELS_PER_ROW = 2  # a row's video and its actions have a timestep each


def dit_steps(network: DreamZeroNetwork, pages: Pages, limits: BatchLimits) -> Iterator[Callable[[], object]]:
    """Its graphs; none on a CPU."""
    if pages.storage.device.type != "cuda":
        return
    spec, blocks = network.spec, network.dit.run_blocks
    if not isinstance(blocks, GraphedBlocks) or pages.backend.name == "reference":
        return
    branches = len(spec.branches) if limits.max_rows > 1 else 1
    by_size = sorted(spec.steps, key=spec.tokens_of)
    for num_sessions in sizes_up_to(max(1, limits.max_rows // branches)):
        num_rows = branches * num_sessions
        mixes = [[step] * num_rows for step in by_size]
        if num_sessions > 1 and len(by_size) > 1:  # sessions at different steps, as large as these can be
            mixes.append([by_size[-2]] * branches + [by_size[-1]] * (num_rows - branches))
        for mix in mixes:
            yield partial(_capture_forward, network, blocks, pages, mix)
    yield torch.cuda.empty_cache


def encoder_steps(model: DreamZero, cache: KVCache, limits: BatchLimits) -> Iterator[Callable[[], object]]:
    """Of the encoders; none on a CPU."""
    if cache.storage.device.type != "cuda":
        return
    config, encoding = model.config, model.encoding
    height, width = tiled_size(config)
    first, later = (
        encoding.pixels(np.full((num_frames, height, width, 3), 127, dtype=np.uint8))
        for num_frames in (1, VAE_TEMPORAL_STRIDE * config.frames_per_chunk + 1)
    )
    payloads = (("video", later), ("video", encoding.window_start(first)), ("image", first[:, :, 0]))
    for encoder, payload in payloads:
        for size in range(1, min(limits.max_encodes, encoding.largest_batch(encoder, payload)) + 1):
            yield partial(encoding.graphed[encoder].prepare, size, payload)
    for num_frames in (config.frames_per_chunk, config.frames_per_chunk + 1):  # imagined ticks, imagined videos
        latents = later.new_zeros(1, config.dit.out_dim, num_frames, *latent_size(config))
        yield partial(encoding.graphed["decode"].prepare, 1, latents)


@torch.no_grad()
def _capture_forward(network: DreamZeroNetwork, blocks: GraphedBlocks, pages: Pages, mix: Sequence[Step]) -> None:
    """A forward of rows at these steps, which read the pool's first blocks and write nowhere."""
    spec, storage = network.spec, pages.storage
    counts = [spec.tokens_of(step) for step in mix]
    plans = network.plans(
        pages,
        reading_rows(storage, spec.row_limits.num_visible, counts, writes=True),
        {kind: reading_rows(storage, num_keys, counts) for kind, num_keys in spec.conditioning.items()},
    )
    with blocks.preparing(num_levels=_LEVELS_PER_ROW * len(mix)):
        network.dit([_row(network, step) for step in mix], plans)


def _row(network: DreamZeroNetwork, step: Step) -> DreamZeroRow:
    config, dit = network.config, network.dit

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=dit.device, dtype=dit.dtype)

    size = (step.num_chunks, *latent_size(config))
    latents = zeros(config.dit.out_dim, *size)
    wants_condition = config.dit.concat_first_frame_latent
    condition = zeros(config.dit.in_dim - config.dit.out_dim, *size) if wants_condition else None
    if step.commits:
        return DreamZeroRow(latents, condition, 0, timestep=0, wants_velocity=False)
    actions = zeros(config.action_horizon, config.action_dim)
    state = zeros(config.dit.num_states, config.dit.max_state_dim)
    return DreamZeroRow(latents, condition, 0, 1, True, actions, state, action_timestep=2)
