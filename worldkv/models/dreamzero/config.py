"""A DreamZero checkpoint's config.json as frozen dataclasses, validated once.

Knows names, defaults and the values that must agree; knows nothing of tensors (`checkpoint` compares the two). Defaults
are the reference's class defaults, for fields that a released config.json leaves out. Sizes that no tensor could
confirm later (heads, tokens per frame) must be stated and have no default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.words import one_line, shown
from worldkv.models.wan.config import MAX_SIZE, VAE_TEMPORAL_STRIDE, WanConfig, expect_ranges

# Some fifty times what DreamZero has. Beyond them a description is damaged, and what follows from it takes for ever.
_MAX_WINDOW_FRAMES, _MAX_WINDOW_TOKENS, _MAX_DRAFT_TOKENS = 513, 2**19, 2**13
_UNLIMITED_WINDOW_FRAMES = 21  # what the reference attends to when max_chunk_size is -1
_HEAD = "action_head_cfg.config"
_DIT = f"{_HEAD}.diffusion_model_cfg"


@dataclass(frozen=True, kw_only=True)
class DiTConfig(WanConfig):
    """Sizes of the causal Wan DiT with its action and state tokens."""

    origin: ClassVar[str] = f"config.json: {_DIT}."
    model_types: ClassVar[tuple[str, ...]] = ("i2v", "ti2v")  # the 14B, the 5B

    frame_tokens: int  # config key frame_seqlen
    concat_first_frame_latent: bool
    image_tokens: int = 257
    action_dim: int = 32
    max_state_dim: int = 64
    hidden_size: int = 1024  # of the state and action MLPs
    num_actions_per_chunk: int = 24  # config key num_action_per_block
    num_states: int = 1  # config key num_state_per_block


@dataclass(frozen=True)
class DreamZeroConfig:
    """The whole model: the DiT, how time is cut into chunks, and the sampling constants."""

    dit: DiTConfig
    frames_per_chunk: int = 2  # latent frames denoised per tick; config key num_frame_per_block
    max_chunk_size: int = 4  # chunks in a window; -1: the reference's widest window
    num_frames: int = 33  # RGB frames of a training clip
    action_horizon: int = 24
    decouple_inference_noise: bool = False
    video_inference_final_noise: float = 0.8
    target_video_height: int | None = None  # the tiled image is resized (bilinear) to this inside the head;
    target_video_width: int | None = None  # None: it is not resized
    text_num_heads: int = 64
    image_num_heads: int = 16
    # The reference hard-codes these four as attributes of its head; config.json cannot change them.
    cfg_scale: float = 5.0
    sigma_shift: float = 5.0
    num_inference_steps: int = 16
    seed: int = 1140

    def __post_init__(self) -> None:
        expect_ranges(self, "config.json: ")
        if self.max_chunk_size == 0:
            raise CheckpointError(f"config.json: {_DIT}.max_chunk_size must be positive or -1, got 0")
        tokens = self.window_frames * self.dit.frame_tokens
        if self.window_frames > _MAX_WINDOW_FRAMES or tokens > _MAX_WINDOW_TOKENS:
            raise CheckpointError(
                f"config.json: {_DIT}.max_chunk_size ({self.max_chunk_size}), num_frame_per_block "
                f"({self.frames_per_chunk}) and frame_seqlen ({self.dit.frame_tokens}) make a window of "
                f"{self.window_frames} frames and {tokens} tokens; no model has more than {_MAX_WINDOW_FRAMES} and "
                f"{_MAX_WINDOW_TOKENS}"
            )
        if self.frames_per_chunk >= self.window_frames:
            raise CheckpointError(
                f"config.json: {_DIT}.num_frame_per_block ({self.frames_per_chunk}) must be less than the "
                f"{self.window_frames} frames of the window"
            )
        if self.dit.num_actions_per_chunk + self.dit.num_states > _MAX_DRAFT_TOKENS:
            raise CheckpointError(
                f"config.json: {_DIT}.num_action_per_block ({self.dit.num_actions_per_chunk}) and num_state_per_block "
                f"({self.dit.num_states}) must be {_MAX_DRAFT_TOKENS} together at most"
            )
        if self.num_frames % VAE_TEMPORAL_STRIDE != 1:
            raise CheckpointError(
                f"config.json: {_HEAD}.num_frames must be 1 more than a multiple of 4, got {self.num_frames}"
            )
        if self.action_horizon != self.dit.num_actions_per_chunk:
            raise CheckpointError(
                f"config.json: {_HEAD}.action_horizon ({self.action_horizon}) must equal "
                f"{_DIT}.num_action_per_block ({self.dit.num_actions_per_chunk}): a tick denoises "
                "one block of actions"
            )
        if (self.target_video_height is None) != (self.target_video_width is None):
            raise CheckpointError(
                f"config.json: {_HEAD}.target_video_height ({self.target_video_height}) and "
                f"target_video_width ({self.target_video_width}) must be given together"
            )

    @property
    def action_dim(self) -> int:
        return self.dit.action_dim

    @property
    def max_state_dim(self) -> int:
        return self.dit.max_state_dim

    @property
    def window_frames(self) -> int:
        """Latent frames a window holds: the first frame and max_chunk_size chunks; 21 when max_chunk_size is -1."""
        if self.max_chunk_size == -1:
            return _UNLIMITED_WINDOW_FRAMES
        return self.max_chunk_size * self.frames_per_chunk + 1

    @property
    def latent_frames(self) -> int:
        """Latent frames of a training clip, and so of the first-frame condition: 9 for 33 RGB frames."""
        return 1 + (self.num_frames - 1) // VAE_TEMPORAL_STRIDE

    def to_plain(self) -> dict[str, Any]:
        """Numbers and texts by field name, the DiT's under `dit`: what `from_plain` reads."""
        plain = asdict(self)
        plain["dit"]["patch_size"] = list(self.dit.patch_size)
        return plain

    @classmethod
    def from_plain(cls, plain: object, origin: str) -> DreamZeroConfig:
        """The inverse of `to_plain`. Raises CheckpointError that names `origin` and the field."""
        values = _checked(cls, plain, f"{origin}: model")
        dit = _checked(DiTConfig, values.pop("dit"), f"{origin}: model.dit")
        if dit.pop("patch_size", [1, 2, 2]) != [1, 2, 2]:
            raise CheckpointError(f"{origin}: model.dit.patch_size: expected [1, 2, 2]")
        return cls(DiTConfig(**dit), **values)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> DreamZeroConfig:
        """Reads a parsed config.json. Raises CheckpointError naming the field by its path in the file."""
        head = _Fields(config, "").section("action_head_cfg").section("config")
        model = head.section("diffusion_model_cfg")
        for key in ("qk_norm", "cross_attn_norm"):
            if not model.flag(key, True):
                raise CheckpointError(f"config.json: {model.path(key)} is false; only models with it are known")
        if model.get("patch_size", [1, 2, 2]) != [1, 2, 2]:
            raise CheckpointError(f"config.json: {model.path('patch_size')} must be [1, 2, 2]")

        def shared(key: str, default: int) -> int:
            """A value the head and the DiT may both state; then they must agree."""
            mine, theirs = model.integer(key, default), head.integer(key, default)
            stated = [f"{part.path(key)} {part.get(key)}" for part in (model, head) if key in part]
            if len(stated) == 2 and mine != theirs:
                raise CheckpointError(f"config.json: {' and '.join(stated)} must be equal")
            return mine if key in model else theirs

        model_type = model.text("model_type")
        dit = DiTConfig(
            model_type=model_type,
            dim=model.integer("dim"),
            ffn_dim=model.integer("ffn_dim"),
            num_heads=model.integer("num_heads"),
            num_layers=model.integer("num_layers"),
            in_dim=model.integer("in_dim"),
            out_dim=model.integer("out_dim"),
            frame_tokens=model.integer("frame_seqlen"),
            concat_first_frame_latent=model.flag("concat_first_frame_latent", model_type == "i2v"),
            freq_dim=model.integer("freq_dim", DiTConfig.freq_dim),
            text_dim=model.integer("text_dim", DiTConfig.text_dim),
            text_len=model.integer("text_len", DiTConfig.text_len),
            action_dim=shared("action_dim", DiTConfig.action_dim),
            max_state_dim=shared("max_state_dim", DiTConfig.max_state_dim),
            hidden_size=model.integer("hidden_size", DiTConfig.hidden_size),
            num_actions_per_chunk=model.integer("num_action_per_block", DiTConfig.num_actions_per_chunk),
            num_states=model.integer("num_state_per_block", DiTConfig.num_states),
            eps=model.number("eps", DiTConfig.eps),
        )
        return cls(
            dit=dit,
            frames_per_chunk=shared("num_frame_per_block", cls.frames_per_chunk),
            max_chunk_size=model.integer("max_chunk_size", cls.max_chunk_size, minimum=-1),
            num_frames=head.integer("num_frames", cls.num_frames),
            action_horizon=head.integer("action_horizon", dit.num_actions_per_chunk),
            decouple_inference_noise=head.flag("decouple_inference_noise", cls.decouple_inference_noise),
            video_inference_final_noise=head.number("video_inference_final_noise", cls.video_inference_final_noise),
            target_video_height=head.optional_integer("target_video_height"),
            target_video_width=head.optional_integer("target_video_width"),
            text_num_heads=head.section("text_encoder_cfg", {}).integer("num_heads", cls.text_num_heads),
            image_num_heads=head.section("image_encoder_cfg", {}).integer("num_heads", cls.image_num_heads),
        )


