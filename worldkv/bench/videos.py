"""Blocks of causal video through a real engine: milliseconds of the DiT, of decoding, and from block to block.

Blocks are counted once the window is full. Random weights: they run at full cost, and have learned nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

from worldkv.bench.paced import Figures
from worldkv.bench.released import TINY_VIDEO, VIDEO_ENCODERS, VIDEO_MODELS
from worldkv.bench.watching import TimedExecutor
from worldkv.device import forget_ended_engines
from worldkv.engine.core import Model
from worldkv.engine.engine import Engine, EngineConfig, SessionHandle
from worldkv.kv.cache import KVCache
from worldkv.load import start_engine
from worldkv.models.causal_wan.checkpoint import load
from worldkv.models.causal_wan.folder import Choices, chosen
from worldkv.models.causal_wan.model import CausalWan
from worldkv.models.causal_wan.random import write_random_causal_wan
from worldkv.models.causal_wan.true_size import random_model
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE
from worldkv.models.wan.fused import Precision
from worldkv.models.wan.graphs import accelerate
from worldkv.models.wan.tokenizer import Tokens
from worldkv.videos.program import VideoBlock, VideoMaker, VideoState
from worldkv.videos.request import VideoRequest

_BLOCKS = 4  # that are counted, once the window is full


@dataclass(frozen=True)
class VideoBench:
    """An engine over random weights, and what watches it. Blocks take words and come as pictures in host memory."""

    engine: Engine[VideoRequest, VideoState, VideoBlock]
    model: CausalWan
    executor: TimedExecutor

    @property
    def blocks_to_fill(self) -> int:
        """After so many blocks the window is full, or no more fit."""
        blocks = self.model.config.blocks
        return blocks.held_frames // blocks.frames_per_block

    @property
    def frames_per_block(self) -> int:
        """Pictures."""
        return VAE_TEMPORAL_STRIDE * self.model.config.blocks.frames_per_block


@dataclass(frozen=True)
class _Tokens:
    """Of as many words as a prompt has; ids follow from the words alone."""

    text_len: int

    def encode(self, text: str) -> Tokens:
        ids = np.zeros((1, self.text_len), dtype=np.int64)
        words = text.split()[: self.text_len]
        ids[0, : len(words)] = [5 + sum(word.encode()) % 50 for word in words]
        return ids, (ids > 0).astype(np.int64)


def random_video_model(
    name: str,
    choices: Choices,
    device: torch.device,
    dtype: torch.dtype,
    *,
    precision: Precision = "model",
    progress: Callable[[str], None] = lambda _: None,
) -> CausalWan:
    """A window that nothing leaves would end a session: it is taken as one of as many frames that slides."""
    forget_ended_engines(device)
    if name == TINY_VIDEO:
        with tempfile.TemporaryDirectory() as folder:
            made, height, width = write_random_causal_wan(Path(folder) / "random"), choices.height, choices.width
            return load(made, device=device, dtype=dtype, precision=precision, height=height or 32, width=width or 48)
    wanted = chosen(VIDEO_MODELS[name](), choices)
    if wanted.blocks.window_frames == -1:
        wanted = replace(wanted, blocks=replace(wanted.blocks, window_frames=wanted.blocks.held_frames))
    model = random_model(wanted, VIDEO_ENCODERS, device=device, dtype=dtype, progress=progress)
    accelerate(model.dit, precision)
    model.encoders.vae.accelerate()
    return model


def build_video_engine(model: CausalWan, config: EngineConfig) -> VideoBench:
    executors: list[TimedExecutor] = []

    def timed(cache: KVCache) -> TimedExecutor:
        executors.append(TimedExecutor(cast("Model", maker), cache, alone=config.batch_invariant))
        return executors[-1]

    device, dtype = torch.device(model.dit.device), model.dit.dtype
    maker = VideoMaker(model, _Tokens(model.config.dit.text_len))
    forget_ended_engines(device)
    return VideoBench(start_engine(maker, config, device, dtype, make_executor=timed), model, executors[-1])


def measure_blocks(bench: VideoBench, ceiling: float) -> Figures:
    """One session alone: each block until the window is full, then a few more, whose median is told. `ceiling`: TFLOP/s
    of the machine's matrix products."""
    session, request = bench.engine.open_session(), VideoRequest("a street in the rain")
    dit: list[float] = []
    decode: list[float] = []
    whole: list[float] = []
    for _ in range(bench.blocks_to_fill + 2 + _BLOCKS):
        with bench.executor.watched() as watches:
            started = time.perf_counter()
            bench.engine.submit(session, request).result()
            whole.append(1e3 * (time.perf_counter() - started))
        dit.append(1e3 * sum(watch.seconds() for watch in watches["forward"]))
        decode.append(1e3 * sum(watch.seconds() for watch in watches["decode"]))
    bench.engine.close(session, "measured")
    dit_ms, block_ms = statistics.median(dit[-_BLOCKS:]), statistics.median(whole[-_BLOCKS:])
    tflops = flops_of_block(bench.model) / dit_ms / 1e9
    return {
        "first_block_ms": [round(ms, 1) for ms in whole[: bench.blocks_to_fill]],
        "dit_ms": round(dit_ms, 2),
        "decode_ms": round(statistics.median(decode[-_BLOCKS:]), 2),
        "block_ms": round(block_ms, 1),
        "frames_per_block": bench.frames_per_block,
        "frames_per_s_of_dit": round(1e3 * bench.frames_per_block / dit_ms, 2),
        "frames_per_s": round(1e3 * bench.frames_per_block / block_ms, 2),
        "achieved_tflops": round(tflops, 4),
        "fraction_of_ceiling": round(tflops / ceiling, 3),
    }


def measure_video_sessions(bench: VideoBench, counts: Sequence[int]) -> Iterator[Figures]:
    """So many sessions, each asking for its next block when it has one: time from block to block, windows full."""
    for count in counts:
        sessions = [bench.engine.open_session() for _ in range(count)]
        requests = [VideoRequest("a street in the rain", seed=number) for number in range(count)]
        with ThreadPoolExecutor(count) as viewers:
            seen = list(viewers.map(partial(_blocks_seen, bench), sessions, requests))
        intervals = [1e3 * float(each) for times in seen for each in np.diff(times)]
        slowest = max((times[-1] - times[0]) / _BLOCKS for times in seen)
        for session in sessions:
            bench.engine.close(session, "measured").result()
        yield {
            "sessions": count,
            "p50_ms": round(float(np.percentile(intervals, 50)), 1),
            "p99_ms": round(float(np.percentile(intervals, 99)), 1),
            "frames_per_s_of_each": round(bench.frames_per_block / slowest, 2),
        }


def _blocks_seen(bench: VideoBench, session: SessionHandle, request: VideoRequest) -> list[float]:
    """When a viewer has its last block before the counted ones, and each of these; seconds."""
    times = []
    for _ in range(bench.blocks_to_fill + 1 + _BLOCKS):
        bench.engine.submit(session, request).result()
        times.append(time.perf_counter())
    return times[-_BLOCKS - 1 :]


def flops_of_block(model: CausalWan) -> float:
    """Floating-point operations of the DiT for one block, its window full: drafts and the clean pass."""
    config, blocks = model.config.dit, model.config.blocks
    queries = blocks.frames_per_block * model.config.frame_tokens
    keys = blocks.held_frames * model.config.frame_tokens + config.text_len
    products = 2 * queries * (6 * config.dim**2 + 2 * config.dim * config.ffn_dim)
    return float((len(blocks.steps) + 1) * config.num_layers * (products + 4 * queries * keys * config.dim))
