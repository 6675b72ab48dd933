"""`worldkv convert`: any published form of a checkpoint to one clean folder, resumable, compared at the end."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldkv import __version__
from worldkv.cli.common import add_checkpoint, add_robot_and_base
from worldkv.cli.errors import OK
from worldkv.cli.numbers import gigabytes
from worldkv.cli.places import add_output
from worldkv.cli.preflight import check_folder, check_robot_and_base
from worldkv.errors import CheckpointError
from worldkv.show.terminal import progress, size_text, spinner
from worldkv.words import count

if TYPE_CHECKING:
    from worldkv.models.dreamzero.checkpoint import Checkpoint

_RECORDINGS = ("golden.safetensors", "calls.json", "policy.safetensors")  # what `verify` compares with
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model")
_HEADER = """\
# A DreamZero checkpoint in worldkv's own form: `model` are sizes, `embodiments` the robots with their statistics
# (docs/embodiments.md). The tensors lie beside this file, under their names in the reference.
"""


MORE = (
    "Takes every published form: one file or shards, full fine-tunes, LoRA runs (merged), with or without their\n"
    "base, robots from conf.yaml or from --embodiment. Tokenizer and recordings come along. May be stopped and\n"
    "run again: whole shards are kept. Every tensor is read back and compared at the end."
)
EXAMPLE = "worldkv convert DreamZero-LoRA --base Wan2.1-I2V-14B-480P --output DreamZero-mine"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, what="DreamZero checkpoint folder")
    add_output(parser, "folder", "the checkpoint", required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(bfloat16)")
    parser.add_argument("--shard-gb", type=gigabytes, default=5.0, metavar="GB", help="size of a shard, at most (5)")
    add_robot_and_base(parser)


def run(arguments: argparse.Namespace) -> int:
    folder, output = arguments.checkpoint, arguments.output
    check_folder(folder)
    check_robot_and_base(arguments)
    if output.resolve() == folder.resolve():
        raise ValueError("--output: expected another folder than the one that is read")
    with spinner("reading the checkpoint"):
        import torch
        import yaml

        from worldkv.models.checkpoints.shards import compare_shards, plan_shards, write_shards
        from worldkv.models.checkpoints.writing import write_text
        from worldkv.models.dreamzero.checkpoint import Checkpoint, check_all_tensors, needed_shapes, read_sizes
        from worldkv.models.dreamzero.folder import IMAGE_PREFIX, WORLDKV_FILE

        checkpoint = Checkpoint.open(folder, arguments.base)
        check_all_tensors(checkpoint)
        described = _describe(checkpoint, arguments)
        needed = set(needed_shapes(checkpoint.config, read_sizes(checkpoint)))
        # the image tower's last layer is never run, but counted
        needed |= {name for name in checkpoint.shapes if name.startswith(f"{IMAGE_PREFIX}transformer.")}
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[arguments.dtype]
    shapes = {name: checkpoint.shapes[name] for name in needed}
    shards = plan_shards(shapes, dtype.itemsize, round(arguments.shard_gb * 1e9))
    num_bytes = dtype.itemsize * sum(torch.Size(shape).numel() for shape in shapes.values())
    _prepare(output, num_bytes, {shard.file for shard in shards}, described["source"])
    with _aside(output / WORLDKV_FILE) as restore:  # without it the folder is no checkpoint while it is written
        with progress("writing", is_bytes=True) as step:
            kept = write_shards(checkpoint, shapes, shards, output, dtype, step)
        restore.allowed = kept == len(shards)  # nothing was replaced
        with progress("comparing", is_bytes=True) as step:
            compare_shards(checkpoint, shards, output, step)
    _copy_along(folder, output)
    text = _HEADER + yaml.safe_dump(described, sort_keys=False, default_flow_style=None, width=118)
    write_text(text, output / WORLDKV_FILE)  # last: with it the folder is a checkpoint
    check_all_tensors(Checkpoint.open(output))
    before = f", {kept} kept from before" if kept else ""
    print(f"{output}: {count(len(shapes), 'tensor')} in {count(len(shards), 'shard')}{before}")
    print(f"robots     {', '.join(described['embodiments'])}")
    print("every tensor was read back and compared; look at it with `worldkv inspect`, serve it with `worldkv serve`")
    return OK


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


def _prepare(output: Path, num_bytes: int, planned: set[str], source: str) -> None:
    """Makes the folder. What is not of a conversion, of another one, or a disk too small, is told before any work."""
    from worldkv.models.checkpoints.files import read_yaml
    from worldkv.models.dreamzero.folder import WORLDKV_FILE

    output.mkdir(parents=True, exist_ok=True)
    known = {WORLDKV_FILE, _aside_of(output / WORLDKV_FILE).name, *_along()}
    known |= {path.name for path in output.glob("*.partial")}  # halves that a killed run has left
    foreign = [p.name for p in output.iterdir() if not p.name.startswith("model") and p.name not in known]
    if foreign:
        raise ValueError(f"--output: {output} holds something else ({foreign[0]}); choose an empty folder")
    if (output / WORLDKV_FILE).is_file() and (other := read_yaml(output / WORLDKV_FILE).get("source")) != source:
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


def _copy_along(folder: Path, output: Path) -> None:
    from worldkv.models.checkpoints.writing import copy_file
    from worldkv.models.wan.tokenizer import find_tokenizer

    found = find_tokenizer(folder)
    for source in [folder / name for name in _RECORDINGS] + [(found or folder) / name for name in _TOKENIZER]:
        if source.is_file():
            copy_file(source, output / source.name)
