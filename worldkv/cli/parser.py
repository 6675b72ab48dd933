"""The command line's grammar: the commands, each of which learns its options when it is asked for.

A mistake raises UsageError: one line that names the option, and the one that may have been meant.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from worldkv import __version__
from worldkv.cli.errors import EXIT_CODES, UsageError

# A module of this folder each, with MORE and EXAMPLE for its help, add_options(parser) and run(arguments).
COMMANDS = {
    "serve": "Serve a checkpoint to robots over websockets.",
    "demo": "See it work: a server, a robot with three cameras, actions, video and plots.",
    "generate": "A video from words, block after block, as mp4; with other words from any second on.",
    "replay": "Run a recorded session, or a three-camera clip, through a checkpoint.",
    "doctor": "From a robot's side: reach a server, check what it expects and what you send, measure, report.",
    "top": "A server's sessions and blocks in a terminal, live.",
    "sessions": "A server's sessions: list them, write one to a file, go on from a file.",
    "film": "A running session as mp4: what it saw last beside what it expects next.",
    "download": "Fetch a published checkpoint by its repository's id, whole and ready to serve.",
    "inspect": "Say what a checkpoint folder holds and needs, without reading its weights.",
    "verify": "Compare the paged engine with recorded outputs of the reference implementation.",
    "convert": "Write any checkpoint as one clean folder: bfloat16 shards and one readable worldkv.yaml.",
    "embodiments": "List the robots that come with worldkv, show one's file, or check a file of your own.",
    "plan": "How many robots one GPU serves: memory by part, sessions that fit, time of a tick.",
    "bench": "Measure the engine at a model's true size, with random weights.",
    "completion": "Print what makes your shell complete commands and options.",
}


class Parser(argparse.ArgumentParser):
    """`command`: whose options it learns once it has something to parse; None is the program itself."""

    def __init__(
        self, prog: str, *, command: str | None = None, description: str | None = None, epilog: str | None = None
    ) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, epilog=epilog, formatter_class=formatter)
        self._command = command
        self._learned = command is None

    def learn(self) -> None:
        """Import the command's module and take its options. Safe twice."""
        if self._learned:
            return
        self._learned = True
        assert self._command is not None
        module = importlib.import_module(f"worldkv.cli.{self._command}")
        self.description = f"{COMMANDS[self._command]}\n\n{module.MORE}"
        self.epilog = f"example:\n  {module.EXAMPLE}\n\n{EXIT_CODES}"
        self.add_argument("-v", "--verbose", action="store_true", help="log everything, and show tracebacks of errors")
        module.add_options(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.learn()
        words = list(sys.argv[1:] if args is None else args)
        self._expect_known(words)
        found, extras = super().parse_known_args(words, namespace)
        if self._command is not None:
            if extras:
                self.error(f"takes no {' '.join(map(repr, extras))}")
            for field, what in getattr(found, "needed", {}).items():
                if getattr(found, field) is None:
                    self.error(f"{what} is needed")
            found.options = self.options()
        return found, extras

    def options(self) -> dict[str, str]:
        """Field -> its option as it is typed; of one with two names, the long one."""
        named = (action for action in self._actions if action.option_strings)
        return {action.dest: max(action.option_strings, key=len) for action in named if action.help is not None}

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ").replace("the following arguments are required:", "what is missing:")
        text = text.replace("not allowed with argument", "cannot be given with")
        if found := re.fullmatch(r"one of the arguments (.+) is required", text):
            text = f"what is missing: {' or '.join(found[1].split())}"
        raise UsageError(f"{self.prog}: {text} (see {self.prog} --help)")

    def _expect_known(self, words: Sequence[str]) -> None:
        """Raises UsageError for a command or an option that does not exist, before argparse names something else."""
        for word in words:
            name = word.partition("=")[0]
            if word == "--":
                return
            if not word.startswith("-"):
                if self._command is None:
                    self._expect_one_of("command", word, COMMANDS)
                    return  # what follows is the command's
            elif word.startswith("--") and " " not in name:
                known = self._option_string_actions
                if not any(option.startswith(name) for option in known):
                    self._expect_one_of("option", name, known)

    def _expect_one_of(self, kind: str, word: str, known: Iterable[str]) -> None:
        if word in known:
            return
        near = difflib.get_close_matches(word, [name for name in known if len(name) > 2], n=1)
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        raise UsageError(f"{self.prog} has no {kind} {word}; {hint}")


def build_parser(*, learned: bool = False) -> Parser:
    """`learned`: with the options of every command, for whoever lists them all."""
    parser = Parser(
        prog="worldkv",
        description="A paged KV cache with sessions, an engine and a server for autoregressive diffusion world models.",
        epilog="start with              worldkv demo\nmore about a command    worldkv COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"worldkv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, command=name)
        if learned:
            command.learn()
    return parser