def dreamzero_14b() -> DreamZeroConfig:
    """DreamZero-14B (on Wan2.1-I2V-14B-480P) as trained for DROID: tiled images of 352 x 640 pixels."""
    return DreamZeroConfig(
        DiTConfig(
            model_type="i2v",
            dim=5120,
            ffn_dim=13824,
            num_heads=40,
            num_layers=40,
            in_dim=36,
            out_dim=16,
            frame_tokens=880,
            concat_first_frame_latent=True,
        )
    )


def dreamzero_5b() -> DreamZeroConfig:
    """DreamZero-5B (on Wan2.2-TI2V-5B): tiled images of 320 x 640 pixels, resized to 160 x 320 inside the head."""
    return DreamZeroConfig(
        DiTConfig(
            model_type="ti2v",
            dim=3072,
            ffn_dim=14336,
            num_heads=24,
            num_layers=30,
            in_dim=48,
            out_dim=48,
            frame_tokens=50,
            concat_first_frame_latent=False,
        ),
        target_video_height=160,
        target_video_width=320,
    )


_PLAIN_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}


def _checked(kind: type, plain: object, where: str) -> dict[str, Any]:
    """`plain`, if it is a mapping with the fields of `kind` and their defaults' types."""
    if not isinstance(plain, dict):
        raise CheckpointError(f"{where}: expected a mapping, got {shown(plain)}")
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(one_line(name) for name in plain.keys() - known.keys()):
        raise CheckpointError(f"{where}: {', '.join(unknown[:5])} is not known; known are {', '.join(known)}")
    for name, spec in known.items():
        if name not in plain and spec.default is MISSING:
            raise CheckpointError(f"{where}.{name} is missing")
        value, expected = plain.get(name), _PLAIN_TYPES.get(str(spec.type))
        if name in plain and expected is not None and type(value) not in expected:
            raise CheckpointError(f"{where}.{name}: expected {spec.type}, got {shown(value)}")
    return dict(plain)


