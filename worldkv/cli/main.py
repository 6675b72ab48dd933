"""`worldkv`: parse, run the command, and say in one line what went wrong."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Sequence

from worldkv.cli.common import fetch_repositories
from worldkv.cli.errors import exit_code, explain, is_told
from worldkv.cli.parser import build_parser
from worldkv.cli.places import check_places
from worldkv.cli.signals import end_at_sigterm


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A user's mistake is one `error: ...` on standard error."""
    end_at_sigterm(sys.argv[1:] if argv is None else argv)
    arguments = None
    try:
        arguments = build_parser().parse_args(argv)
        if arguments.verbose and arguments.command != "serve":  # which logs everything, in a form of its own
            logging.basicConfig(level=logging.INFO)
        check_places(arguments)
        fetch_repositories(arguments)
        code: int = importlib.import_module(f"worldkv.cli.{arguments.command}").run(arguments)
        return code
    except KeyboardInterrupt as error:
        print("stopped", file=sys.stderr)
        return exit_code(error)
    except Exception as error:
        if not is_told(error):
            raise
        if arguments is not None and arguments.verbose:
            traceback.print_exc()
        print(f"error: {explain(error, {} if arguments is None else arguments.options)}", file=sys.stderr)
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
