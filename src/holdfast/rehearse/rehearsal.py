"""Rehearses a script: a reference, the same again, the same killed; each under a supervisor, in a folder of its own."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import IO, cast

from rich.console import Console

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput
from holdfast.events import Plan, Step
from holdfast.faults.schedule import Failure
from holdfast.finding import counted
from holdfast.history.log import read_history
from holdfast.progress import Progress
from holdfast.rehearse import cause
from holdfast.rehearse.cause import Cause, DivergenceCase
from holdfast.rehearse.compare import begins, divergence, left_behind, restless, unmatched
from holdfast.rehearse.report import Rehearsed
from holdfast.runs.config import RunConfig
from holdfast.supervise.failure_cause import read_error
from holdfast.supervise.preload import warm
from holdfast.supervise.supervisor import supervise
from holdfast.supervise.verdict import RunVerdict
from holdfast.train.observe import observations
from holdfast.train.observe.observations import Kill, Observed, parse, windows
from holdfast.train.observe.observer import REHEARSAL, Rehearsal

REFERENCE, AGAIN, KILLED = "reference", "again", "killed"
Tell = Callable[[str], None]
SHORT = 5.0  # seconds of a run in which nothing is said of how far it is
_PROGRESS = re.compile(r"holdfast: step (\d+)")


def rehearse(
    config: RunConfig,
    out: Path,
    *,
    steps: int | None = None,
    at_random: int = 3,
    seed: int = 0,
    preload: tuple[str, ...] = (),
    tell: Tell = lambda line: None,
) -> Rehearsed:
    """Run the script unkilled twice and killed once, and compare everything after every step."""
    stage = _Stage(replace(config, writer="blocking", recovery="restart"), out, steps, preload, tell)
    warm(preload)
    reference = stage.play(REFERENCE)
    if isinstance(reference, Rehearsed):
        return reference
    again = stage.play(AGAIN)
    if isinstance(again, Rehearsed):
        return again
    if found := divergence(reference, again):
        case = DivergenceCase(found=found, reference=reference, run=again)
        return Rehearsed(run=AGAIN, found=found, cause=cause.of_unkilled_runs(case))
    plan = _plan(out / REFERENCE)
    per_epoch = plan.samples // plan.batch
    trained = 1 + windows(reference)[-1].step
    kills = observations.kills(trained, per_epoch, ranks=config.workers, at_random=at_random, seed=seed)
    return _judged(stage, reference, again, kills, trained, per_epoch)


def _judged(
    stage: "_Stage",
    reference: list[Observed],
    again: list[Observed],
    kills: tuple[Kill, ...],
    trained: int,
    per_epoch: int,
) -> Rehearsed:
    """What a run shows that is killed there."""
    if not kills:
        raise BadInput("this script trains a single step: there is no boundary to be killed at.")
    killed = stage.play(KILLED, kills)
    if isinstance(killed, Rehearsed):
        return replace(killed, kills=kills)
    moved = frozenset(restless(reference, again))
    if found := divergence(reference, killed):
        case = DivergenceCase(found=found, reference=reference, run=killed, restless=moved)
        # It may differ before its first kill, too: then that is no matter of kills.
        ask = cause.of_a_killed_run if found.is_resumed else cause.of_unkilled_runs
        return Rehearsed(run=KILLED, steps=trained, kills=kills, found=found, cause=ask(case))
    began = begins(killed)[1:]
    if len(began) != len(kills):
        why = f"{len(kills)} kills were to strike, and it was started {len(began)} times anew: nothing is proved"
        return Rehearsed(run=KILLED, steps=trained, kills=kills, cause=Cause(word="unknown", why=why))
    if others := _otherwise(stage.out / REFERENCE, stage.out / KILLED, unmatched(reference, killed)):
        return Rehearsed(run=KILLED, steps=trained, kills=kills, cause=Cause(word="unknown", why=others))
    return Rehearsed(
        run=KILLED,
        steps=trained,
        kills=kills,
        began=began,
        forgotten=left_behind(reference, killed, moved),
        unseen="" if trained > per_epoch else f"no epoch ended in these steps: give --steps {per_epoch + 2} or more",
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """Where runs of a rehearsal take place."""

    config: RunConfig
    out: Path
    steps: int | None
    preload: tuple[str, ...]
    tell: Tell

    def play(self, name: str, kills: tuple[Kill, ...] = ()) -> list[Observed] | Rehearsed:
        """One run: what its workers saw; or what it shows that it did not come to its end."""
        folder = self.out / name
        failures = tuple(Failure(step=each.step, kind="kill", targets=(each.rank,)) for each in kills)
        config = replace(self.config, failures=failures, max_restarts=len(kills))
        seen = folder / "rehearsal"
        order = Rehearsal(folder=str(seen.resolve()), steps=self.steps, saves=observations.saves(kills))
        self.tell(f"{name}: {_about(kills)}")
        began = monotonic()
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / f"{name}.log").open("w") as file, _told(order):
            log = cast(IO[str], _Log(file, name, self.tell))
            with redirect_stdout(log):
                verdict = supervise(config, folder, preload=self.preload, console=Console(file=log))
        observed = _read(seen)
        if verdict.verdict != "completed":
            return Rehearsed(run=name, cause=_failure(verdict, folder))
        trained = windows(observed)
        if not trained:
            raise BadInput(
                f"{config.script} trained nothing through run.batches(...): attach, protect and loop as README shows, or "
                "there is nothing to compare."
            )
        self.tell(
            f"{name}: {1 + trained[-1].step} steps, {counted(verdict.attempts, 'attempt')}, {monotonic() - began:.1f} s"
        )
        return observed


class _Log:
    """Where a supervisor prints: into a file, and how far its run is also to whoever waits for the rehearsal."""

    def __init__(self, file: IO[str], name: str, tell: Tell) -> None:
        self._file, self._name, self._tell = file, name, tell
        self._began = monotonic()

    def write(self, text: str) -> int:
        if (step := _PROGRESS.match(text)) and monotonic() - self._began > SHORT:
            self._tell(f"{self._name}: step {step[1]}")
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()

    def isatty(self) -> bool:
        return False


def _about(kills: tuple[Kill, ...]) -> str:
    if not kills:
        return "is run without a failure"
    return "is killed before steps " + ", ".join(str(each.step) for each in kills)


@contextmanager
def _told(order: Rehearsal) -> Iterator[None]:
    """Workers that are started meanwhile are told that they rehearse."""
    os.environ[REHEARSAL] = order.to_text()
    try:
        yield
    finally:
        del os.environ[REHEARSAL]


def _read(folder: Path) -> list[Observed]:
    """What all ranks wrote down; a line that a kill cut off is left out."""
    files = sorted(folder.glob("rank-*.jsonl"))
    return [parse(line) for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _plan(folder: Path) -> Plan:
    return next(each.what for each in read_history(folder).events if isinstance(each.what, Plan))


def _failure(verdict: RunVerdict, folder: Path) -> Cause:
    """What a run shows that did not come to its end."""
    if verdict.verdict == "preempted":
        raise KeyboardInterrupt
    when = "after a kill" if folder.name == KILLED else "without a kill"
    files = sorted(folder.glob("logs/attempt-*/*.error.json"))
    raised = [each for file in files[-1:] if (each := read_error(file, Progress()))]
    if raised and raised[0].origin == "refused":
        return Cause(word="refused", why=f"holdfast refuses it {when}: {raised[0].message}")
    return Cause(word="the script failed", why=f"the script fails {when}: {verdict.because}")


def _otherwise(reference: Path, killed: Path, steps: list[int]) -> str:
    """Where the snapshots at the end and the fingerprints on record differ, though all that was observed agrees."""
    if steps:
        return f"steps {', '.join(map(str, steps))} were trained in one run and not in the other"
    one, other = (snapshot.newest(DirectoryStore(each / "checkpoints")) for each in (reference, killed))
    if (one.step, one.manifest.tensors, one.extra["state"]) != (
        other.step,
        other.manifest.tensors,
        other.extra["state"],
    ):
        return "the last snapshots differ: something protected changed after the last step was on record"
    mine, its = _fingerprints(killed), _fingerprints(reference)
    wrong = [step for step, rank in its if mine.get((step, rank)) != its[step, rank]]
    return f"the fingerprints on record differ since step {min(wrong)}" if wrong else ""


def _fingerprints(folder: Path) -> dict[tuple[int, int], str | None]:
    steps = (each.what for each in read_history(folder).events)
    return {(each.step, each.rank): each.state for each in steps if isinstance(each, Step)}
