"""A checkpoint folder described in words. Reads config, headers and experiment_cfg, no weights.

Goes on after a fault as far as it can, since a damaged folder is what it is most needed for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from worldkv.models.checkpoints.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Headers, read_headers
from worldkv.models.checkpoints.source import Stored
from worldkv.models.checkpoints.words import one_line
from worldkv.models.dreamzero.folder import WORLDKV_FILE, Description, describe, expect_checkpoint_folder
from worldkv.models.dreamzero.spec import kv_spec
from worldkv.models.dreamzero.survey import Survey, check_all_tensors, read_sizes
from worldkv.models.wan.tokenizer import find_tokenizer, load_tokenizer
from worldkv.robots.of_checkpoint import checkpoint_embodiment
from worldkv.show.inspecting import Problems, part_line, show_cache, show_heading, show_rows
from worldkv.show.terminal import spinner
from worldkv.words import count

_PARTS = {
    "action_head.model.": "world model (DiT)",
    "action_head.text_encoder.": "text encoder",
    "action_head.image_encoder.": "image encoder",
    "action_head.vae.": "VAE",
}


def inspect_folder(folder: Path, base: Sequence[Path], embodiment: str | None, block_size: int) -> bool:
    """Print everything; whether nothing is wrong. Raises CheckpointError for what is no folder."""
    problems = Problems()
    if not folder.is_dir():
        expect_checkpoint_folder(folder)  # raises, and says what it found
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"--block-size: expected a power of two, got {block_size}")
    print(f"{folder}")
    problems.of(lambda: expect_checkpoint_folder(folder))
    described: Description | None = None
    found: list[str] = []
    if any((folder / name).is_file() for name in (CONFIG_FILE, WORLDKV_FILE)):
        described = problems.of(lambda: describe(folder, found))
    problems.texts += found
    if any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        _show_weights(folder, problems)
    if described is not None:
        _show_model(described)
        show_cache(kv_spec(described.config), block_size)
        _show_embodiments(described, embodiment, problems)
    _show_tokenizer(folder)
    with spinner("checking every tensor's name and shape, and the tokenizer"):
        problems.of(lambda: _check_content(folder, base))
    return problems.report()


def _show_weights(folder: Path, problems: Problems) -> None:
    """Parts, tensors, numbers and bytes, from the headers of the files that can be read."""
    found: list[str] = []
    headers = problems.of(lambda: read_headers(folder, found)) or Headers({})
    problems.texts += found
    num_tensors = count(len(headers.tensors), "tensor")
    show_heading(f"weights    {num_tensors} in {count(headers.num_files, 'file')}")
    groups: dict[str, list[Stored]] = defaultdict(list)
    for name, stored in headers.tensors.items():
        part = next((label for prefix, label in _PARTS.items() if name.startswith(prefix)), "something else")
        groups[part].append(stored)
    for part in (*_PARTS.values(), "something else"):
        if part in groups:
            print(part_line(part, groups[part]))
    if len(groups) > 1:
        print(part_line("all", headers.tensors.values()))
    if headers.wrappers:
        print(f"  saved from inside a wrapper: {' and '.join(headers.wrappers)} is dropped from the tensors' names")


def _show_model(described: Description) -> None:
    config, dit = described.config, described.config.dit
    kind = {"i2v": "as DreamZero-14B, Wan 2.1 VAE", "ti2v": "as DreamZero-5B, Wan 2.2 VAE"}[dit.model_type]
    show_heading(f"model      {dit.model_type}: {kind}")
    if described.random_weights:
        print("  random weights written by worldkv: nothing was learned")
    rows = {
        "layers, heads": f"{dit.num_layers} layers of {dit.num_heads} heads of {dit.head_dim}",
        "frame": f"{dit.frame_tokens} tokens",
        "window": f"{config.window_frames} frames; when it is full it restarts from the newest",
        "a tick": f"{config.frames_per_chunk} frames and {config.action_horizon} actions, "
        f"{config.num_inference_steps} solver steps, guidance {config.cfg_scale:g}",
    }
    show_rows(rows)


def _show_embodiments(described: Description, name: str | None, problems: Problems) -> None:
    """Each embodiment with statistics, or the one that is asked for, and whether it can be served."""
    known = described.embodiments or described.metadata
    show_heading(f"embodiments  {', '.join(map(one_line, known)) or 'none'}")
    each = name is None and (described.embodiments or described.conf)
    for tag in known if each else [name]:
        robot = problems.of(lambda tag=tag: checkpoint_embodiment(described, tag))  # type: ignore[misc]
        if robot is None:
            continue
        cameras = ", ".join(f"{camera.name} {camera.width} x {camera.height}" for camera in robot.cameras)
        state = ", ".join(f"{quantity.key} {quantity.dim}" for quantity in robot.state)
        actions = ", ".join(f"{q.key} {q.dim}{' (relative)' if q.relative else ''}" for q in robot.actions)
        tag = robot.tag
        show_rows({f"{tag} cameras": cameras, f"{tag} state": state, f"{tag} actions": f"{actions}, {robot.fps:g} Hz"})


def _show_tokenizer(folder: Path) -> None:
    found = find_tokenizer(folder)
    absent = "none: prompts are cut into bytes, right for random weights only"
    where = absent if found is None else f"in {found.relative_to(folder)}" if found != folder else "in the folder"
    show_heading(f"tokenizer  {where}")
    if (folder / "golden.safetensors").is_file():
        print("recording  golden.safetensors: compare with `worldkv verify`")


def _check_content(folder: Path, base: Sequence[Path]) -> None:
    """Open the folder, compare all tensors with what the model and its encoders need, and try its tokenizer."""
    survey = Survey.open(folder, base)
    check_all_tensors(survey)
    if find_tokenizer(folder) is not None:
        load_tokenizer(folder, survey.config.dit.text_len, read_sizes(survey).text.vocab_size)
