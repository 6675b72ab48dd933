"""Files and folders that commands write: one way to ask for them, and a check before any work.

An option says whether it is a file or a folder; what is the other, or may not be written to, is told at once.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Literal

from worldkv.cli.errors import UsageError
from worldkv.words import reason

PICTURES = (".png", ".svg", ".pdf")  # what matplotlib draws
Kind = Literal["file", "folder"]


def add_output(
    parser: argparse.ArgumentParser,
    kind: Kind,
    what: str = "",
    *,
    default: str | None = None,
    required: bool = False,
    endings: tuple[str, ...] = (),
) -> None:
    """`-o`, `--output`. `what`: is written there. `endings`: of a file's name, any if there are none."""
    add_place(parser, "--output", kind, what, default=default, required=required, endings=endings, short=("-o",))


def add_place(
    parser: argparse.ArgumentParser,
    option: str,
    kind: Kind,
    what: str,
    *,
    default: str | None = None,
    required: bool = False,
    endings: tuple[str, ...] = (),
    short: tuple[str, ...] = (),
) -> None:
    """An option that names something to write."""
    told = "" if required else f" ({default or 'none'})"
    parser.add_argument(
        *short,
        option,
        type=Path,
        required=required,
        default=None if default is None else Path(default),
        metavar={"file": "FILE", "folder": "DIR"}[kind],
        help=f"{kind} to write{': ' if what else ''}{what}{told}",
    )
    places = dict(parser.get_default("places") or {})
    places[option.removeprefix("--").replace("-", "_")] = (option, kind, endings)
    parser.set_defaults(places=places)


def check_places(arguments: argparse.Namespace) -> None:
    """Raises UsageError for a place that cannot be written."""
    for field, (option, kind, endings) in getattr(arguments, "places", {}).items():
        path = getattr(arguments, field)
        if path is not None:
            check_place(option, path, kind, endings)


def check_place(option: str, path: Path, kind: Kind, endings: tuple[str, ...] = ()) -> None:
    """See `check_places`. Nothing is made, and nothing is left behind."""
    try:
        if kind == "folder" and path.exists() and not path.is_dir():
            raise UsageError(f"{option}: expected a folder, {path} is a file")
        if kind == "file" and path.is_dir():
            raise UsageError(f"{option}: expected a file, {path} is a folder; give the file's name as well")
        if endings and path.suffix.lower() not in endings:
            raise UsageError(f"{option}: expected a name that ends in {' or '.join(endings)}, got {path.name}")
        folder = path if kind == "folder" else path.parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise UsageError(f"{option}: {path} cannot be made: {folder} is a file")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be written: {reason(error)}") from error
