"""A causal Wan folder, opened, and the model that it holds.

Everything wrong with a folder is found before a tensor of it is read, and reported in one CheckpointError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from worldkv.errors import CheckpointError
from worldkv.models.causal_wan.config import CLASS_NAMES, SETTINGS_FILE, CausalWanConfig
from worldkv.models.checkpoints.complete import check_complete
from worldkv.models.checkpoints.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, raise_if_any, read_headers, read_json
from worldkv.models.checkpoints.modules import Progress, load_module
from worldkv.models.checkpoints.source import Stored
from worldkv.models.checkpoints.tensors import StoredTensors
from worldkv.models.wan.base_folder import read_base
from worldkv.models.wan.dit import WanDiT
from worldkv.models.wan.encoders import load_encoders
from worldkv.models.wan.fused import Precision
from worldkv.models.wan.graphs import accelerate
from worldkv.models.wan.layout import Shapes, dit_shapes, encoder_shapes
from worldkv.models.wan.names import Prefixes
from worldkv.models.wan.sizes import EncoderSizes, read_sizes
from worldkv.models.wan.tokenizer import TOKENIZER_FILES, TOKENIZER_FOLDERS, TOKENIZER_REPOSITORY, find_tokenizer

if TYPE_CHECKING:
    from worldkv.models.causal_wan.model import CausalWan

LOOKS_FOR = f'{CONFIG_FILE} with "model_type": "t2v", and {SETTINGS_FILE} or _class_name {" or ".join(CLASS_NAMES)}'
FILES = (
    *(CONFIG_FILE, SETTINGS_FILE, INDEX_FILE, SINGLE_FILE, "model-*.safetensors"),
    *(f"{folder}/{file}".removeprefix("/") for folder in TOKENIZER_FOLDERS for file in TOKENIZER_FILES),
)
RANDOM_WEIGHTS_KEY = "worldkv_random_weights"  # in config.json of folders that `random` wrote
# Layouts of a folder's tensors, by where they keep each part. A folder is of the first one whose DiT it has.
LAYOUTS = {"model, text_encoder and vae in one": Prefixes(dit="model.", vae="vae.", text="text_encoder.")}
_PROBE = "patch_embedding.weight"  # of every DiT


def is_mine(folder: Path) -> bool:
    """Raises CheckpointError for a damaged config.json."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    said = read_json(folder / CONFIG_FILE)
    if said.get("model_type") != "t2v":
        return False
    return (folder / SETTINGS_FILE).is_file() or said.get("_class_name") in CLASS_NAMES


def from_elsewhere(folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """See `models.registry`: the tokenizer."""
    if find_tokenizer(folder) is not None or RANDOM_WEIGHTS_KEY in read_json(folder / CONFIG_FILE):
        return {}
    return {TOKENIZER_FOLDERS[-1]: (TOKENIZER_REPOSITORY, TOKENIZER_FILES)}


def needed_shapes(config: CausalWanConfig, sizes: EncoderSizes, prefixes: Prefixes) -> Shapes:
    """Full name -> shape of every tensor that is read."""
    dit = {prefixes.dit + name: shape for name, shape in dit_shapes(config.dit).items()}
    return dit | encoder_shapes(sizes, prefixes)


def open_tensors(folder: Path, base: Sequence[Path | str] = ()) -> tuple[StoredTensors, Prefixes]:
    """A folder's tensors and their layout; parts that it lacks are taken from `base`, Wan folders. None is read."""
    problems: list[str] = []
    own = read_headers(folder, problems).tensors
    raise_if_any(folder, problems)
    prefixes = next((each for each in LAYOUTS.values() if each.dit + _PROBE in own), None)
    if prefixes is None:
        wanted = ", ".join(f"{each.dit + _PROBE} ({layout})" for layout, each in LAYOUTS.items())
        raise CheckpointError(f"{folder}: its tensors are laid out in no known way; looked for {wanted}")
    tensors: dict[str, Stored] = read_base(map(Path, base), prefixes) | dict(own)
    return (
        StoredTensors(
            folder=folder,
            shapes={name: stored.shape for name, stored in tensors.items()},
            dtypes={name: stored.dtype for name, stored in tensors.items()},
            places={name: stored.place for name, stored in tensors.items()},
            adapters={},
        ),
        prefixes,
    )


def load(
    folder: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    preset: str | None = None,
    height: int | None = None,
    width: int | None = None,
    window_frames: int | None = None,
    sink_frames: int | None = None,
    recache: bool = True,
    decodes: bool = True,
    precision: Precision = "model",
    base: Sequence[Path | str] = (),
    progress: Progress | None = None,
) -> CausalWan:
    """The model in a folder, ready for an engine. Raises CheckpointError with everything that is wrong.

    `preset`: settings of a known training run, in place of causal.json. `height`, `width`: of the video in pixels.
    `window_frames`, `sink_frames`: in place of the run's own. `recache`: whether a session may have its history
    computed anew under another prompt, which takes room of it. `decodes`: whether blocks become pixels.
    """
    from worldkv.models.causal_wan.model import CausalWan  # a folder is looked at without it

    folder = Path(folder)
    config = CausalWanConfig.read(folder, preset, height, width)
    blocks = config.blocks
    blocks = replace(
        blocks,
        window_frames=blocks.window_frames if window_frames is None else window_frames,
        sink_frames=blocks.sink_frames if sink_frames is None else sink_frames,
    )
    config = replace(config, blocks=blocks)
    tensors, prefixes = open_tensors(folder, base)
    sizes = read_sizes(tensors, prefixes)
    check_complete(tensors, needed_shapes(config, sizes, prefixes))
    with torch.device("meta"):
        dit = WanDiT(config.dit)
    names = {name: prefixes.dit + name for name in dit.state_dict()}
    load_module(tensors, dit, names, device=device, dtype=dtype, progress=progress)
    encoders = load_encoders(tensors, sizes, prefixes, device=device, dtype=dtype, progress=progress)
    model = CausalWan(config, dit, encoders, recache=recache, decodes=decodes)
    accelerate(dit, precision)
    encoders.vae.accelerate()
    return model
