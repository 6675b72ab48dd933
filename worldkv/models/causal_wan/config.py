"""What a causal Wan video model is: the base model's sizes from config.json, and what no weights say from causal.json.

Frames a block, steps, window, sink and RoPE are settings of the training run, in none of the released files: they come
from causal.json or from a preset by its name, and are never guessed. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from worldkv.errors import CheckpointError
from worldkv.kv.spec import KVSpec, Step
from worldkv.kv.window import Window
from worldkv.models.checkpoints.files import CONFIG_FILE, read_json
from worldkv.models.checkpoints.words import shown
from worldkv.models.wan.config import MAX_SIZE, WanConfig
from worldkv.models.wan.shard import ALONE, Mesh

SETTINGS_FILE = "causal.json"
BRANCH = "video"
CLASS_NAMES = ("WanModel", "CausalWanModel")  # _class_name of the base model's config.json
DIFFUSERS_CLASS = "WanTransformer3DModel"
UNLIMITED_WINDOW_FRAMES = 21  # what the reference holds when nothing is to leave
NUM_TIMESTEPS = 1000
DEFAULT_HEIGHT, DEFAULT_WIDTH = 480, 832

Rope = Literal["absolute", "relative"]
_FOUR = (1000, 750, 500, 250)
_MAX_FRAMES = 512  # of a block or a window


def _are_steps(steps: object) -> bool:
    if not isinstance(steps, tuple) or not steps:
        return False
    if not all(type(step) is int and 1 <= step <= NUM_TIMESTEPS for step in steps):
        return False
    return all(before > after for before, after in pairwise(steps))


@dataclass(frozen=True)
class CausalSettings:
    """Of a training run. `steps` are positions in the schedule, before warping. `window_frames` counts the sink and the
    block itself; -1: nothing leaves, and a session ends when 21 frames are there."""

    frames_per_block: int
    steps: tuple[int, ...]
    window_frames: int
    sink_frames: int = 0
    first_block_steps: tuple[int, ...] | None = None  # of the first denoised block; None: as all others
    warp_steps: bool = True
    shift: float = 5.0
    rope: Rope = "absolute"
    context_noise: int = 0  # the timestep of clean passes

    def __post_init__(self) -> None:
        for name in ("frames_per_block", "window_frames", "sink_frames", "context_noise"):
            self._expect(name, type(getattr(self, name)) is int, "a whole number")
        self._expect("frames_per_block", 1 <= self.frames_per_block <= _MAX_FRAMES, f"1 to {_MAX_FRAMES}")
        self._expect("context_noise", 0 <= self.context_noise <= NUM_TIMESTEPS, f"0 to {NUM_TIMESTEPS}")
        self._expect("warp_steps", type(self.warp_steps) is bool, "true or false")
        self._expect("shift", type(self.shift) in (int, float) and 0 < self.shift <= MAX_SIZE, "a positive number")
        self._expect("rope", self.rope in ("absolute", "relative"), "'absolute' or 'relative'")
        self._expect("steps", _are_steps(self.steps), f"falling positions from {NUM_TIMESTEPS} to 1")
        first = self.first_block_steps
        self._expect("first_block_steps", first is None or _are_steps(first), "positions like those of steps, or null")
        least = self.sink_frames + self.frames_per_block
        self._expect("sink_frames", 0 <= self.sink_frames <= _MAX_FRAMES, f"0 to {_MAX_FRAMES}")
        if self.window_frames == -1:
            self._expect("sink_frames", self.sink_frames == 0, "0 where window_frames is -1: nothing leaves")
        else:
            fits = least <= self.window_frames <= _MAX_FRAMES
            self._expect("window_frames", fits, f"-1, or {least} (the sink and a block) to {_MAX_FRAMES}")

    def _expect(self, name: str, holds: bool, words: str) -> None:
        if not holds:
            raise CheckpointError(f"{SETTINGS_FILE}: {name}: expected {words}, got {shown(getattr(self, name))}")

    @property
    def held_frames(self) -> int:
        """Frames that a block sees at most, its own included."""
        return UNLIMITED_WINDOW_FRAMES if self.window_frames == -1 else self.window_frames


_SELF_FORCING = CausalSettings(3, _FOUR, window_frames=-1)
_FRAMEWISE = replace(_SELF_FORCING, frames_per_block=1)
_LONGLIVE = CausalSettings(3, _FOUR, window_frames=12, sink_frames=3)
PRESETS: Mapping[str, CausalSettings] = {  # as the runs' own configurations have them
    "self-forcing": _SELF_FORCING,
    "causal-forcing": _SELF_FORCING,
    "causal-forcing-framewise": _FRAMEWISE,
    "causal-forcing-framewise-2step": replace(_FRAMEWISE, steps=(1000, 500), first_block_steps=_FOUR),
    "causal-forcing-framewise-1step": replace(_FRAMEWISE, steps=(1000,), first_block_steps=_FOUR),
    "longlive": _LONGLIVE,
    "longlive-infinity": replace(_LONGLIVE, rope="relative"),
}


def wan_1_3b() -> WanConfig:
    """Wan2.1-T2V-1.3B's, of which the released runs are."""
    return WanConfig(model_type="t2v", dim=1536, ffn_dim=8960, num_heads=12, num_layers=30, in_dim=16, out_dim=16)


