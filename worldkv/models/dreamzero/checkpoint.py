"""A DreamZero checkpoint folder, opened: what it says, its tensors by name, and the model that it holds.

Everything wrong with a folder is found before a tensor is read, and reported in one CheckpointError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from worldkv.errors import CheckpointError
from worldkv.kv.window import WindowPolicy
from worldkv.models.checkpoints.files import CONFIG_FILE, raise_if_any, read_headers, read_json
from worldkv.models.checkpoints.lora import Adapter, is_lora, plain_names
from worldkv.models.checkpoints.modules import check_complete, load_module, tensor_shapes
from worldkv.models.checkpoints.tensors import Place, StoredTensors
from worldkv.models.dreamzero.config import DiTConfig, DreamZeroConfig
from worldkv.models.dreamzero.dit import DreamZeroDiT
from worldkv.models.dreamzero.folder import (
    DIT_PREFIX,
    IMAGE_PREFIX,
    PREFIXES,
    WORLDKV_FILE,
    contradictions,
    describe,
    expect_checkpoint_folder,
)
from worldkv.models.dreamzero.prompts import NEGATIVE_PROMPT
from worldkv.models.dreamzero.steps import Steps
from worldkv.models.wan import encoders, sizes
from worldkv.models.wan.base_folder import read_base
from worldkv.models.wan.encoders import WanEncoders
from worldkv.models.wan.fused import Precision
from worldkv.models.wan.graphs import accelerate
from worldkv.models.wan.sizes import EncoderSizes
from worldkv.models.wan.tokenizer import Tokenizer, Tokens, load_tokenizer

if TYPE_CHECKING:
    from worldkv.models.dreamzero.model import DreamZero

LOOKS_FOR = f"{CONFIG_FILE} with action_head_cfg, or {WORLDKV_FILE}"
_LORA_ALPHA = f"{CONFIG_FILE}: action_head_cfg.config.lora_alpha"
Progress = Callable[[int, int], None]  # bytes read, bytes in all; restarts for each part


def is_mine(folder: Path) -> bool:
    """Whether this is a DreamZero checkpoint folder, whole or not. Raises CheckpointError for a damaged config.json."""
    if (folder / WORLDKV_FILE).is_file():
        return True
    return (folder / CONFIG_FILE).is_file() and "action_head_cfg" in read_json(folder / CONFIG_FILE)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(StoredTensors):
    """An opened checkpoint folder. Tensors are read when asked for."""

    config: DreamZeroConfig
    conf: Mapping[str, Any]  # experiment_cfg/conf.yaml; empty where there is none
    metadata: Mapping[str, Any]  # experiment_cfg/metadata.json; empty where there is none
    embodiments: Mapping[str, Any]  # of a converted folder, by tag; others say it in conf and metadata
    random_weights: bool  # written by `random`: nobody trained these

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
        from_base = read_base(map(Path, base), PREFIXES)
        names: Mapping[str, str] = {name: name for name in shapes}
        adapters: dict[str, Adapter] = {}
        if is_lora(shapes):
            beside = {name: stored.shape for name, stored in from_base.items()}
            names, adapters = plain_names(shapes, described.lora_alpha, problems, beside, _LORA_ALPHA)
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
        return cls(
            folder=folder,
            shapes=shapes,
            dtypes=dtypes,
            places=places,
            adapters=adapters,
            config=replace(config, dit=replace(config.dit, image_dim=image_dim)),
            conf=described.conf,
            metadata=described.metadata,
            embodiments=described.embodiments,
            random_weights=described.random_weights,
        )


# what the model needs of a checkpoint


def meta_dit(config: DiTConfig) -> DreamZeroDiT:
    """On the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return DreamZeroDiT(config)


def needed_shapes(config: DreamZeroConfig, encoder_sizes: EncoderSizes) -> dict[str, tuple[int, ...]]:
    """Full name -> shape of every tensor that is read: the DiT's and its encoders'."""
    dit = {DIT_PREFIX + name: shape for name, shape in tensor_shapes(meta_dit(config.dit)).items()}
    return dit | encoder_sizes.tensor_shapes(PREFIXES)


