"""Numbers on the command line, in range: what argparse calls to turn a text into one."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(at_least: int, at_most: int | None = None) -> Callable[[str], int]:
    """A whole number in a range."""
    upto = "" if at_most is None else f" and at most {at_most}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < at_least or (at_most is not None and number > at_most):
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {at_least}{upto}, got {text!r}")
        return number

    return read


def power_of_two(text: str) -> int:
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1 or number & (number - 1):
        raise argparse.ArgumentTypeError(f"expected a power of two, got {text!r}")
    return number


def real(above: float | None = None, at_least: float | None = None, unit: str = "") -> Callable[[str], float]:
    """A finite number above one, or of at least one. `unit`: of what, for the error."""
    least = above if at_least is None else at_least
    bound = "" if least is None else f" {'above' if at_least is None else 'of at least'} {least:g}"

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        low = (above is not None and number <= above) or (at_least is not None and number < at_least)
        if not math.isfinite(number) or low:
            raise argparse.ArgumentTypeError(f"expected a number{unit and f' of {unit}'}{bound}, got {text!r}")
        return number

    return read


gigabytes = real(above=0, unit="GB")  # 10^9 bytes, as memory and disks are sold
seconds = real(above=0, unit="seconds")


def session_count(text: str) -> int | None:
    """A number, or None for as many as fit."""
    if text == "auto":
        return None
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"expected auto, or a whole number of at least 1, got {text!r}") from error
