"""What DreamZero keeps per session, from its sizes. Imports no torch."""

from __future__ import annotations

from worldkv.kv.spec import KVSpec, Step
from worldkv.kv.window import Window, WindowPolicy
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.wan.shard import ALONE, Mesh

CONDITIONAL, UNCONDITIONAL = BRANCHES = ("conditional", "unconditional")
GUIDED = "guided"  # both at once: each rank has one of them, in the same blocks


def kv_spec(config: DreamZeroConfig, window_policy: WindowPolicy = "reset", mesh: Mesh = ALONE) -> KVSpec:
    """What a model of these sizes keeps per session on each rank; needs no weights. Without guidance one branch runs,
    and where each rank runs its own, one stands for both."""
    guided = config.cfg_scale != 1 and mesh.guidance == 1
    num_frames = config.frames_per_chunk
    draft = Step(num_frames, num_draft_tokens=config.dit.num_actions_per_chunk + config.dit.num_states)
    return KVSpec(
        num_layers=config.dit.num_layers,
        num_heads=config.dit.num_heads // mesh.tensor,
        head_dim=config.dit.head_dim,
        window=Window(config.dit.frame_tokens, config.window_frames, policy=window_policy),
        branches=BRANCHES if guided else (GUIDED if mesh.guidance > 1 else CONDITIONAL,),
        ticks=tuple((Step(observed, commits=True), draft) for observed in range(1, num_frames + 1)),
        restarts=((Step(1, commits=True), draft),),
        conditioning={"text": config.dit.text_len, "image": config.dit.image_tokens},
        entries_per_session={"text": 1, "image": 1},
        entries_shared={"text": 1} if guided else {},  # the negative prompt
    )


def check_guidance(config: DreamZeroConfig, mesh: Mesh) -> None:
    """Raises ValueError for a mesh whose ranks would not have a branch of guidance each."""
    if mesh.guidance not in (1, 2):
        raise ValueError(f"guidance_parallel: expected 1 or 2, a rank for each branch of guidance, got {mesh.guidance}")
    if mesh.guidance > 1 and config.cfg_scale == 1:
        raise ValueError("guidance_parallel: guidance is off (cfg_scale 1), so one branch runs; use tensor_parallel")
