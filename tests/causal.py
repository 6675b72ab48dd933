"""Recordings of causal video, replayed through an engine; and tiny engines of it."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from worldkv.engine.engine import Engine, EngineConfig, SessionHandle
from worldkv.kv.state import KVState
from worldkv.load import load_engine
from worldkv.models.base import Encode, Forward, Request
from worldkv.models.causal_wan.config import BRANCH, CausalSettings
from worldkv.models.causal_wan.inputs import Block, BlockRequest
from worldkv.models.causal_wan.random import TINY, write_random_causal_wan

SHARED = Path(__file__).resolve().parents[2] / "shared"  # as in conftest, whose name is not unique
SIZE = {"height": 32, "width": 48}  # 6 tokens a frame


class Recording:
    """A golden folder's calls and tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = json.loads((folder / "calls.json").read_text())
        self.golden: dict[str, torch.Tensor] = load_file(folder / "golden.safetensors")

    def request(self, number: int, **more: Any) -> BlockRequest:
        """With the recorded noise."""
        said, golden = self.calls["blocks"][number], self.golden
        prompt, block = f"prompt.{said['prompt']}", f"block{number}"
        epsilons = tuple(golden[f"{block}.step{step}.epsilon"] for step in range(said["steps"] - 1))
        return BlockRequest(
            golden[f"{prompt}.token_ids"].numpy(),
            golden[f"{prompt}.attention_mask"].numpy(),
            **{"noise": golden[f"{block}.noise"], "epsilons": epsilons, **more},
        )

    def engine(self, block_size: int = 16, **options: Any) -> Engine[Any, Any, Any]:
        height, width = self.calls["pixel_size"]
        fields = {name: options.pop(name) for name in list(options) if name in EngineConfig.__dataclass_fields__}
        config = EngineConfig(block_size=block_size, **{"max_sessions": 4, **fields})
        return load_engine(self.folder, config, height=height, width=width, **options)


class Watcher:
    """What an engine computes of a session, under the recording's names. Hand `observe` to the engine."""

    def __init__(self) -> None:
        self.ours: dict[str, torch.Tensor] = {}
        self.visible: dict[int, list[int]] = {}  # block -> tokens of history that its drafts saw beside their own
        self.kv: KVState | None = None  # None: whatever session comes
        self._block, self._step, self._prompt = 0, 0, ""

    def begin(self, block: int, prompt: str) -> None:
        self._block, self._step, self._prompt = block, 0, prompt

    def observe(self, kv: KVState, request: Request, result: Any) -> None:
        if isinstance(result, Exception) or self.kv not in (None, kv):
            return
        name = f"block{self._block}"
        if isinstance(request, Encode) and request.encoder == "text":
            self.ours[f"prompt.{self._prompt}.embedding"] = result
        if not isinstance(request, Forward):
            return
        (row,), (velocity,) = request.rows, result
        if request.stage == "denoise":
            step = f"{name}.step{self._step}"
            self.ours |= {f"{step}.input": row.inputs.latents[None].clone(), f"{step}.velocity": velocity[None].clone()}
            seen = row.context.activate()
            self.visible.setdefault(self._block, []).append(seen.num_visible - seen.num_queries)
            self._step += 1
            return
        caches = f"{name}.cache" if request.stage == "commit" else f"{name}.recache.cache"
        for layer in range(kv.cache.storage.num_layers):
            self.ours[f"{caches}.layer{layer}"] = torch.stack(kv.layer_kv(BRANCH, layer))[:, None]

    def end(self, block: Block) -> None:
        self.ours[f"block{self._block}.latents"] = block.latents[None]
        if block.video is not None:
            self.ours[f"block{self._block}.decoded_video"] = block.video[None]


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert ours.shape == expected.shape
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


@functools.cache
def random_folder(settings: CausalSettings = TINY) -> Path:
    return write_random_causal_wan(Path(tempfile.mkdtemp(prefix="worldkv-test-")) / "causal", settings)


def make_engine(settings: CausalSettings = TINY, block_size: int = 16, **options: Any) -> Engine[Any, Any, Any]:
    """Of random weights; `options` of EngineConfig and of the family's load."""
    fields = {name: options.pop(name) for name in list(options) if name in EngineConfig.__dataclass_fields__}
    config = EngineConfig(block_size=block_size, **{"max_sessions": 4, **fields})
    return load_engine(random_folder(settings), config, **{**SIZE, **options})


def make_request(prompt: int = 0, **more: Any) -> BlockRequest:
    token_ids = np.zeros((1, 16), dtype=np.int64)
    token_ids[0, :4] = [5 + prompt, 7, 9, 1]
    return BlockRequest(token_ids, (token_ids != 0).astype(np.int64), **more)


def run(engine: Engine[Any, Any, Any], session: SessionHandle, request: BlockRequest) -> Block:
    block: Block = engine.submit(session, request).result().result
    return block


def same(one: Block, other: Block) -> bool:
    """Bit for bit."""
    videos = (one.video, other.video)
    alike = torch.equal(*videos) if isinstance(videos[0], torch.Tensor) else videos == (None, None)
    return torch.equal(one.latents, other.latents) and alike and one.first_frame == other.first_frame
