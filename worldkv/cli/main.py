"""`worldkv`: one command line, a module per command. A command's module is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from worldkv import __version__
from worldkv.cli.common import BAD_INPUT, EXIT_CODES, FAILED
from worldkv.errors import WorldKVError

# A module of this folder each, with MORE and EXAMPLE for its help, add_options(parser) and run(arguments).
COMMANDS = {
    "serve": "Serve a checkpoint to robots over websockets.",
    "demo": "See it work: a server, a robot with three cameras, actions, video and plots.",
    "replay": "Run a recorded session, or a three-camera clip, through a checkpoint.",
    "doctor": "From a robot's side: reach a server, check what it expects and what you send, measure, report.",
    "top": "A server's sessions and blocks in a terminal, live.",
    "film": "A running session as mp4: what it saw last beside what it expects next.",
    "inspect": "Say what a checkpoint folder holds and needs, without reading its weights.",
    "verify": "Compare the paged engine with recorded outputs of the reference implementation.",
    "convert": "Write any checkpoint as one clean folder: bfloat16 shards and one readable worldkv.yaml.",
    "embodiments": "List the robots that come with worldkv, show one's file, or check a file of your own.",
    "plan": "How many robots one GPU serves: memory by part, sessions that fit, time of a tick.",
    "bench": "Measure the engine at a model's true size, with random weights.",
}


class _CommandParser(argparse.ArgumentParser):
    """Learns its options from the command's module once it has something to parse."""

    def __init__(self, *, command: str, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._command: str | None = command

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._command is not None:
            module = importlib.import_module(f"worldkv.cli.{self._command}")
            self.description = f"{COMMANDS[self._command]}\n\n{module.MORE}"
            self.epilog = f"example:\n  {module.EXAMPLE}\n\n{EXIT_CODES}"
            self.add_argument(
                "-v", "--verbose", action="store_true", help="log everything, and show tracebacks of errors"
            )
            module.add_options(self)
            self._command = None
        return super().parse_known_args(args, namespace)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="worldkv",
        description="A paged KV cache with sessions, an engine and a server for autoregressive diffusion world models.",
        epilog="start with: worldkv demo      more about a command: worldkv COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"worldkv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser)
    for name, what in COMMANDS.items():
        commands.add_parser(name, help=what, command=name)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A user's mistake is one `error: ...` on standard error."""
    arguments = build_parser().parse_args(argv)
    if arguments.verbose and arguments.command != "serve":  # which logs everything, in a form of its own
        logging.basicConfig(level=logging.INFO)
    try:
        module = importlib.import_module(f"worldkv.cli.{arguments.command}")
        code: int = module.run(arguments)
        return code
    except (WorldKVError, ValueError, OSError, ImportError) as error:
        if arguments.verbose:
            traceback.print_exc()
        hint = "; pip install 'worldkv[all]'" if isinstance(error, ModuleNotFoundError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return FAILED if isinstance(error, WorldKVError) and not isinstance(error, ValueError) else BAD_INPUT
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
