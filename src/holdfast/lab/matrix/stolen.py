"""How much of a virtual machine's processors its host gave to others: runs are compared by the clock, and this spoils it."""

from pathlib import Path
from typing import NamedTuple

STATISTICS = Path("/proc/stat")


class Ticks(NamedTuple):
    """What the kernel has counted since it started, in ticks of all processors."""

    stolen: int
    total: int


def ticks(statistics: Path = STATISTICS) -> Ticks | None:
    """What is counted now; nothing where the system does not say."""
    try:
        # Guests' time, which follows these eight, is counted among them already.
        kind, *counts = statistics.read_text().split("\n", 1)[0].split()[:9]
        numbers = [int(each) for each in counts]
    except (OSError, ValueError):
        return None
    return Ticks(numbers[7], sum(numbers)) if kind == "cpu" and len(numbers) == 8 else None


def stolen(before: Ticks | None, after: Ticks | None) -> float | None:
    """The part of all processors' time between two counts that others had; nothing if that is not known."""
    if before is None or after is None or after.total <= before.total:
        return None
    return (after.stolen - before.stolen) / (after.total - before.total)
