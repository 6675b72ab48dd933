"""Logs as lines of JSON: one line an event, with its session, tick and reason as fields.

Whoever logs adds fields by `extra`; `event` names what happened. In the text form the fields are in the words already.
Clients choose paths, ids and prompts, so no line shows a control character, and lines of one kind come at a rate that
a disk stands.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from worldkv.server.counts import Bucket

LISTENING = "listening on "  # begins the line in which `serve` says its address; the demo reads the port off it
TICKS = "worldkv.ticks"  # the logger of a line per tick: only in JSON, or when asked for
LINES, LINES_PER_S = 300, 5.0  # of one kind: at once, and then
_MAX_KINDS = 256
_OWN = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """{"time", "level", "logger", "event", "message", the record's own fields, "exception"}."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in _OWN and name != "event"}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")  # the only one that JSON lets through


class TextLines(logging.Formatter):
    """A record's first line begins with its time; those that follow, of a traceback, with a space."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = visible(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        first, *others = super().format(record).split("\n")
        return "\n".join([first, *(f"  {visible(other)}" for other in others)])


def visible(text: str) -> str:
    """With what a terminal would obey, or does not show, as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass
class _Kind:
    budget: Bucket = field(default_factory=lambda: Bucket(LINES, LINES_PER_S))
    num_left_out: int = 0


class Throttle(logging.Filter):
    """Lets LINES of one kind (logger, level, words before their values) through at once, then LINES_PER_S; says how
    many it left out. Ticks are no storm: a robot waits for each."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: OrderedDict[tuple[str, int, str], _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Of one handler, which calls it in its turn."""
        if record.name == TICKS:
            return True
        key = (record.name, record.levelno, str(record.msg)[:200])
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        if not kind.budget.take():
            kind.num_left_out += 1
            return False
        if kind.num_left_out:
            record.msg = f"{record.getMessage()} ({kind.num_left_out} more lines of this kind were left out before)"
            record.args = ()
            record.num_left_out = kind.num_left_out
            kind.num_left_out = 0
        return True


def set_up_logging(form: Literal["text", "json"]) -> None:
    """For a server's process: everything from INFO on, to standard error. Where logging is set up already, its handlers
    stay and only the levels change."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.addFilter(Throttle())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger(TICKS).setLevel(logging.INFO if form == "json" else logging.WARNING)
