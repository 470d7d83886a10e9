"""What one run of a matrix showed, as plain numbers, kept as JSON. Pure but for reading its file.

From the folder of a run to what it showed: its history read, audited and priced, its snapshots compared.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.audit.verdicts import audit_run, worst
from holdfast.checkpoint import snapshot
from holdfast.cost.attempts import strikes
from holdfast.cost.breakdown import CostBreakdown, cost_breakdown
from holdfast.errors import HoldfastError
from holdfast.events import Event, Step, Strike
from holdfast.history.log import read_history
from holdfast.lab.matrix.suites import PlannedRun
from holdfast.supervise.verdict import RunVerdict
from holdfast.weights.locate import store_of

Struck = tuple[int, str, str, int]
"""A failure that struck: its step, kind, point and rank."""
Distances = tuple[tuple[int, float, float], ...]
"""For every snapshot that two runs have: its step, how far apart the two models are, and how long the second one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
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
    def from_json(cls, data: Mapping[str, Any]) -> "MeasuredRun":
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


def read_measured(path: Path) -> MeasuredRun | None:
    """What was measured earlier, if it is there and whole."""
    try:
        return MeasuredRun.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


THREADS = 2  # that compare snapshots: each has two of them in memory


def measure(unit: PlannedRun, digest: str, verdict: RunVerdict, folder: Path) -> MeasuredRun:
    """What the run in this folder showed; one that never trained a step has a verdict and nothing else."""
    events = read_history(folder).events
    about = MeasuredRun(
        suite=unit.suite.name,
        variant=unit.variant,
        seed=unit.seed,
        digest=digest,
        verdict=verdict.verdict,
        because=verdict.because,
        attempts=verdict.attempts,
        struck=tuple(sorted(_plain(each.strike) for each in strikes(events))),
    )
    if not any(isinstance(event.what, Step) for event in events):
        return about
    findings = audit_run(folder)
    wrong = [f"{each.check}: {each.because}" for each in findings if each.verdict != "pass"]
    return replace(
        about,
        audit=worst(findings),
        finding="; ".join(wrong),
        losses=losses(events),
        **_costs(cost_breakdown(events)),
    )


def losses(events: Sequence[Event]) -> tuple[float | None, ...]:
    """The loss of every step: the mean over its samples, as trained by the last attempt that trained it."""
    told: defaultdict[int, dict[int, Step]] = defaultdict(dict)
    for what in (event.what for event in events):
        if isinstance(what, Step):
            told[what.step][what.rank] = max(told[what.step].get(what.rank, what), what, key=lambda step: step.attempt)
    return tuple(_loss(list(told[step].values())) for step in range(max(told, default=-1) + 1))


def _loss(shares: Sequence[Step]) -> float | None:
    last = max((each.attempt for each in shares), default=0)
    known = [(each.samples.count, each.loss) for each in shares if each.attempt == last and each.loss is not None]
    total = sum(count for count, _ in known)
    return sum(count * loss for count, loss in known) / total if total else None


def distances(folder: Path, reference: Path) -> Distances | None:
    """How far the models of two runs are apart, at every step of which both have a good snapshot; None if there is none."""
    steps = sorted({*_steps(folder)} & {*_steps(reference)})
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda step: _distance(folder, reference, step), steps)
        return tuple(each for each in found if each) or None


def _distance(folder: Path, reference: Path, step: int) -> tuple[int, float, float] | None:
    """A step, how far the models are apart then, and the length of the second; None if one of them is not good."""
    with suppress(HoldfastError):  # a fault of storage may have damaged it on purpose
        return (step, *_apart(_model(folder, step), _model(reference, step)))
    return None


def _steps(folder: Path) -> list[int]:
    try:
        return snapshot.steps(store_of(folder))
    except HoldfastError:
        return []  # such as a run that was measured before, whose snapshots are gone


def _model(folder: Path, step: int) -> dict[str, np.ndarray]:
    from holdfast.weights.load import load  # imports torch, which `holdfast lab list` does not wait for

    state = load(folder, step, name="model")
    return {name: np.asarray(values) for name, values in state.items()}


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
    """The L2 distance of two states of a model, and the length of the second; of floating-point values alone."""
    apart = length = 0.0
    for name, values in other.items():
        if np.issubdtype(values.dtype, np.floating):
            apart += float(np.square(one[name] - values).sum(dtype=np.float64))
            length += float(np.square(values).sum(dtype=np.float64))
    return math.sqrt(apart), math.sqrt(length)


def _costs(cost: CostBreakdown) -> dict[str, Any]:
    return {
        "committed": cost.committed,
        "rolled_back": cost.rolled_back,
        "samples_lost": cost.samples_lost,
        "restarts": cost.restarts,
        "wall": cost.wall,
        "saves": len(cost.saves),
        "bytes": max((save.bytes for save in cost.saves), default=0),
        "seconds": dict(cost.seconds),
        "stall": asdict(cost.stall),
    }


def _plain(strike: Strike) -> Struck:
    return (strike.step, strike.kind, strike.point, strike.rank)