@dataclass(frozen=True)
class CausalWanConfig:
    """The whole model. The size in pixels is the deployment's choice: a frame's tokens are the cache's unit."""

    dit: WanConfig
    blocks: CausalSettings
    height: int = DEFAULT_HEIGHT
    width: int = DEFAULT_WIDTH

    def __post_init__(self) -> None:
        token = self.dit.pixel_stride * self.dit.patch_size[1]
        for name, pixels in (("height", self.height), ("width", self.width)):
            if type(pixels) is not int or not 0 < pixels <= MAX_SIZE or pixels % token:
                raise CheckpointError(f"{name}: expected a multiple of {token} pixels, got {shown(pixels)}")

    @property
    def frame_tokens(self) -> int:
        return self.dit.tokens_of_image(self.height, self.width)

    @property
    def latent_size(self) -> tuple[int, int]:
        """Rows and columns of a latent frame."""
        return self.height // self.dit.pixel_stride, self.width // self.dit.pixel_stride

    @classmethod
    def read(cls, folder: Path, preset: str | None = None, sizes: Path | None = None) -> CausalWanConfig:
        """Of a folder. `preset`: in place of what it says of its run. `sizes`: the folder whose config.json has them,
        where it is another one. Raises CheckpointError that names the field."""
        said = read_settings(folder, preset)
        return cls(read_sizes(sizes or folder), said)


def read_sizes(folder: Path) -> WanConfig:
    """Of the DiT, from config.json."""
    said = read_json(folder / CONFIG_FILE)
    if said.get("_class_name") == DIFFUSERS_CLASS:
        said = _from_diffusers(said)
    known = {field.name: field for field in fields(WanConfig)}
    if said.get("model_type") != "t2v":
        raise CheckpointError(f"{CONFIG_FILE}: model_type: expected 't2v', got {shown(said.get('model_type'))}")
    for name, field in known.items():
        if name in said and field.type in ("int", "float") and type(said[name]) not in (int, float):
            raise CheckpointError(f"{CONFIG_FILE}: {name}: expected a number, got {shown(said[name])}")
        if name in said and field.type == "int" and type(said[name]) is not int:
            raise CheckpointError(f"{CONFIG_FILE}: {name}: expected a whole number, got {shown(said[name])}")
        if name not in said and field.default is MISSING:
            raise CheckpointError(f"{CONFIG_FILE}: {name} is missing")
    for name in ("qk_norm", "cross_attn_norm"):
        if said.get(name, True) is not True:
            raise CheckpointError(f"{CONFIG_FILE}: {name} must be true; only models with it are known")
    if said.get("patch_size", [1, 2, 2]) != [1, 2, 2]:
        raise CheckpointError(f"{CONFIG_FILE}: patch_size must be [1, 2, 2]")
    for name in ("image_tokens", "concat_first_frame_latent"):
        if said.get(name):
            raise CheckpointError(f"{CONFIG_FILE}: {name}: a text-to-video model has none, got {shown(said[name])}")
    return WanConfig(**{name: value for name, value in said.items() if name in known and name != "patch_size"})


