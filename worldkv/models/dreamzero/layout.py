"""Names and shapes of every tensor that DreamZero reads, and its released sizes. Imports no torch."""

from __future__ import annotations

from worldkv.models.dreamzero.config import DiTConfig, DreamZeroConfig
from worldkv.models.dreamzero.folder import DIT_PREFIX, PREFIXES
from worldkv.models.wan.layout import Shapes, dit_shapes, encoder_shapes
from worldkv.models.wan.sizes import EncoderSizes, ImageSizes, TextSizes, VAESizes

_TEXT = TextSizes(256384, 4096, 4096, 10240, num_layers=24, num_heads=64, num_buckets=32)  # UMT5-XXL
_IMAGE = ImageSizes(1280, 5120, num_layers=32, num_heads=16)  # CLIP ViT-H/14
TRUE_SIZES = {
    "i2v": EncoderSizes(VAESizes(16, 96, 96, residual=False), _TEXT, _IMAGE),
    "ti2v": EncoderSizes(VAESizes(48, 160, 256, residual=True), _TEXT, _IMAGE),
}


def needed_shapes(config: DreamZeroConfig, encoder_sizes: EncoderSizes) -> Shapes:
    """Full name -> shape of every tensor that is read: the DiT's and its encoders'."""
    dit = dit_shapes(config.dit) | _robot_shapes(config.dit)
    return {DIT_PREFIX + name: shape for name, shape in dit.items()} | encoder_shapes(encoder_sizes, PREFIXES)


def _robot_shapes(config: DiTConfig) -> Shapes:
    """Of what turns states and actions into tokens, and tokens into actions."""
    dim, hidden, actions = config.dim, config.hidden_size, config.action_dim
    layers = {
        "state_encoder.layer1": (config.max_state_dim, hidden),
        "state_encoder.layer2": (hidden, dim),
        "action_encoder.W1": (actions, dim),
        "action_encoder.W2": (2 * dim, dim),
        "action_encoder.W3": (dim, dim),
        "action_decoder.layer1": (dim, hidden),
        "action_decoder.layer2": (hidden, actions),
    }
    weights: Shapes = {f"{name}.W": (1, num_in, num_out) for name, (num_in, num_out) in layers.items()}
    return weights | {f"{name}.b": (1, num_out) for name, (_, num_out) in layers.items()}
