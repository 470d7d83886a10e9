"""The measurements of one run of a recovery matrix, from its history, audit, costs and snapshots; stored as JSON."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.audit.verdicts import audit_run, worst
from holdfast.checkpoint import manifest
from holdfast.cost.attempts import strikes
from holdfast.cost.breakdown import cost_breakdown
from holdfast.errors import HoldfastError
from holdfast.events import Event, Step
from holdfast.history.log import read_history
from holdfast.lab.matrix.suites import PlannedRun
from holdfast.lab.result import finite_or_none
from holdfast.supervise.verdict import RunVerdict
from holdfast.weights.locate import store_of

Struck = tuple[int, str, str, int]
"""A failure that struck: its step, kind, point and rank."""
Distances = tuple[tuple[int, float, float], ...]
"""For every snapshot that two runs have: its step, the distance of the two models, and the norm of the second."""
THREADS = 2  # threads that compare snapshots; each has two snapshots in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The measurements of one run: its verdict, audit result, durations and losses."""

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
    seconds: Mapping[str, float] = field(default_factory=dict)  # wall clock by cause
    stall: Mapping[str, float] = field(default_factory=dict)  # wait for saves by part
    struck: tuple[Struck, ...] = ()
    losses: tuple[float | None, ...] = ()  # None where no loss was logged
    distances: Distances | None = None  # from the reference run's models
    stolen: float | None = None  # share of CPU time that the host of a virtual machine gave to others
    tries: int = 1  # executions of the run, because of `stolen`

    @property
    def goodput(self) -> float:
        return self.committed / self.wall if self.wall > 0 else math.nan

    @property
    def waited(self) -> float:
        return self.stall.get("waited", math.nan)

    @property
    def written(self) -> float:
        """The seconds that training waited while saves were written or queued."""
        return sum(self.stall.get(part, math.nan) for part in ("write", "enqueue", "backpressure"))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "wall": finite_or_none(self.wall)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "MeasuredRun":
        wall, distances = data["wall"], data["distances"]
        converted = {
            "wall": math.nan if wall is None else float(wall),
            "struck": tuple((int(a), str(b), str(c), int(d)) for a, b, c, d in data["struck"]),
            "losses": tuple(data["losses"]),
            "distances": None if distances is None else tuple((int(a), float(b), float(c)) for a, b, c in distances),
        }
        return cls(**{**data, **converted})


def read_measured(path: Path) -> MeasuredRun | None:
    """Return the measurements stored in a file, or None if the file is missing or damaged."""
    try:
        return MeasuredRun.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def measure(planned: PlannedRun, digest: str, verdict: RunVerdict, folder: Path) -> MeasuredRun:
    """Return the measurements of the run in `folder`, which ended with `verdict`.

    `digest` identifies the run's config."""
    events = read_history(folder).events
    run = MeasuredRun(
        suite=planned.suite.name,
        variant=planned.variant,
        seed=planned.seed,
        digest=digest,
        verdict=verdict.verdict,
        because=verdict.because,
        attempts=verdict.attempts,
        struck=tuple(sorted((s.strike.step, s.strike.kind, s.strike.point, s.strike.rank) for s in strikes(events))),
    )
    if not any(isinstance(event.what, Step) for event in events):
        return run
    findings = audit_run(folder)
    wrong = [f"{finding.check}: {finding.because}" for finding in findings if finding.verdict != "pass"]
    cost = cost_breakdown(events)
    return replace(
        run,
        audit=worst(findings),
        finding="; ".join(wrong),
        losses=losses(events),
        committed=cost.committed,
        rolled_back=cost.rolled_back,
        samples_lost=cost.samples_lost,
        restarts=cost.restarts,
        wall=cost.wall,
        saves=len(cost.saves),
        bytes=max((save.bytes for save in cost.saves), default=0),
        seconds=dict(cost.seconds),
        stall=asdict(cost.stall),
    )


def losses(events: Sequence[Event]) -> tuple[float | None, ...]:
    """Return the mean loss of each step (None: not logged), from the last attempt that trained the step."""
    by_step: defaultdict[int, dict[int, Step]] = defaultdict(dict)
    for what in (event.what for event in events):
        if isinstance(what, Step):
            shares = by_step[what.step]
            shares[what.rank] = max(shares.get(what.rank, what), what, key=lambda share: share.attempt)
    means: list[float | None] = []
    for step in range(max(by_step, default=-1) + 1):
        shares = by_step[step]
        last = max((share.attempt for share in shares.values()), default=0)
        known = [s for s in shares.values() if s.attempt == last and s.loss is not None]
        total = sum(share.samples.count for share in known)
        means.append(sum(s.samples.count * (s.loss or 0.0) for s in known) / total if total else None)
    return tuple(means)


def distances(folder: Path, reference: Path) -> Distances | None:
    """Return the distance between the models of two runs for each step with intact snapshots of both runs.

    The result is None if there is no such step."""
    steps = sorted({*_steps(folder)} & {*_steps(reference)})
    with ThreadPoolExecutor(THREADS) as threads:
        compared = threads.map(lambda step: _distance(folder, reference, step), steps)
        return tuple(distance for distance in compared if distance) or None


def _distance(folder: Path, reference: Path, step: int) -> tuple[int, float, float] | None:
    """Return `step`, the distance between two runs' models at `step`, and the norm of the reference model.

    The result is None if a snapshot is missing or damaged."""
    try:
        one, other = _model(folder, step), _model(reference, step)
    except HoldfastError:
        return None
    distance = norm = 0.0
    for name, values in other.items():
        if np.issubdtype(values.dtype, np.floating):
            distance += float(np.square(one[name] - values).sum(dtype=np.float64))
            norm += float(np.square(values).sum(dtype=np.float64))
    return step, math.sqrt(distance), math.sqrt(norm)


def _steps(folder: Path) -> list[int]:
    try:
        return manifest.steps(store_of(folder))
    except HoldfastError:
        return []  # for example, the snapshots of a run that was measured before are gone


def _model(folder: Path, step: int) -> dict[str, np.ndarray]:
    from holdfast.weights.load import load  # imports torch, which `holdfast lab list` does not wait for

    state = load(folder, step, name="model")
    return {name: np.asarray(values) for name, values in state.items()}
