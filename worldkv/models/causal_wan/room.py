"""What a session of causal video keeps beside its K/V, in bytes: one rule, for whoever plans, shows or charges it."""

from __future__ import annotations

from worldkv.models.causal_wan.config import CausalWanConfig

COPIES = 2  # that are charged: a tick in flight keeps what it may roll back to
_FLOAT32 = 4  # bytes, of a mixture of two prompts


def state_bytes(
    config: CausalWanConfig, decoder_size: int, itemsize: int, *, recaches: bool = True, decodes: bool = True
) -> int:
    """Of one copy, at most: how far its video was decoded, the newest frames, a mixture of prompts. `itemsize`: bytes
    of the model's numbers. `decoder_size`: numbers of `StreamDecoder.state_size`."""
    height, width = config.latent_size
    decoder = decoder_size if decodes else 0
    recent = config.blocks.held_frames * config.dit.out_dim * height * width if recaches else 0
    return (decoder + recent) * itemsize + config.dit.text_len * config.dit.text_dim * _FLOAT32
