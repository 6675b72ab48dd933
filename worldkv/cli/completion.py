"""`worldkv completion`: what makes a shell complete commands, options, choices, files and folders."""

from __future__ import annotations

import argparse
from importlib import import_module

from worldkv.cli.errors import OK, UsageError

MORE = (
    "Prints a script for your shell, made from the options themselves. For bash: put\n"
    '    eval "$(worldkv completion bash)"\n'
    "into ~/.bashrc. For zsh the same with zsh into ~/.zshrc, after compinit. For fish:\n"
    "    worldkv completion fish > ~/.config/fish/completions/worldkv.fish"
)
EXAMPLE = "worldkv completion bash"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    from worldkv.cli.parser import build_parser

    try:
        shtab = import_module("shtab")
    except ImportError as error:
        raise UsageError("completion needs shtab: pip install 'worldkv[cli]'") from error
    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        raise UsageError(
            f"this version of shtab knows {', '.join(shtab.SUPPORTED_SHELLS)}: pip install --upgrade shtab"
        )
    print(shtab.complete(build_parser(learned=True), shell=arguments.shell))
    return OK