_DIFFUSERS_NAMES = {"num_heads": "num_attention_heads", "in_dim": "in_channels", "out_dim": "out_channels"}


def _from_diffusers(said: Mapping[str, object]) -> dict[str, object]:
    """A WanTransformer3DModel's fields under the names of the base model's."""
    if said.get("image_dim") is not None or said.get("added_kv_proj_dim") is not None:
        raise CheckpointError(f"{CONFIG_FILE}: image_dim: expected null: a text-to-video model reads no image")
    found = {**said, "model_type": "t2v", "qk_norm": said.get("qk_norm") == "rms_norm_across_heads"}
    for own, theirs in _DIFFUSERS_NAMES.items():
        if theirs not in said:
            raise CheckpointError(f"{CONFIG_FILE}: {theirs} is missing")
        found[own] = said[theirs]
    heads, head_dim = said["num_attention_heads"], said.get("attention_head_dim")
    if type(heads) is not int or type(head_dim) is not int:
        raise CheckpointError(f"{CONFIG_FILE}: attention_head_dim: expected a whole number, got {shown(head_dim)}")
    found.pop("image_dim", None)
    return {**found, "dim": heads * head_dim}


def read_settings(folder: Path, preset: str | None = None) -> CausalSettings:
    """A preset's, or those of causal.json, which may name a preset and say what differs. Never guessed."""
    path = folder / SETTINGS_FILE
    if preset is not None:
        return preset_settings(preset, "preset")
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: its weights do not say how it was trained, and {SETTINGS_FILE} is absent. Write one, or choose "
            f"a preset: {', '.join(PRESETS)}"
        )
    said = read_json(path)
    base = said.pop("preset", None)
    known = {field.name: field for field in fields(CausalSettings)}
    if unknown := sorted(said.keys() - known.keys()):
        raise CheckpointError(f"{SETTINGS_FILE}: {shown(unknown[0])} is not known; known are {', '.join(known)}")
    for name in ("steps", "first_block_steps"):
        if isinstance(said.get(name), list):
            said[name] = tuple(said[name])
    if base is not None:
        return replace(preset_settings(base, f"{SETTINGS_FILE}: preset"), **said)
    missing = [name for name in known if name not in said and known[name].default is MISSING]
    if missing:
        raise CheckpointError(
            f"{SETTINGS_FILE}: {missing[0]} is missing, and no preset is named; presets are {', '.join(PRESETS)}"
        )
    return CausalSettings(**said)


def preset_settings(name: object, where: str) -> CausalSettings:
    if not isinstance(name, str) or name not in PRESETS:
        raise CheckpointError(f"{where}: expected one of {', '.join(PRESETS)}, got {shown(name)}")
    return PRESETS[name]


def kv_spec(config: CausalWanConfig, recache: bool = True, mesh: Mesh = ALONE) -> KVSpec:
    """What a session keeps on each rank. With `recache` admission charges for history that is computed anew under
    another prompt, while the old one stands for a roll-back."""
    blocks, num_frames = config.blocks, config.blocks.frames_per_block
    unlimited = blocks.window_frames == -1
    window = Window(
        config.frame_tokens,
        blocks.held_frames - blocks.sink_frames,
        sink=blocks.sink_frames,
        policy="reset" if unlimited else "slide",
    )
    tick = (Step(num_frames), Step(num_frames, commits=True))
    anew = (Step(blocks.held_frames, commits=True, rewrites=True), *tick)
    return KVSpec(
        num_layers=config.dit.num_layers,
        num_heads=config.dit.num_heads // mesh.tensor,
        head_dim=config.dit.head_dim,
        window=window,
        branches=(BRANCH,),
        ticks=(tick, anew) if recache else (tick,),
        conditioning={"text": config.dit.text_len},
        reads_copy=blocks.rope == "relative",
    )
