"""`worldkv download`: a checkpoint by its repository's id, fetched whole before anything is to be served."""

from __future__ import annotations

import argparse
from pathlib import Path

from worldkv.cli.errors import OK

MORE = (
    "Takes only what is read: weights, descriptions, and the tokenizer from its own repository where the checkpoint\n"
    "has none. May be stopped and run again: whole files are kept. Every command takes the id in place of a folder\n"
    "as well. docs/getting_a_model.md lists what is published."
)
EXAMPLE = "worldkv download GEAR-Dreams/DreamZero-DROID"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="OWNER/NAME[@REVISION]", help="repository on the hub; a folder is left as it is"
    )


def run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder  # fetched by now, as for every command
    if not folder.is_dir():
        raise ValueError(f"expected a repository as owner/name, got {folder}")
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {num_bytes / 1e9:.3f} GB; look at it with `worldkv inspect`, serve it with `worldkv serve`")
    return OK
