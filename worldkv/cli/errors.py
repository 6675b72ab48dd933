"""From an error to the one line that is printed, and the exit code. Knows no command.

Errors come from everywhere below, which knows fields (`max_sessions`) and not what was typed (`--max-sessions`): they
are translated here, and only here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from worldkv.engine.room import is_out_of_memory
from worldkv.errors import WorldKVError
from worldkv.words import of_os_error, without_errno

OK, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 130
EXIT_CODES = (
    "exit codes: 0 done, 1 a check or the run failed, 2 something given is wrong (one line says what), 130 stopped"
)

# fields whose option has another name: field -> where an option keeps its value
_OTHER_NAMES = {
    "max_parked_bytes": "park_memory",
    "attention backend": "attention",
    "limit_bytes": "record_limit_gb",
    "address": "url",
}


class UsageError(ValueError):
    """What was typed makes no sense; the text names options as they are typed."""


def is_told(error: BaseException) -> bool:
    """Whether it is told in a line; others are our own bugs, and keep their traceback."""
    return isinstance(error, WorldKVError | ValueError | OSError | ImportError) or is_out_of_memory(error)


def explain(error: BaseException, options: Mapping[str, str]) -> str:
    """One line. `options`: field -> option of the command that ran."""
    if is_out_of_memory(error):
        first = " ".join(str(error).split("\n")[:1]) or "no more to be had"
        return f"out of memory: {first}; try fewer sessions (--max-sessions 1), a smaller model, or a larger machine"
    if isinstance(error, OSError):
        return of_os_error(error)
    text = without_errno(str(error))
    if isinstance(error, ModuleNotFoundError):
        return f"{text}; pip install 'worldkv[all]'"
    return text if isinstance(error, UsageError) else as_typed(text, options)


def as_typed(text: str, options: Mapping[str, str]) -> str:
    """`max_sessions: expected ...` as `--max-sessions: expected ...`, where the command has that option.

    At the beginning any field; elsewhere in the text those that cannot be words, as `max_sessions`, unless quoted.
    """
    known = dict(options)
    for field, place in _OTHER_NAMES.items():
        if place in options:
            known[field] = options[place]
    for field, option in known.items():
        begin = re.compile(rf"{re.escape(field)}(?:_s|_gb|_bytes)?: ")
        if found := begin.match(text):
            text = f"{option}: {text[found.end() :]}"
        if "_" in field:
            text = re.sub(rf"(?<![\w./'\"-]){field}(?:_s)?(?![\w/'\"-]|\.\w|=)", option, text)
    return text


def exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return STOPPED
    failed = is_out_of_memory(error) or (isinstance(error, WorldKVError) and not isinstance(error, ValueError))
    return FAILED if failed else BAD_INPUT
