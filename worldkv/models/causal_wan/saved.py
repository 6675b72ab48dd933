"""A causal video session's state in an export, and what of it another model could not go on with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from worldkv.errors import BadRequest
from worldkv.models.causal_wan.config import CausalWanConfig
from worldkv.models.causal_wan.inputs import Blend, State, prompt_key
from worldkv.models.causal_wan.past import Past, check_past, digest_of
from worldkv.models.saving import Saved, check_count, check_same, check_tensor, load, save
from worldkv.models.wan.encoders import VAEStream

_MOST = 2**31  # blocks of one session: more than a century of video


def save_state(state: State, config: CausalWanConfig, recaches: bool, decodes: bool) -> Saved:
    """For an export."""
    saved = save(state)
    return Saved({"sizes": _sizes(config, recaches, decodes), "state": saved.values}, saved.tensors)


def load_state(
    saved: Saved,
    config: CausalWanConfig,
    recaches: bool,
    decodes: bool,
    dtype: torch.dtype,
    *,
    is_compact: bool = False,
) -> State:
    """On the host; its decoder's tensors are not checked. `is_compact`: without what is computed anew. Raises
    BadRequest for what no session of this model is."""
    values = check_same(saved.values, {"sizes": _sizes(config, recaches, decodes)}, "model")
    known = {"Blend": Blend, "VAEStream": VAEStream, "Past": Past}
    state = load(Saved(values.get("state"), saved.tensors), State, known)
    check_count(state.num_skipped, "state.num_skipped", _MOST)
    if (state.past is not None) != (state.num_blocks > 0):
        raise BadRequest("import: state.past: expected one in a session that has blocks, and only there")
    if state.past is not None:
        check_past(state.past, config, dtype)
    check_count(state.seed, "state.seed", 2**63 - 1)
    check_count(state.num_blocks, "state.num_blocks", _MOST)
    text = (1, config.dit.text_len)
    for index, array in enumerate(state.prompt or ()):
        check_tensor(array, f"state.prompt.{index}", np.dtype(np.int64), text)
    if state.prompt_key != (None if state.prompt is None else prompt_key(state.prompt)):
        raise BadRequest("import: state.prompt_key: expected the digest of state.prompt")
    if state.blend is not None:
        _check_blend(state.blend, config)
        own_name = f"text:imported:{digest_of(state.blend.old)}"  # whatever it says: others read entries by their names
        state = replace(state, blend=replace(state.blend, old_name=own_name))
    latents = (config.dit.out_dim, None, *config.latent_size)
    check_tensor(state.recent, "state.recent", dtype, latents)
    for name, wanted in (("recent", recaches), ("decoder", decodes)):
        if (getattr(state, name) is not None) != (wanted and state.num_blocks > 0 and not is_compact):
            raise BadRequest(f"import: state.{name}: expected one in a session that has blocks, and only there")
    if state.recent is not None and state.recent.shape[1] > config.blocks.held_frames:
        raise BadRequest(f"import: state.recent: expected at most {config.blocks.held_frames} frames")
    return state


def _sizes(config: CausalWanConfig, recaches: bool, decodes: bool) -> dict[str, object]:
    """Of the model, and how it was loaded; a session of other ones cannot go on here."""
    blocks = config.blocks
    return {
        "model_type": config.dit.model_type,
        "latent_channels": config.dit.out_dim,
        "latent_size": list(config.latent_size),
        "frames_per_block": blocks.frames_per_block,
        "rope": blocks.rope,
        "recache": recaches,
        "decodes": decodes,
    }


def _check_blend(blend: Blend, config: CausalWanConfig) -> None:
    check_tensor(blend.old, "state.blend.old", blend.old.dtype, (config.dit.text_len, config.dit.text_dim))
    if not (blend.old.is_floating_point() and 1 <= blend.num_begun < blend.num_blocks <= _MOST):
        raise BadRequest("import: state.blend: expected a blend that has begun and not ended")
