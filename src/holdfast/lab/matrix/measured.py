"""What one run of a matrix showed, as plain numbers, kept as JSON. Pure but for reading its file."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Struck = tuple[int, str, str, int]
"""A failure that struck: its step, kind, point and rank."""
Distances = tuple[tuple[int, float, float], ...]
"""For every snapshot that two runs have: its step, how far apart the two models are, and how long the second one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run: how it ended, what the audit says, what it cost, and what it trained.

    `seconds` is its wall clock by cause and `stall` what training waited for saves, by part. `losses` are those of the
    steps that count, None where nobody noted one. `distances` are those from the reference (L2); None if there was nothing
    to compare. `stolen` is the part of the processors' time that the machine's host gave to others, if it says so, and
    `tries` how often the run was done for that reason.
    """

    suite: str
    variant: str
    seed: int
    digest: str
    verdict: str
    because: str
    attempts: int = 0
    audit: str = "unknown"
    finding: str = ""
    committed: int = 0
    rolled_back: int = 0
    samples_lost: int = 0
    restarts: int = 0
    wall: float = math.nan
    saves: int = 0
    bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    stall: Mapping[str, float] = field(default_factory=dict)
    struck: tuple[Struck, ...] = ()
    losses: tuple[float | None, ...] = ()
    distances: Distances | None = None
    stolen: float | None = None
    tries: int = 1

    @property
    def goodput(self) -> float:
        """Committed steps per second of wall clock."""
        return self.committed / self.wall if self.wall > 0 else math.nan

    @property
    def waited(self) -> float:
        """Seconds that training waited for saves."""
        return self.stall.get("waited", math.nan)

    @property
    def written(self) -> float:
        """Seconds of them in which it waited for a save to be written, handed over, or to find a place in the queue."""
        return sum(self.stall.get(part, math.nan) for part in ("write", "enqueue", "backpressure"))

    def to_json(self) -> dict[str, Any]:
        """As JSON values, which have no number for what was not measured."""
        plain = asdict(self)
        return {**plain, "wall": plain["wall"] if math.isfinite(self.wall) else None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Measured":
        """The inverse of `to_json`."""
        wall = math.nan if data["wall"] is None else float(data["wall"])
        distances = data["distances"]
        return cls(
            **{
                **data,
                "wall": wall,
                "struck": tuple((int(a), str(b), str(c), int(d)) for a, b, c, d in data["struck"]),
                "losses": tuple(data["losses"]),
                "distances": None
                if distances is None
                else tuple((int(a), float(b), float(c)) for a, b, c in distances),
            }
        )


def read_measured(path: Path) -> Measured | None:
    """What was measured earlier, if it is there and whole."""
    try:
        return Measured.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
