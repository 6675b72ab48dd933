"""A recording of the reference's causal video, and an observer that sees the same quantities in a running engine.

A recording is `golden.safetensors` (tensors by name) and `calls.json` (what each block was) in a folder. The observer
watches the program that serves; it changes nothing of it. Does not know the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from worldkv.errors import CheckpointError
from worldkv.kv.state import KVState
from worldkv.models.base import Encode, Forward, Request
from worldkv.models.causal_wan.config import BRANCH
from worldkv.models.causal_wan.inputs import Block, BlockRequest
from worldkv.models.causal_wan.model import CausalWan
from worldkv.models.causal_wan.schedule import Schedule
from worldkv.models.checkpoints.words import one_line
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE
from worldkv.models.wan.names import LATENT_MEAN, LATENT_STD

Tensors = dict[str, torch.Tensor]

FILES = ("golden.safetensors", "calls.json")
_GIVEN = ("token_ids", "attention_mask", "noise", "epsilon", "image")  # recorded to be fed, not to be compared
_START, _IMAGE = "start.latents", "start.image"


@dataclass(frozen=True)
class RecordedBlock:
    """What calls.json says of a block. `num_visible`: tokens of history that it sees beside its own."""

    prompt: str
    first_frame: int
    num_visible: int
    num_steps: int
    num_recached: int


@dataclass(frozen=True)
class GoldenRecording:
    """`golden`: tensors by name. `pixel_size`: height and width."""

    golden: Tensors
    blocks: Sequence[RecordedBlock]
    pixel_size: tuple[int, int]

    @classmethod
    def open(cls, folder: Path) -> GoldenRecording:
        """Raises CheckpointError where the folder has none, or one that is damaged or not whole."""
        for name in FILES:
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder} has no {name}: verify needs outputs recorded from the reference")
        try:
            golden, calls = (load_file(folder / FILES[0]), json.loads((folder / FILES[1]).read_text()))
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder}: the recording cannot be read: {one_line(error)}") from error
        try:
            height, width = calls["pixel_size"]
            blocks = [
                RecordedBlock(
                    str(said["prompt"]),
                    int(said["start_frame"]),
                    int(said["visible_history_tokens"]),
                    int(said["steps"]),
                    int(said.get("recache_frames", 0)),
                )
                for said in calls["blocks"]
            ]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{folder}: calls.json is no recording of causal video: {one_line(error)}") from error
        missing = [name for name in _needed_names(blocks) if name not in golden]
        if missing:
            raise CheckpointError(f"{folder}: the recording lacks {', '.join(missing)}")
        return cls(golden, blocks, (height, width))

    @property
    def start_image(self) -> torch.Tensor | None:
        """[1, 3, T, H, W] in [-1, 1]: what the latents that the session starts from are the encoding of."""
        return self.golden.get(_IMAGE)

    def request(self, number: int) -> BlockRequest:
        """Of that block, with the recorded noise."""
        said, golden = self.blocks[number], self.golden
        prompt, block = f"prompt.{said.prompt}", f"block{number}"
        return BlockRequest(
            golden[f"{prompt}.token_ids"].numpy(),
            golden[f"{prompt}.attention_mask"].numpy(),
            noise=golden[f"{block}.noise"],
            epsilons=tuple(golden[f"{block}.step{step}.epsilon"] for step in range(said.num_steps - 1)),
            given=golden.get(_START) if number == 0 else None,
        )

    def request_of_another(self, number: int, index: int) -> BlockRequest:
        """For a session beside the recorded one: another prompt, and noise of its own."""
        said = self.request(number)
        ids = said.token_ids.copy()
        ids[said.attention_mask > 0] = (ids[said.attention_mask > 0] + index + 1) % 256
        return BlockRequest(ids, said.attention_mask, seed=index)

    def expected(self) -> Tensors:
        """The recorded tensors that have to be computed; the facts of calls.json are among them, as numbers."""
        expected = {name: tensor for name, tensor in self.golden.items() if name.split(".")[-1] not in _GIVEN}
        if self.start_image is None:
            expected.pop(_START, None)
        for number, said in enumerate(self.blocks):
            facts = (said.first_frame, said.num_recached, said.num_visible, said.num_steps)
            expected[f"block{number}.start_recached_visible_steps"] = torch.tensor(facts, dtype=torch.float32)
        return expected


def _needed_names(blocks: Sequence[RecordedBlock]) -> list[str]:
    """The tensors that must be recorded for the blocks to be run."""
    names = []
    for number, said in enumerate(blocks):
        names += [f"prompt.{said.prompt}.{part}" for part in ("token_ids", "attention_mask")]
        names += [f"block{number}.noise", *(f"block{number}.step{i}.epsilon" for i in range(said.num_steps - 1))]
    return list(dict.fromkeys(names))


class GoldenObserver:
    """Collects in `ours`, under the names of `GoldenRecording.expected`, what one session's blocks compute.

    `observe` is an engine's observer: (the session's K/V, a request, its result), on the engine's thread.
    """

    def __init__(self, recording: GoldenRecording) -> None:
        self.ours: Tensors = {}
        self._recording = recording
        self._model: CausalWan | None = None
        self._kv: KVState | None = None
        self._block, self._step, self._visible = "", 0, -1

    def watch(self, model: CausalWan, kv: KVState) -> None:
        """Observe this session from now on; collect the model's own constants."""
        self._model, self._kv = model, kv
        for name, schedule in (("", model.schedule), ("first_block_", model.first_schedule)):
            self.ours[f"schedule.{name}timesteps"] = torch.tensor(schedule.timesteps)
            self.ours[f"schedule.{name}sigmas"] = torch.tensor(schedule.sigmas)
        self.ours["latent_mean"] = torch.tensor(LATENT_MEAN[model.config.dit.out_dim])
        self.ours["latent_std"] = torch.tensor(LATENT_STD[model.config.dit.out_dim])

    def keep_start(self, latents: torch.Tensor) -> None:
        """The encoding of the recorded image."""
        self._keep(_START, latents)

    def begin_block(self, number: int) -> None:
        self._block, self._step, self._visible = f"block{number}", 0, -1

    def end_block(self, block: Block) -> None:
        self._keep(f"{self._block}.latents", block.latents[None])
        facts = (block.first_frame, block.num_recached, self._visible, self._step)
        self._keep(f"{self._block}.start_recached_visible_steps", torch.tensor(facts))
        if block.video is None:
            return
        video, start = block.video[None], self._recording.golden.get(_START)
        if self._block == "block0" and start is not None:  # the beginning is in front
            num_pictures = 1 + VAE_TEMPORAL_STRIDE * (start.shape[2] - 1)
            self._keep("start.decoded_video", video[:, :, :num_pictures])
            video = video[:, :, num_pictures:]
        self._keep(f"{self._block}.decoded_video", video)

    def observe(self, kv: KVState, request: Request, result: object) -> None:
        if isinstance(result, Exception):
            return
        if isinstance(request, Encode) and request.encoder == "text":
            assert isinstance(result, torch.Tensor)
            self._see_text(request.payload[0], result)  # whoever needed it first
        elif isinstance(request, Forward) and kv is self._kv:
            if request.stage == "denoise":
                self._see_draft(request, result)
            elif request.stage == "recache":
                self._see_cache(kv, f"{self._block}.recache")
            else:
                self._see_cache(kv, self._block if self._step else "start")

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self.ours[name] = tensor.detach().float().cpu()

    def _see_text(self, token_ids: torch.Tensor, embedding: torch.Tensor) -> None:
        for prompt in {said.prompt for said in self._recording.blocks}:
            if torch.equal(token_ids, self._recording.golden[f"prompt.{prompt}.token_ids"]):
                self._keep(f"prompt.{prompt}.embedding", embedding)

    def _see_draft(self, request: Forward, velocities: object) -> None:
        assert self._model is not None
        assert isinstance(velocities, Sequence)
        (row,), (velocity,), name = request.rows, velocities, f"{self._block}.step{self._step}"
        x = row.inputs.latents
        self._keep(f"{name}.input", x[None])
        self._keep(f"{name}.velocity", velocity[None])
        self._keep(f"{name}.x0", self._schedule().clean(self._step, x, velocity)[None])
        seen = row.activate()
        self._visible = seen.num_visible - seen.num_queries
        self._step += 1

    def _schedule(self) -> Schedule:
        assert self._model is not None
        return self._model.first_schedule if self._block == "block0" else self._model.schedule

    def _see_cache(self, kv: KVState, name: str) -> None:
        for layer in range(kv.cache.spec.num_layers):
            self._keep(f"{name}.cache.layer{layer}", torch.stack(kv.layer_kv(BRANCH, layer))[:, None])
