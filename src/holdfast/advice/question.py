"""The parameters of `holdfast advise`, and parsing of durations, fractions and sizes such as 1h30m, 1/8, 7B or 25GB."""

import re
from dataclasses import dataclass
from fractions import Fraction

from holdfast.errors import BadInput

DAY = 86400.0
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY, "y": 365.25 * DAY}
SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
BACKENDS = ("gloo", "nccl")
_PART = r"(\d+(?:\.\d+)?)(ms|[smhdy])"


def seconds_of(text: str, what: str) -> float:
    """Parse a duration such as "1h30m" and return its seconds; `what` is the option name for error messages."""
    words = text.strip().lower()
    if not re.fullmatch(f"(?:{_PART})+", words, re.ASCII):
        raise BadInput(f"{what} {text!r} is not a duration: write 45s, 30m, 4h, 2d, 5y or 1h30m.")
    total = sum(float(number) * UNITS[unit] for number, unit in re.findall(_PART, words))
    if not 0 < total < float("inf"):
        raise BadInput(f"{what} must be greater than 0 (got {text!r}).")
    return total


def fraction_of(text: str, what: str) -> Fraction:
    """Parse a fraction above 0 and up to 1, such as "1/2"; `what` is the option name for error messages."""
    try:
        part = Fraction(text.strip())
    except (ValueError, ZeroDivisionError) as error:
        raise BadInput(f"{what} {text!r} is not a fraction: write 1/8 or 0.125.") from error
    if not 0 < part <= 1:
        raise BadInput(f"{what} must be above 0 and at most 1 (got {text}): write 1/8 or 0.125.")
    return part


def size_of(text: str, what: str) -> float:
    """Parse a number of parameters or bytes, such as "7B", "350M" or "25GB"; `what` is the option for error messages."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgbt]?)b?", text.strip().lower(), re.ASCII)
    if not matched or not (size := float(matched[1]) * SIZES[matched[2]]):
        raise BadInput(f"{what} {text!r} is not a size above 0: write 350M, 7B or 25GB.")
    return size


def bytes_in_words(size: float) -> str:
    """Return a number of bytes as text with three digits and a unit, for example "1.31 GB"."""
    unit, factor = next(((unit, factor) for unit, factor in _BYTES.items() if size >= factor), ("B", 1.0))
    return f"{size / factor:.3g} {unit}"


_BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}


def in_words(seconds: float) -> str:
    """Return a number of seconds as text with two or three digits and a unit, for example "1.8 h"."""
    for unit in ("y", "d", "h", "m"):
        if seconds >= 1.5 * UNITS[unit]:
            return f"{seconds / UNITS[unit]:.3g} {'min' if unit == 'm' else unit}"
    if seconds >= 0.1 or seconds == 0:
        return f"{seconds:.2g} s"
    return f"{1000 * seconds:.2g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The job to give advice for. A value of None is taken from the measured run or from publications."""

    mtbf: float | None = None  # mean time between failures of the job
    mtbf_per_worker: float | None = None
    mtbf_per_node: float | None = None
    nodes: int | None = None  # of the job; a failure then takes a whole node, unless `lost` is set
    lost: Fraction | None = None  # fraction of the workers that one failure kills
    workers: int | None = None
    backend: str | None = None  # of the collectives: one of BACKENDS
    restart: float | None = None  # duration of a restart
    replay: float | None = None  # pause of training until one worker is replaced, under replay or partial
    stall: float | None = None  # delay of training by one save
    step: float | None = None  # duration of a step
    parameters: float | None = None
    bandwidth: float | None = None  # bytes in a second from a rank to the next
    storage: float | None = None  # bytes in a second that the shared storage reads or writes, for all ranks together
    length: float = 54 * DAY  # duration of the job
    exact: bool = False  # recommend only strategies that end with the same bits
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise BadInput(f"--workers must be 1 or more (got {self.workers}).")
        if sum(mtbf is not None for mtbf in (self.mtbf, self.mtbf_per_worker, self.mtbf_per_node)) > 1:
            raise BadInput(
                "--mtbf is for the whole job, --mtbf-per-node for a node and --mtbf-per-worker for a worker: give one of them."
            )
        if self.mtbf_per_node is not None and self.nodes is None:
            raise BadInput("--mtbf-per-node needs the number of nodes: give --nodes too.")
        if self.nodes is not None and not 1 <= self.nodes <= (self.workers or self.nodes):
            raise BadInput(f"--nodes must be 1 or more, and at most the number of workers (got {self.nodes}).")
        if self.backend not in (None, *BACKENDS):
            raise BadInput(f"--backend must be {' or '.join(BACKENDS)} (got {self.backend!r}).")
