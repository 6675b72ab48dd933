"""Logs as lines of JSON: one line an event, with its session, tick and reason as fields.

Whoever logs adds fields by `extra`; `event` names what happened. In the text form the fields are in the words already.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LISTENING = "listening on "  # begins the line in which `serve` says its address; the demo reads the port off it
TICKS = "worldkv.ticks"  # the logger of a line per tick: only in JSON, or when asked for
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
        return json.dumps(line, default=str)


def set_up_logging(form: Literal["text", "json"]) -> None:
    """For a server's process: everything from INFO on, to standard error. Where logging is set up already, its handlers
    stay and only the levels change."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger(TICKS).setLevel(logging.INFO if form == "json" else logging.WARNING)
