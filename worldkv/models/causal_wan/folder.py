"""A causal Wan folder, surveyed: what it says, what its tensors are, and what it takes from a base folder.

Everything wrong with it is found here, before a tensor is read, and reported in one CheckpointError. Imports no torch,
unless weights lie in .pt or .pth files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.errors import CheckpointError
from worldkv.models.causal_wan.config import CLASS_NAMES, DIFFUSERS_CLASS, SETTINGS_FILE, CausalWanConfig
from worldkv.models.causal_wan.published import PROBE, dit_tensors, find_parts, lora_adapters, read_part, weight_files
from worldkv.models.checkpoints.complete import Shaped, check_complete
from worldkv.models.checkpoints.dtypes import StoredDtype
from worldkv.models.checkpoints.files import CONFIG_FILE, raise_if_any, read_json
from worldkv.models.checkpoints.lora import Adapter
from worldkv.models.checkpoints.source import Place, Stored
from worldkv.models.wan import sizes
from worldkv.models.wan.base_folder import looks_like_base, read_base
from worldkv.models.wan.layout import Shapes, dit_shapes, encoder_shapes
from worldkv.models.wan.names import Prefixes
from worldkv.models.wan.shard import Mesh, check_parts
from worldkv.models.wan.sizes import EncoderSizes

if TYPE_CHECKING:
    from worldkv.models.checkpoints.tensors import PthFile

PREFIXES = Prefixes(dit="model.", vae="vae.", text="text_encoder.")  # of every part, wherever it came from
RANDOM_WEIGHTS_KEY = "worldkv_random_weights"  # in config.json of folders that `random` wrote
LOOKS_FOR = (
    f'{CONFIG_FILE} with "model_type": "t2v" beside {SETTINGS_FILE} or with _class_name {" or ".join(CLASS_NAMES)}, or '
    "a .pt file of weights"
)
_LORA = "lora:"  # before the names of its factors


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a folder leaves open, or is to be overruled in.

    `preset`: settings of a known training run, in place of causal.json. `height`, `width`: of the video in pixels.
    `window_frames`, `sink_frames`: in place of the run's own. `base`: Wan folders for the encoders and sizes that the
    folder lacks. `lora`: a file to be merged; None: the one in the folder, where there is one. `lora_alpha`: its scale
    times its rank; None: the rank. `averaged`: of a file with averaged weights, take those. `file`: which weights of
    the folder. `tiny_decoder`: a file of one that makes pixels in place of the VAE, see `wan.tiny_decoder`.
    """

    preset: str | None = None
    height: int | None = None
    width: int | None = None
    window_frames: int | None = None
    sink_frames: int | None = None
    base: Sequence[Path | str] = ()
    lora: Path | str | None = None
    lora_alpha: float | None = None
    averaged: bool = True
    file: str | None = None
    tiny_decoder: Path | str | None = None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Of a folder. `Checkpoint` is one whose tensors can be read. Names are those of worldkv's own folders."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, StoredDtype]
    places: Mapping[str, Place] = field(repr=False)  # of every tensor and of every adapter's factors
    adapters: Mapping[str, Adapter] = field(repr=False)
    config: CausalWanConfig
    bases: tuple[Path, ...]  # folders that parts may come from, the first one that has it
    random_weights: bool  # written by `random`: nobody trained these
    tiny_decoder: Path | None = None  # a file: see `Choices`
    opened: Mapping[Path, PthFile] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, folder: str | Path, choices: Choices | None = None) -> Survey:
        """Reads descriptions and headers. Raises CheckpointError with all that is wrong."""
        folder, choices = Path(folder), choices or Choices()
        bases = (*map(Path, choices.base), *((folder,) if looks_like_base(folder) else ()))
        config, random_weights = read_config(folder, bases, choices)
        problems: list[str] = []
        part, lora = find_parts(folder, choices.file, choices.lora is None)
        lora = lora if choices.lora is None else read_part(Path(choices.lora))
        encoders = (PREFIXES.vae, PREFIXES.text)
        own = {name: stored for name, stored in part.tensors.items() if name.startswith(encoders)}
        rest = replace(part, tensors={name: stored for name, stored in part.tensors.items() if name not in own})
        dit = dit_tensors(rest, choices.averaged, problems)
        if PROBE not in dit and not problems:
            raise CheckpointError(
                f"{folder}: its tensors are laid out in no known way; looked for {PREFIXES.dit}{PROBE} in {part.name}"
            )
        adapters, factors = lora_adapters(lora, choices.lora_alpha, dit, problems) if lora is not None else ({}, {})
        raise_if_any(folder, problems)
        tensors = read_base(bases, PREFIXES) if bases else {}
        # the base's DiT is another model: what the distilled one lacks is missing
        tensors = {name: stored for name, stored in tensors.items() if name.startswith(encoders)} | own
        tensors |= {PREFIXES.dit + name: stored for name, stored in dit.items()}
        _expect_encoders(folder, tensors)
        return cls(
            folder=folder,
            shapes={name: stored.shape for name, stored in tensors.items()},
            dtypes={name: stored.dtype for name, stored in tensors.items()},
            places={name: stored.place for name, stored in tensors.items()}
            | {_LORA + name: stored.place for name, stored in factors.items()},
            adapters={
                PREFIXES.dit + name: replace(adapter, down=_LORA + adapter.down, up=_LORA + adapter.up)
                for name, adapter in adapters.items()
            },
            config=config,
            bases=bases,
            random_weights=random_weights,
            tiny_decoder=None if choices.tiny_decoder is None else Path(choices.tiny_decoder),
            opened=dict(part.opened) if lora is None else {**part.opened, **lora.opened},
        )


