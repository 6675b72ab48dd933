"""A DreamZero checkpoint folder, opened: what it says, its tensors by name, and modules filled from them.

Everything wrong with a folder is found before a tensor is read and reported in one CheckpointError; a module
is filled completely or not at all. Knows the DiT's tensor names and shapes; the encoders' are data in
`encoder_keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.lora import Adapter, is_lora, plain_names
from worldkv.models.dreamzero.base_folder import Place, PthFile, read_base
from worldkv.models.dreamzero.config import DiTConfig, DreamZeroConfig
from worldkv.models.dreamzero.folder import (
    DIT_PREFIX,
    contradictions,
    describe,
    expect_checkpoint_folder,
    raise_if_any,
    read_headers,
)


@dataclass(frozen=True)
class TensorSource:
    """Where a module's tensor comes from: part `part` of `parts` equal ones along dimension 0 of checkpoint
    tensor `key`, after dropping its first `squeeze` dimensions, which have size 1."""

    key: str
    part: int = 0
    parts: int = 1
    squeeze: int = 0

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape this source has if the checkpoint's tensor has shape `stored`; None if that cannot be."""
        kept = stored[self.squeeze :]
        if any(size != 1 for size in stored[: self.squeeze]) or len(stored) < self.squeeze:
            return None
        if self.parts == 1:
            return kept
        return (kept[0] // self.parts, *kept[1:]) if kept and kept[0] % self.parts == 0 else None

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse of `shape`: what the checkpoint must store."""
        grown = (shape[0] * self.parts, *shape[1:]) if self.parts > 1 else shape
        return (1,) * self.squeeze + grown


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder. Tensors are read when asked for; `shapes` and `dtypes` come from the
    headers."""

    folder: Path
    config: DreamZeroConfig
    conf: Mapping[str, Any]  # experiment_cfg/conf.yaml; empty where there is none
    metadata: Mapping[str, Any]  # experiment_cfg/metadata.json; empty where there is none
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    embodiments: Mapping[str, Any]  # of a converted folder, by tag; others say it in conf and metadata
    random_weights: bool  # written by random_checkpoint: nobody trained these
    _places: Mapping[str, Place] = field(repr=False)  # of every tensor and of every adapter's factors
    _adapters: Mapping[str, Adapter] = field(repr=False)  # of a LoRA run, by the weight that they are merged into
    _handles: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, folder: str | Path, base: Sequence[str | Path] = ()) -> Checkpoint:
        """Reads descriptions and headers of `folder`; tensors that it lacks are taken from `base`, Wan folders.

        Raises CheckpointError with all that is wrong: files absent, damaged or contradicting one another.
        """
        folder = Path(folder)
        expect_checkpoint_folder(folder)
        problems: list[str] = []
        described = describe(folder, problems)
        files, shapes, dtypes = read_headers(folder, problems)
        from_base = read_base(map(Path, base))
        names: Mapping[str, str] = {name: name for name in shapes}
        adapters: dict[str, Adapter] = {}
        if is_lora(shapes):
            beside = {name: stored.shape for name, stored in from_base.items()}
            names, adapters = plain_names(shapes, described.lora_alpha, problems, beside)
        places = {name: Place(files[name], name) for name in shapes}
        places |= {name: Place(files[stored], stored) for name, stored in names.items()}
        shapes = {name: shapes[stored] for name, stored in names.items()}
        dtypes = {name: dtypes[stored] for name, stored in names.items()}
        for name in from_base.keys() - shapes.keys():
            stored = from_base[name]
            places[name], shapes[name], dtypes[name] = stored.place, stored.shape, stored.dtype
        config = described.config
        if not problems:
            problems += contradictions(config, shapes, described.conf)
        raise_if_any(folder, problems)
        image_dim = shapes[f"{DIT_PREFIX}img_emb.proj.0.weight"][0]
        config = replace(config, dit=replace(config.dit, image_dim=image_dim))
        return cls(
            folder,
            config,
            described.conf,
            described.metadata,
            shapes,
            dtypes,
            described.embodiments,
            described.random_weights,
            places,
            adapters,
        )

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored, or merged with its adapter, on the CPU. Perhaps a view of the file: copy it to keep."""
        tensor = self._as_stored(name)
        adapter = self._adapters.get(name)
        if adapter is None:
            return tensor
        return adapter.merged(tensor, self._as_stored(adapter.down), self._as_stored(adapter.up))

    def read(self, source: TensorSource) -> torch.Tensor:
        """The part of a tensor that `source` describes; only that part is read from the file."""
        if source.parts == 1:
            stored = self.tensor(source.key)
            return stored.reshape(stored.shape[source.squeeze :])
        assert source.squeeze == 0, "a source is split or squeezed, not both"
        rows = self.shapes[source.key][0] // source.parts
        if source.key in self._adapters:
            return self.tensor(source.key)[source.part * rows : (source.part + 1) * rows]
        stored = self._handle(source.key).get_slice(self._places[source.key].key)
        part: torch.Tensor = stored[source.part * rows : (source.part + 1) * rows]
        return part

    def _as_stored(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle(name).get_tensor(self._places[name].key)
        return tensor

    def _handle(self, name: str) -> Any:
        if name not in self._places:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}")
        path = self._places[name].file
        if path not in self._handles:
            is_pth = path.suffix == ".pth"
            self._handles[path] = PthFile(path) if is_pth else safe_open(path, framework="pt", device="cpu")
        return self._handles[path]


def load_module(
    checkpoint: Checkpoint,
    module: torch.nn.Module,
    names: Mapping[str, str | TensorSource],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills `module`, built on the meta device, from the checkpoint and leaves it frozen and in eval mode.

    names: for every parameter and persistent buffer of the module, where it comes from (full checkpoint
    names).
        Module names with the same source share one tensor.
    dtype: of floating point tensors; others keep theirs. progress: called with (bytes read, bytes in all).
    Raises CheckpointError, before anything is assigned, listing every tensor that is missing or has another
    shape. Peak memory is the module and one tensor.
    """
    targets: dict[TensorSource, list[str]] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}
    assert shapes.keys() == names.keys(), f"names and module differ: {sorted(shapes.keys() ^ names.keys())[:5]}"
    problems = []
    for name, source in names.items():
        source = TensorSource(source) if isinstance(source, str) else source
        targets.setdefault(source, []).append(name)
        stored = checkpoint.shapes.get(source.key)
        wanted = source.stored_shape(shapes[name])
        if stored is None:
            problems.append(f"missing: {source.key} {list(wanted)}")
        elif source.shape(stored) != shapes[name]:
            problems.append(f"shape: {source.key} is {list(stored)}, expected {list(wanted)}")
    raise_if_any(checkpoint.folder, list(dict.fromkeys(problems)))

    sizes = {source: _num_bytes(checkpoint, source) for source in targets}
    total, done = sum(sizes.values()), 0
    for source, owners in targets.items():
        raw = checkpoint.read(source)
        wanted_dtype = dtype if raw.is_floating_point() else raw.dtype
        tensor = raw.to(device=device, dtype=wanted_dtype, copy=True)  # copy: `raw` may be a view of the file
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        for name in owners:
            _assign(module, name, parameter)
        done += sizes[source]
        if progress is not None:
            progress(done, total)
    left = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    assert not left, f"still on the meta device after loading (non-persistent buffers are the caller's): {left}"
    module.eval()


