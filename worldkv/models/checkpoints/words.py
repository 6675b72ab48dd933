"""What a damaged file holds, put into an error: short, on one line, without anything that a terminal would obey."""

from __future__ import annotations

_MAX_CHARS = 120


def shown(value: object) -> str:
    """A value that was read, as Python writes it; where that is too long, its beginning and its type."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; a list within a list within a list
        return f"{type(value).__name__} that is too large to show"
    if len(text) > _MAX_CHARS:
        return f"{text[:_MAX_CHARS]}... ({type(value).__name__})"
    return text


def one_line(text: object) -> str:
    """A text of others (a library's error, a name) as one printable line, cut where it is long."""
    line = " ".join(str(text).split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)
    return line if len(line) <= 4 * _MAX_CHARS else f"{line[: 4 * _MAX_CHARS]}..."
