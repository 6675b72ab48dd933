"""A folder of causal video described in words. Reads descriptions and headers, no weights."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from worldkv.models.causal_wan.config import CausalWanConfig, kv_spec
from worldkv.models.causal_wan.folder import PREFIXES, Choices, Survey, check_all_tensors, read_sizes
from worldkv.models.causal_wan.room import COPIES, state_bytes
from worldkv.models.checkpoints.source import Stored
from worldkv.models.wan.layout import decoder_state_size
from worldkv.models.wan.tokenizer import find_tokenizer, load_tokenizer
from worldkv.show.inspecting import Problems, part_line, show_cache, show_heading, show_rows
from worldkv.show.terminal import size_text, spinner
from worldkv.words import count

_PARTS = {PREFIXES.dit: "world model (DiT)", PREFIXES.text: "text encoder", PREFIXES.vae: "VAE"}


def inspect_video_folder(folder: Path, choices: Choices, block_size: int) -> bool:
    """Print everything; whether nothing is wrong."""
    problems = Problems()
    print(f"{folder}")
    survey = problems.of(lambda: Survey.open(folder, choices))
    if survey is not None:
        _show_weights(survey)
        _show_model(survey)
        show_cache(kv_spec(survey.config), block_size)
        found = problems.of(lambda: read_sizes(survey))
        if found is not None:
            decoder = decoder_state_size(found.vae, *survey.config.latent_size)
            state = size_text(state_bytes(survey.config, decoder, 2))
            show_rows(
                {"beside it": f"{state} in bfloat16, charged {COPIES} times: how far a session's video was decoded"}
            )
        _show_tokenizer(survey)
        with spinner("checking every tensor's name and shape, and the tokenizer"):
            problems.of(lambda: _check_content(survey))
    return problems.report()


def _show_weights(survey: Survey) -> None:
    files = {place.file for place in survey.places.values()}
    show_heading(f"weights    {count(len(survey.shapes), 'tensor')} in {count(len(files), 'file')}")
    groups: dict[str, list[Stored]] = defaultdict(list)
    for name, shape in survey.shapes.items():
        part = next(label for prefix, label in _PARTS.items() if name.startswith(prefix))
        groups[part].append(Stored(survey.places[name], shape, survey.dtypes[name]))
    for part in _PARTS.values():
        print(part_line(part, groups[part]))
    print(part_line("all", [stored for group in groups.values() for stored in group]))
    for file in sorted(files):
        print(f"  from {file}")
    if survey.adapters:
        print(f"  a LoRA of {count(len(survey.adapters), 'weight')} is merged")


def _show_model(survey: Survey) -> None:
    config, dit, blocks = survey.config, survey.config.dit, survey.config.blocks
    show_heading(f"model      {dit.model_type}: causal Wan video, Wan 2.1 VAE")
    if survey.random_weights:
        print("  random weights written by worldkv: nothing was learned")
    places = {"absolute": "frame numbers", "relative": "places in the window, keys turned once a block"}
    steps = ", ".join(map(str, blocks.steps))
    first = "" if blocks.first_block_steps is None else f"; the first {', '.join(map(str, blocks.first_block_steps))}"
    show_rows(
        {
            "layers, heads": f"{dit.num_layers} layers of {dit.num_heads} heads of {dit.head_dim}",
            "video": f"{config.width} x {config.height} pixels, {config.frame_tokens} tokens a latent frame",
            "a block": f"{count(blocks.frames_per_block, 'latent frame')} in steps {steps}{first}, then a clean pass",
            "window": _window(config),
            "positions": places[blocks.rope],
        }
    )


def _window(config: CausalWanConfig) -> str:
    blocks = config.blocks
    if blocks.window_frames == -1:
        return f"{blocks.held_frames} frames, then a session ends: choose one with --window-frames to go on"
    sink = f", the first {blocks.sink_frames} kept for ever" if blocks.sink_frames else ""
    return f"{blocks.window_frames} frames, the block among them{sink}"


def _show_tokenizer(survey: Survey) -> None:
    place = next((each for each in (survey.folder, *survey.bases) if find_tokenizer(each) is not None), None)
    absent = "none: prompts are cut into bytes, right for random weights only"
    show_heading(f"tokenizer  {absent if place is None else f'in {find_tokenizer(place)}'}")
    if (survey.folder / "golden.safetensors").is_file():
        print("recording  golden.safetensors: compare with `worldkv verify`")


def _check_content(survey: Survey) -> None:
    check_all_tensors(survey)
    for place in (survey.folder, *survey.bases):
        if find_tokenizer(place) is not None:
            load_tokenizer(place, survey.config.dit.text_len, read_sizes(survey).text.vocab_size)
            return
