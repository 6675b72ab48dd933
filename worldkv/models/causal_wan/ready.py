"""What causal Wan makes before its first block, so that none waits for it: graphs, attention plans, tuned convolutions.

Blocks' drafts and clean passes are of one shape at every fill of the window, and share graphs. A recache has as many
frames as its session remembers. A video's first pieces are decoded otherwise than all later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from worldkv.device import upload
from worldkv.kv.cache import KVCache
from worldkv.models.base import BatchLimits
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE
from worldkv.models.wan.dit import KeptTokens, WanRow
from worldkv.models.wan.graphs import GraphedBlocks
from worldkv.models.wan.ready import reading_rows, sizes_up_to

if TYPE_CHECKING:
    from worldkv.models.causal_wan.model import CausalWan
    from worldkv.models.causal_wan.network import CausalWanNetwork
    from worldkv.models.wan.network import Pages

_LATER_PIECES = 3  # of a video that is decoded: after so many of a size all tensors have the shape that they keep


def dit_steps(network: CausalWanNetwork, pages: Pages, limits: BatchLimits) -> Iterator[Callable[[], object]]:
    """Its graphs; none on a CPU."""
    if pages.storage.device.type != "cuda":
        return
    blocks = network.dit.run_blocks
    if not isinstance(blocks, GraphedBlocks) or pages.backend.name == "reference":
        return
    for num_rows in sizes_up_to(limits.max_rows):
        yield partial(_capture_forward, network, blocks, pages, network.config.blocks.frames_per_block, num_rows)
    for num_frames in recached_frames(network):
        yield partial(_capture_forward, network, blocks, pages, num_frames, 1)
    yield torch.cuda.empty_cache


def recached_frames(network: CausalWanNetwork) -> list[int]:
    """How many frames a session can remember, but for as many as a block has: those are blocks' own shapes."""
    if not any(step.rewrites for step in network.spec.steps):
        return []
    per_block, held = network.config.blocks.frames_per_block, network.config.blocks.held_frames
    return sorted({*range(2 * per_block, held, per_block), held} - {per_block})


def encoder_steps(model: CausalWan, cache: KVCache) -> Iterator[Callable[[], object]]:
    """Of the encoders; none on a CPU."""
    if cache.storage.device.type != "cuda":
        return
    vae = model.encoders.vae
    for num_frames in (VAE_TEMPORAL_STRIDE, 2 * vae.frames_at_once + VAE_TEMPORAL_STRIDE):  # clips, after 1 frame
        yield partial(_encode, model, 1 + num_frames)
    if model.decodes:
        for num_latents in range(1, model.encoders.decoder.latents_at_once + 1):
            yield partial(_decode, model, num_latents)


def _encode(model: CausalWan, num_frames: int) -> None:
    config, dit = model.config, model.dit
    video = torch.zeros(1, 3, num_frames, config.height, config.width, device=dit.device, dtype=dit.dtype)
    model.encoders.vae.encode(video)


def _decode(model: CausalWan, num_latents: int) -> None:
    """A video whose pieces have so many latent frames, but for the first."""
    config, dit, decoder = model.config, model.dit, model.encoders.decoder
    stream = decoder.new_decode_state()
    for count in (1, *[num_latents] * _LATER_PIECES):
        shape = (1, config.dit.out_dim, count, *config.latent_size)
        decoder.decode_stream(stream, torch.zeros(shape, device=dit.device, dtype=dit.dtype))


@torch.no_grad()
def _capture_forward(
    network: CausalWanNetwork, blocks: GraphedBlocks, pages: Pages, num_frames: int, num_rows: int
) -> None:
    """A forward of rows of so many frames, which read the pool's first blocks and write nowhere."""
    spec, config, dit, storage = network.spec, network.config, network.dit, pages.storage
    counts = [num_frames * config.frame_tokens] * num_rows
    history = reading_rows(storage, spec.row_limits.num_visible, counts, writes=True)
    kept = None
    if spec.reads_copy:
        kept = KeptTokens(storage, upload([-1] * sum(counts), storage.device, torch.long))
    plans = network.plans(pages, history, reading_rows(storage, spec.conditioning["text"], counts), kept)
    size = (config.dit.out_dim, num_frames, *config.latent_size)
    row = WanRow(torch.zeros(size, device=dit.device, dtype=dit.dtype), None, 0, timestep=1, wants_velocity=True)
    with blocks.preparing(num_levels=num_rows):  # each row a timestep of its own
        dit([row] * num_rows, plans)
