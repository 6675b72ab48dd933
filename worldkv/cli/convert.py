"""`worldkv convert`: any published form of a checkpoint to one clean folder, resumable, compared at the end."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldkv import __version__
from worldkv.cli.common import add_checkpoint, add_robot_and_base
from worldkv.cli.errors import OK, UsageError
from worldkv.cli.numbers import gigabytes
from worldkv.cli.places import add_output
from worldkv.cli.preflight import check_folder, check_robot_and_base
from worldkv.cli.video import add_video_options, command_family, expect_options_of, video_choices
from worldkv.errors import CheckpointError
from worldkv.show.terminal import progress, size_text, spinner
from worldkv.words import count

if TYPE_CHECKING:
    from worldkv.models.checkpoints.modules import TensorReader
    from worldkv.models.dreamzero.checkpoint import Checkpoint

_RECORDINGS = ("golden.safetensors", "calls.json", "policy.safetensors")  # what `verify` compares with
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model")
_HEADER = """\
# A DreamZero checkpoint in worldkv's own form: `model` are sizes, `embodiments` the robots with their statistics
# (docs/embodiments.md). The tensors lie beside this file, under their names in the reference.
"""


MORE = (
    "Takes every published form: one file or shards, .pt files, full fine-tunes, LoRA runs (merged), with or without\n"
    "their base, robots from conf.yaml or from --embodiment, video's settings from --preset. Tokenizer and recordings\n"
    "come along. May be stopped and run again: whole shards are kept. Every tensor is read back and compared at the\n"
    "end."
)
EXAMPLE = "worldkv convert DreamZero-LoRA --base Wan2.1-I2V-14B-480P --output DreamZero-mine"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, what="checkpoint folder")
    add_output(parser, "folder", "the checkpoint", required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(bfloat16)")
    parser.add_argument("--shard-gb", type=gigabytes, default=5.0, metavar="GB", help="size of a shard, at most (5)")
    add_robot_and_base(parser)
    add_video_options(parser)


@dataclass(frozen=True)
class Converted:
    """What is written of a folder. `texts`: files that describe it; with the last one it is a checkpoint. `source`
    stands in that one, as `name_of` reads it. `reopen` raises CheckpointError for an output that is not whole."""

    checkpoint: TensorReader
    shapes: Mapping[str, tuple[int, ...]]
    source: str
    texts: Mapping[str, str]
    facts: Sequence[str]  # lines for people
    tokenizer: Path | None
    name_of: Callable[[Path], object]
    reopen: Callable[[Path], object]

    @property
    def last(self) -> str:
        return list(self.texts)[-1]


def run(arguments: argparse.Namespace) -> int:
    folder, output = arguments.checkpoint, arguments.output
    check_folder(folder)
    check_robot_and_base(arguments)
    if output.resolve() == folder.resolve():
        raise ValueError("--output: expected another folder than the one that is read")
    with spinner("reading the checkpoint"):
        import torch

        from worldkv.models.checkpoints.shards import compare_shards, plan_shards, write_shards
        from worldkv.models.checkpoints.writing import write_text

        family = command_family(folder, ("dreamzero", "causal_wan"))
        expect_options_of(family, arguments)
        whole = _robots(arguments) if family == "dreamzero" else _video(arguments)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[arguments.dtype]
    shards = plan_shards(whole.shapes, dtype.itemsize, round(arguments.shard_gb * 1e9))
    num_bytes = dtype.itemsize * sum(torch.Size(shape).numel() for shape in whole.shapes.values())
    _prepare(output, num_bytes, {shard.file for shard in shards}, whole)
    with _aside(output / whole.last) as restore:  # without it the folder is no checkpoint while it is written
        with progress("writing", is_bytes=True) as step:
            kept = write_shards(whole.checkpoint, whole.shapes, shards, output, dtype, step)
        restore.allowed = kept == len(shards)  # nothing was replaced
        with progress("comparing", is_bytes=True) as step:
            compare_shards(whole.checkpoint, shards, output, step)
    _copy_along(folder, whole.tokenizer, output)
    for file, text in whole.texts.items():
        write_text(text, output / file)
    whole.reopen(output)
    before = f", {kept} kept from before" if kept else ""
    print(f"{output}: {count(len(whole.shapes), 'tensor')} in {count(len(shards), 'shard')}{before}")
    for fact in whole.facts:
        print(fact)
    print("every tensor was read back and compared; look at it with `worldkv inspect`, serve it with `worldkv serve`")
    return OK


def _video(arguments: argparse.Namespace) -> Converted:
    """Of causal video: one folder, adapters merged, with the settings of its run."""
    from worldkv.models.causal_wan.checkpoint import Checkpoint
    from worldkv.models.causal_wan.describing import described_source, descriptions
    from worldkv.models.causal_wan.folder import check_all_tensors
    from worldkv.models.wan.tokenizer import find_tokenizer

    if arguments.height is not None or arguments.width is not None:
        raise UsageError("--height: the size in pixels is chosen when a folder is loaded, it is not written")
    if arguments.tiny_decoder is not None:
        raise UsageError("--tiny-decoder: the decoder is chosen when a folder is loaded, it is not written")
    checkpoint, source = Checkpoint.open(arguments.checkpoint, video_choices(arguments)), arguments.checkpoint.resolve()
    check_all_tensors(checkpoint)
    blocks = checkpoint.config.blocks
    places = (each for each in (checkpoint.folder, *checkpoint.bases) if find_tokenizer(each) is not None)
    return Converted(
        checkpoint,
        checkpoint.shapes,
        source.name,
        descriptions(checkpoint, source.name, __version__),
        [f"video      {count(blocks.frames_per_block, 'frame')} a block, window {blocks.window_frames}, {blocks.rope}"],
        find_tokenizer(next(places, checkpoint.folder)),
        described_source,
        lambda output: check_all_tensors(Checkpoint.open(output)),
    )


def _robots(arguments: argparse.Namespace) -> Converted:
    """Of DreamZero: one folder, adapters merged, with its robots."""
    import yaml

    from worldkv.models.checkpoints.files import read_yaml
    from worldkv.models.dreamzero.checkpoint import Checkpoint, check_all_tensors, needed_shapes, read_sizes
    from worldkv.models.dreamzero.folder import IMAGE_PREFIX, WORLDKV_FILE
    from worldkv.models.wan.tokenizer import find_tokenizer

    checkpoint = Checkpoint.open(arguments.checkpoint, arguments.base)
    check_all_tensors(checkpoint)
    described = _describe(checkpoint, arguments)
    needed = set(needed_shapes(checkpoint.config, read_sizes(checkpoint)))
    # the image tower's last layer is never run, but counted
    needed |= {name for name in checkpoint.shapes if name.startswith(f"{IMAGE_PREFIX}transformer.")}
    text = _HEADER + yaml.safe_dump(described, sort_keys=False, default_flow_style=None, width=118)
    return Converted(
        checkpoint,
        {name: checkpoint.shapes[name] for name in needed},
        described["source"],
        {WORLDKV_FILE: text},
        [f"robots     {', '.join(described['embodiments'])}"],
        find_tokenizer(arguments.checkpoint),
        lambda output: read_yaml(output / WORLDKV_FILE).get("source"),
        lambda output: check_all_tensors(Checkpoint.open(output)),
    )


def _describe(checkpoint: Checkpoint, arguments: argparse.Namespace) -> dict[str, Any]:
    """What worldkv.yaml says."""
    from worldkv.robots.embodiment_file import describe
    from worldkv.robots.of_checkpoint import checkpoint_embodiment

    names: list[Any] = [arguments.embodiment]
    if arguments.embodiment is None and (checkpoint.embodiments or checkpoint.conf):
        names = list(checkpoint.embodiments or checkpoint.metadata)
    robots = {}
    for name in names:
        robot = checkpoint_embodiment(checkpoint, name)
        robots[robot.tag] = describe(robot)
    return {
        "format": 1,
        "source": arguments.checkpoint.resolve().name,
        "written": f"worldkv {__version__}, {datetime.now(UTC):%Y-%m-%d}",
        **({"random_weights": True} if checkpoint.random_weights else {}),
        "model": checkpoint.config.to_plain(),
        "embodiments": robots,
    }


def _prepare(output: Path, num_bytes: int, planned: set[str], whole: Converted) -> None:
    """Makes the folder. What is not of a conversion, of another one, or a disk too small, is told before any work."""
    output.mkdir(parents=True, exist_ok=True)
    known = {*whole.texts, _aside_of(output / whole.last).name, *_along()}
    known |= {path.name for path in output.glob("*.partial")}  # halves that a killed run has left
    foreign = [p.name for p in output.iterdir() if not p.name.startswith("model") and p.name not in known]
    if foreign:
        raise ValueError(f"--output: {output} holds something else ({foreign[0]}); choose an empty folder")
    if (output / whole.last).is_file() and (other := whole.name_of(output)) != whole.source:
        raise ValueError(f"--output: {output} holds a conversion of {other}; choose another folder or remove it")
    there = sum((output / name).stat().st_size for name in planned if (output / name).is_file())
    free = shutil.disk_usage(output).free
    if num_bytes - there > free:
        missing = size_text(num_bytes - there)
        raise CheckpointError(f"--output: {missing} are needed in {output}, {size_text(free)} are free")


@dataclass
class _Restore:
    allowed: bool = True


@contextmanager
def _aside(path: Path) -> Iterator[_Restore]:
    """Moves a file away; back where the `with` fails and `allowed` still holds. Gone where it ends well."""
    away, restore = _aside_of(path), _Restore()
    if path.is_file():
        os.replace(path, away)
    try:
        yield restore
    except BaseException:
        if restore.allowed and away.is_file():
            os.replace(away, path)
        raise
    away.unlink(missing_ok=True)


def _aside_of(path: Path) -> Path:
    return path.with_suffix(".before")


def _along() -> tuple[str, ...]:
    return (*_RECORDINGS, *_TOKENIZER)


def _copy_along(folder: Path, tokenizer: Path | None, output: Path) -> None:
    from worldkv.models.checkpoints.writing import copy_file

    for source in [folder / name for name in _RECORDINGS] + [(tokenizer or folder) / name for name in _TOKENIZER]:
        if source.is_file():
            copy_file(source, output / source.name)