class _Fields:
    """One JSON object of config.json whose readers raise errors that name the full path of the field."""

    def __init__(self, values: object, prefix: str) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"config.json: {prefix or 'the file'} must be an object, got {shown(values)}")
        self._values, self._prefix = values, prefix

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def path(self, key: str) -> str:
        return f"{self._prefix}.{key}" if self._prefix else key

    def get(self, key: str, default: Any = None) -> Any:
        """The value; the default where the key is absent or null. Raises if there is neither."""
        value = self._values.get(key)
        if value is None and default is None:
            raise CheckpointError(f"config.json: {self.path(key)} is missing")
        return default if value is None else value

    def section(self, key: str, default: Mapping[str, Any] | None = None) -> _Fields:
        return _Fields(self.get(key, default), self.path(key))

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"config.json: {self.path(key)} must be a string, got {shown(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {self.path(key)} must be true or false, got {shown(value)}")
        return value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_SIZE:
            wanted = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            if type(value) is int and value > MAX_SIZE:
                wanted += f", at most {MAX_SIZE}"
            raise CheckpointError(f"config.json: {self.path(key)} must be {wanted}, got {shown(value)}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self else None

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
            raise CheckpointError(f"config.json: {self.path(key)} must be a positive number, got {shown(value)}")
        return float(value)
