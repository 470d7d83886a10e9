"""What an advice is asked: how often something fails, how much is lost at a time, and of how large a job.

Durations and fractions as people write them: 45s, 30m, 4h, 2d, 1h30m; 1/8 or 0.125. Seconds and numbers here.
"""

import re
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Seconds, workers and parts of them; None is left to the history, or else to published figures.

    `restart` and `stall` replace what the history tells of a restart and a save: a large job pays other prices.
    """

    mtbf: float | None = None
    mtbf_per_worker: float | None = None
    lost: Fraction | None = None
    workers: int | None = None
    restart: float | None = None
    stall: float | None = None
    length: float = 54 * DAY
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise BadInput(f"--workers {self.workers} is no job: give 1 or more")
        if self.mtbf is not None and self.mtbf_per_worker is not None:
            raise BadInput("--mtbf is of the whole job and --mtbf-per-worker of one worker: give one of them")
