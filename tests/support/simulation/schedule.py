"""One schedule: a run of a simulated cluster that follows from a seed, and all that was wrong with it."""

import shutil
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from holdfast.audit.verdicts import audit_files
from holdfast.errors import HoldfastError
from holdfast.history.log import TornLine, stream_history
from holdfast.runs.histories import open_history
from simulation import scheduler
from simulation.cluster import Cluster
from simulation.faults import Faults
from simulation.network import replacements
from simulation.product import simulated
from simulation.scheduler import World
from simulation.weather import Weather, operator
from simulation.worker import Settings

LIMIT = 20_000.0  # seconds of the simulated clock
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a schedule. `digest` is a digest of all its operations; `struck` counts faults by (kind, phase)."""

    seed: int
    digest: str
    violations: tuple[str, ...]
    struck: Counter[tuple[str, str]]
    trace: tuple[str, ...]
    seconds: float  # of the simulated clock


def play(seed: int) -> Outcome:
    """Play the schedule of `seed`."""
    folder = Path(mkdtemp(prefix="holdfast-simulation-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        world = World(seed)
        cluster = _cluster(world, folder)
        with simulated(world, *replacements(cluster.network)):
            world.spawn(operator(), Weather.drawn(cluster).run)
            world.run(LIMIT)
            cluster.close()
        violations = [*map(str, cluster.truth.violations), *failures(world)]
        if not violations:
            violations = _end(cluster) or [*_audit(folder)]
        return Outcome(seed, world.digest, tuple(violations), cluster.faults.struck, tuple(world.trace), world.now)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cluster(world: World, folder: Path) -> Cluster:
    rng = world.rng
    nodes = rng.choice((1, 2, 2, 3))
    steps, save_every, keep_last = rng.randint(3, 8), rng.randint(1, 3), rng.randint(1, 3)
    settings = Settings.of(steps, save_every, keep_last, rng.choice((0.1, 1.0, 5.0)))
    return Cluster(world, Faults.drawn(world), settings, nodes, rng.randint(1, 2), folder, rng.choice((1, 1, 1, nodes)))


def failures(world: World) -> list[str]:
    endless = [f"the schedule does not end: it is at {world.now:.0f} s, after {scheduler.OPERATIONS:,} operations"]
    errors = [f"{type(error).__name__} in the simulated code: {error} ({_place(error)})" for error in world.errors]
    return [*errors, *(endless if world.is_endless else ())]


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:]))


def _end(cluster: Cluster) -> list[str]:
    if not cluster.completed:
        why = "; ".join(dict.fromkeys(cluster.refused)) or "it says nothing"
        return [f"the run has neither ended nor continued: {why}"]
    last = cluster.settings.steps
    return (
        []
        if cluster.truth.is_good(last)
        else [f"the run is complete, and its last snapshot, of step {last}, is not good"]
    )


def _audit(folder: Path) -> Sequence[str]:
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    torn: list[TornLine] = []
    try:
        with open_history(folders[0], folders[1:]) as history:
            findings = audit_files(stream_history(history.files, torn), torn)
    except HoldfastError as error:
        return [f"the audit cannot read the history: {error}"]
    return [f"audit: {finding.check}: {finding.because}" for finding in findings if finding.verdict == "fail"]