def read_sizes(checkpoint: Checkpoint) -> EncoderSizes:
    """Raises CheckpointError for tensors that are missing, have odd shapes or contradict config.json."""
    found, said = sizes.read_sizes(checkpoint, PREFIXES, checkpoint.config.image_num_heads), checkpoint.config
    if said.text_num_heads != found.text.num_heads:
        raise CheckpointError(
            f"{CONFIG_FILE}: text_encoder_cfg.num_heads {said.text_num_heads} contradicts the tensors: "
            f"width {found.text.attention_dim}, position bias for {found.text.num_heads} heads"
        )
    return found


def check_all_tensors(checkpoint: Checkpoint) -> None:
    """Checks names and shapes of the whole checkpoint, DiT and encoders together, without reading a tensor.

    Raises one CheckpointError that lists what is missing, unexpected or of another shape.
    """
    found = read_sizes(checkpoint)
    assert found.image is not None
    check_complete(checkpoint, needed_shapes(checkpoint.config, found), _not_needed(found.image.num_layers))


def _not_needed(num_image_layers: int) -> tuple[str, ...]:
    """Globs of names that a released checkpoint may hold and inference never reads: the image tower's last layer, final
    norm, projection and text part, and a vision-language backbone."""
    return (
        f"{IMAGE_PREFIX}transformer.{num_image_layers - 1}.*",
        f"{IMAGE_PREFIX}post_norm.*",
        f"{IMAGE_PREFIX}head",
        "action_head.image_encoder.model.log_scale",
        "action_head.image_encoder.model.textual.*",
        "backbone.*",
    )


# from tensors to modules


def load_dit(
    checkpoint: Checkpoint, *, device: torch.device | str, dtype: torch.dtype, progress: Progress | None = None
) -> DreamZeroDiT:
    """See `load_module`."""
    dit = meta_dit(checkpoint.config.dit)
    names = {name: DIT_PREFIX + name for name in dit.state_dict()}
    load_module(checkpoint, dit, names, device=device, dtype=dtype, progress=progress)
    return dit


def load_encoders(
    checkpoint: Checkpoint, *, device: torch.device | str, dtype: torch.dtype, progress: Progress | None = None
) -> WanEncoders:
    """See `load_module`; progress restarts for each encoder. Raises CheckpointError."""
    found = read_sizes(checkpoint)
    return encoders.load_encoders(checkpoint, found, PREFIXES, device=device, dtype=dtype, progress=progress)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The folder's own, or a byte-level one with a warning."""
    return load_tokenizer(checkpoint.folder, checkpoint.config.dit.text_len, read_sizes(checkpoint).text.vocab_size)


def load(
    folder: Checkpoint | Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: Steps = 8,
    cfg_scale: float | None = None,
    window_policy: WindowPolicy = "reset",
    precision: Precision = "model",
    tokenizer: Tokenizer | None = None,
    negative_prompt: Tokens | None = None,
    progress: Progress | None = None,
) -> DreamZero:
    """The model in a folder, ready for an engine. Raises CheckpointError with everything that is wrong.

    `cfg_scale` 1 turns guidance off, and one branch runs instead of two; None is the reference's 5. `tokenizer`:
    the folder's, where it is loaded already. `negative_prompt`: token ids and mask in place of the model's own, for
    verification.
    """
    from worldkv.models.dreamzero.model import DreamZero  # a folder is looked at without it

    checkpoint = folder if isinstance(folder, Checkpoint) else Checkpoint.open(folder)
    check_all_tensors(checkpoint)
    dit = load_dit(checkpoint, device=device, dtype=dtype, progress=progress)
    model = DreamZero(
        checkpoint.config if cfg_scale is None else replace(checkpoint.config, cfg_scale=cfg_scale),
        dit,
        load_encoders(checkpoint, device=device, dtype=dtype, progress=progress),
        negative_prompt or (tokenizer or tokenizer_of(checkpoint)).encode(NEGATIVE_PROMPT),
        window_policy=window_policy,
        steps=steps,
    )
    accelerate(dit, precision)
    return model