def check_complete(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()
) -> None:
    """Compares the whole checkpoint with `expected` (full name -> shape). Raises one CheckpointError that
    lists wrong shapes, missing and unexpected tensors; names matching a glob of `ignored` are known and not
    needed."""
    ignored = tuple(ignored)
    problems = [
        f"shape: {name} is {list(checkpoint.shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if checkpoint.shapes.get(name, shape) != shape
    ]
    problems += [f"missing: {name} {list(expected[name])}" for name in expected if name not in checkpoint.shapes]
    problems += [
        f"unexpected: {name} {list(shape)}"
        for name, shape in checkpoint.shapes.items()
        if name not in expected and not any(fnmatchcase(name, pattern) for pattern in ignored)
    ]
    raise_if_any(checkpoint.folder, problems)


def dit_tensor_shapes(config: DiTConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the DiT, named without the prefix action_head.model.: 32 per block and 37 around
    them."""
    D, F, H, A = config.dim, config.ffn_dim, config.hidden_size, config.action_dim
    patch = config.patch_size[0] * config.patch_size[1] * config.patch_size[2]
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inputs: int, outputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    def by_category(name: str, inputs: int, outputs: int) -> None:  # one category only
        shapes[f"{name}.W"], shapes[f"{name}.b"] = (1, inputs, outputs), (1, outputs)

    shapes["patch_embedding.weight"] = (D, config.in_dim, *config.patch_size)
    shapes["patch_embedding.bias"] = (D,)
    linear("text_embedding.0", config.text_dim, D)
    linear("text_embedding.2", D, D)
    linear("time_embedding.0", config.freq_dim, D)
    linear("time_embedding.2", D, D)
    linear("time_projection.1", D, 6 * D)
    norm("img_emb.proj.0", config.image_dim)
    linear("img_emb.proj.1", config.image_dim, config.image_dim)
    linear("img_emb.proj.3", config.image_dim, D)
    norm("img_emb.proj.4", D)
    by_category("state_encoder.layer1", config.max_state_dim, H)
    by_category("state_encoder.layer2", H, D)
    by_category("action_encoder.W1", A, D)
    by_category("action_encoder.W2", 2 * D, D)
    by_category("action_encoder.W3", D, D)
    by_category("action_decoder.layer1", D, H)
    by_category("action_decoder.layer2", H, A)
    for index in range(config.num_layers):
        block = f"blocks.{index}"
        shapes[f"{block}.modulation"] = (1, 6, D)
        norm(f"{block}.norm3", D)
        linear(f"{block}.ffn.0", D, F)
        linear(f"{block}.ffn.2", F, D)
        for attention, projections, norms in (
            ("self_attn", ("q", "k", "v", "o"), ("norm_q", "norm_k")),
            ("cross_attn", ("q", "k", "v", "o", "k_img", "v_img"), ("norm_q", "norm_k", "norm_k_img")),
        ):
            for projection in projections:
                linear(f"{block}.{attention}.{projection}", D, D)
            shapes.update({f"{block}.{attention}.{name}.weight": (D,) for name in norms})
    linear("head.head", D, patch * config.out_dim)
    shapes["head.modulation"] = (1, 2, D)
    return shapes


def _assign(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = parameter
    else:
        owner._buffers[leaf] = parameter.data


def _num_bytes(checkpoint: Checkpoint, source: TensorSource) -> int:
    count = torch.Size(checkpoint.shapes[source.key]).numel() // source.parts
    return count * checkpoint.dtypes[source.key].itemsize