def read_config(folder: Path, bases: Sequence[Path], choices: Choices) -> tuple[CausalWanConfig, bool]:
    """The model's configuration, its sizes from the folder's config.json or a base's, and whether nobody trained it."""
    described = next((each for each in (folder, *bases) if (each / CONFIG_FILE).is_file()), None)
    if described is None:
        raise CheckpointError(
            f"{folder}: {CONFIG_FILE} is absent; name the folder of the base model (Wan2.1-T2V-1.3B) with --base DIR"
        )
    config = CausalWanConfig.read(folder, choices.preset, sizes=described)
    return chosen(config, choices), RANDOM_WEIGHTS_KEY in read_json(described / CONFIG_FILE)


def chosen(config: CausalWanConfig, choices: Choices) -> CausalWanConfig:
    """With the size and the window that were chosen. Raises CheckpointError for such as cannot be."""
    names = ("window_frames", "sink_frames")
    blocks = {name: getattr(choices, name) for name in names if getattr(choices, name) is not None}
    size = {name: getattr(choices, name) for name in ("height", "width") if getattr(choices, name) is not None}
    return replace(config, blocks=replace(config.blocks, **blocks), **size)


def _expect_encoders(folder: Path, tensors: Mapping[str, Stored]) -> None:
    kinds = {"VAE": PREFIXES.vae, "text encoder": PREFIXES.text}
    lacking = [kind for kind, prefix in kinds.items() if not any(name.startswith(prefix) for name in tensors)]
    if lacking:
        raise CheckpointError(
            f"{folder} has no {' and no '.join(lacking)}: name the folder of the base model (Wan2.1-T2V-1.3B) that has "
            "with --base DIR"
        )


def is_mine(folder: Path) -> bool:
    """Whether this is a causal Wan folder, whole or not. Raises CheckpointError for a damaged config.json."""
    said = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    if said and said.get("model_type") != "t2v" and said.get("_class_name") != DIFFUSERS_CLASS:
        return False
    if (folder / SETTINGS_FILE).is_file() or said.get("_class_name") in (*CLASS_NAMES, DIFFUSERS_CLASS):
        return True
    return any(path.suffix == ".pt" for path in weight_files(folder))


def needed_shapes(config: CausalWanConfig, found: EncoderSizes, prefixes: Prefixes = PREFIXES) -> Shapes:
    """Full name -> shape of every tensor that is read."""
    dit = {prefixes.dit + name: shape for name, shape in dit_shapes(config.dit).items()}
    return dit | encoder_shapes(found, prefixes)


def read_sizes(survey: Shaped) -> EncoderSizes:
    """Raises CheckpointError for tensors that are missing or have odd shapes."""
    return sizes.read_sizes(survey, PREFIXES)


def check_all_tensors(survey: Survey) -> None:
    """Checks names and shapes of the whole, without reading a tensor. Raises one CheckpointError that lists what is
    missing, unexpected or of another shape."""
    check_complete(survey, needed_shapes(survey.config, read_sizes(survey)))


def check_mesh(config: CausalWanConfig, mesh: Mesh) -> None:
    """Raises ValueError for ranks that this model cannot be divided among."""
    if mesh.guidance != 1:
        raise ValueError(
            f"guidance_parallel: expected 1, got {mesh.guidance}: a causal video model has no guidance when it runs "
            "(it was distilled into the weights), so there is no second branch; use tensor_parallel"
        )
    check_parts(config.dit, mesh.tensor)
