"""Durations and fractions as people write them: 45s, 30m, 4h, 2d, 1h30m; 1/8 or 0.125. Seconds and numbers here."""

import re
from fractions import Fraction

from holdfast.errors import BadInput

DAY = 86400.0
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY, "y": 365.25 * DAY}
_PART = r"(\d+(?:\.\d+)?)(ms|[smhdy])"


def seconds_of(text: str, what: str) -> float:
    """The seconds that a duration says; `what` is named where it says none."""
    given = text.strip().lower()
    if not re.fullmatch(f"(?:{_PART})+", given, re.ASCII):
        raise BadInput(f"{what} {text!r} is no duration: write 45s, 30m, 4h, 2d, 5y or 1h30m")
    total = sum(float(number) * UNITS[unit] for number, unit in re.findall(_PART, given))
    if not 0 < total < float("inf"):
        raise BadInput(f"{what} {text!r} is no time at all: give more than 0")
    return total


def fraction_of(text: str, what: str) -> Fraction:
    """A part of a whole, above 0 and at most 1."""
    try:
        part = Fraction(text.strip())
    except (ValueError, ZeroDivisionError) as error:
        raise BadInput(f"{what} {text!r} is no fraction: write 1/8 or 0.125") from error
    if not 0 < part <= 1:
        raise BadInput(f"{what} {text} is outside (0, 1]: write 1/8 or 0.125")
    return part


def in_words(seconds: float) -> str:
    """A duration for people, to about two digits."""
    for unit in ("y", "d", "h", "m"):
        if seconds >= 1.5 * UNITS[unit]:
            return f"{seconds / UNITS[unit]:.3g} {'min' if unit == 'm' else unit}"
    if seconds >= 0.1 or seconds == 0:
        return f"{seconds:.2g} s"
    return f"{1000 * seconds:.2g} ms"
