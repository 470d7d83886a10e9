"""Rehearses a script: runs it twice without a kill and once with kills, and compares the states after each step."""

import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import IO, cast

from rich.console import Console

from holdfast.compare.saved_run import open_run
from holdfast.compare.state_differences import compare
from holdfast.errors import BadInput
from holdfast.events import Detect, Plan, Restart, Step
from holdfast.faults.schedule import Failure
from holdfast.finding import counted
from holdfast.history.log import read_history
from holdfast.progress import Progress
from holdfast.rehearse import cause
from holdfast.rehearse.case import Cause, DivergenceCase, listed
from holdfast.rehearse.compare import divergence, first_steps, left_behind, live_divergence, unmatched, unstable
from holdfast.rehearse.report import Rehearsed, restarts_of_live_recovery
from holdfast.runs.config import RunConfig
from holdfast.supervise.error_record import read_error
from holdfast.supervise.preload import warm
from holdfast.supervise.supervisor import supervise
from holdfast.supervise.verdict import RunVerdict
from holdfast.train.observe import observations
from holdfast.train.observe.observations import Kill, Observed, parse, windows
from holdfast.train.observe.observer import REHEARSAL, SEVERAL_RANKS, Rehearsal

REFERENCE, AGAIN, KILLED = "reference", "again", "killed"
OBSERVATIONS = "rehearsal"  # a folder in that of each run
UNTESTED = "values that differ between ranks were not tested: rehearse with --workers 2"
Print = Callable[[str], None]
SHORT_SECONDS = 5.0  # progress is printed only after this time
_PROGRESS = re.compile(r"holdfast: step (\d+)")


def rehearse(
    config: RunConfig,
    out: Path,
    *,
    steps: int | None = None,
    at_random: int = 3,
    seed: int = 0,
    preload: tuple[str, ...] = (),
    print_line: Print = lambda line: None,
) -> Rehearsed:
    """Run the script twice without and once with kills, and compare the state passed to `run.protect` after every step.

    Each run trains `steps` steps, or a default number. Kills happen at ends of epochs, at saves, and at `at_random`
    more steps, drawn with `seed`. `preload` names modules to import before workers start."""
    if config.recovery not in ("restart", "replay"):
        raise BadInput(f"--recovery {config.recovery} does not keep the bits: rehearse restart or replay.")
    runner = _Runner(replace(config, writer="blocking"), out, steps, preload, print_line)
    warm(preload)
    reference = runner.run(REFERENCE)
    if isinstance(reference, Rehearsed):
        return reference
    again = runner.run(AGAIN)
    if isinstance(again, Rehearsed):
        return again
    if difference := divergence(reference, again):
        case = DivergenceCase(divergence=difference, reference=reference, run=again)
        return Rehearsed(run=AGAIN, divergence=difference, cause=cause.of_unkilled_runs(case))
    return _compare_killed(runner, reference, again, at_random, seed)


def _compare_killed(
    runner: "_Runner", reference: list[Observed], again: list[Observed], at_random: int, seed: int
) -> Rehearsed:
    """Run the script with kills and compare it with `reference`; the run `again` shows what varies without kills."""
    history = read_history(runner.out / REFERENCE)
    plan = next(event.what for event in history.events if isinstance(event.what, Plan))
    per_epoch = plan.samples // plan.batch
    trained = 1 + windows(reference)[-1].step
    kills = observations.kills(trained, per_epoch, ranks=runner.config.workers, at_random=at_random, seed=seed)
    if not kills:
        raise BadInput("The script trains a single step, so there is no boundary to kill it at: train 2 steps or more.")
    killed = runner.run(KILLED, kills)
    if isinstance(killed, Rehearsed):
        return replace(killed, kills=kills)
    ignored = frozenset(unstable(reference, again))
    is_live = runner.config.recovery != "restart"
    difference = (
        live_divergence(reference, killed, [kill.step for kill in kills]) if is_live else divergence(reference, killed)
    )
    if difference:
        case = DivergenceCase(divergence=difference, reference=reference, run=killed, unstable=ignored)
        # A run that differs before its first kill differs for another reason than the kill.
        find_cause = cause.of_unkilled_runs if difference.before is None else cause.of_a_killed_run
        return Rehearsed(run=KILLED, steps=trained, kills=kills, divergence=difference, cause=find_cause(case))
    began = first_steps(killed)[1:]
    why = _other_difference(runner.out / REFERENCE, runner.out / KILLED, unmatched(reference, killed))
    if len(began) != len(kills):
        why = f"{len(kills)} kills were planned, and the run was restarted {len(began)} times: nothing is proved"
    if why:
        return Rehearsed(run=KILLED, steps=trained, kills=kills, cause=Cause(word="unknown", why=why))
    forgotten = left_behind(reference, killed, ignored)
    return Rehearsed(
        run=KILLED,
        steps=trained,
        kills=kills,
        began=began,
        cause=cause.of_forgotten(forgotten, reference, killed),
        forgotten=forgotten,
        restarted=_restarts(runner.out / KILLED, len(kills)) if is_live else "",
        untested=runner.untested(),
        unseen=""
        if trained > per_epoch or plan.own
        else f"no epoch ended in these steps: give --steps {per_epoch + 2} or more",
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Runner:
    """A runner of the script, with the settings of a rehearsal. Every run has a folder of its own in `out`."""

    config: RunConfig
    out: Path
    steps: int | None
    preload: tuple[str, ...]
    print_line: Print

    def untested(self) -> str:
        """Return what the rehearsal of a script for several ranks leaves out if it has a single worker, else ""."""
        is_for_several = (self.out / REFERENCE / OBSERVATIONS / SEVERAL_RANKS).exists()
        return UNTESTED if is_for_several and self.config.workers == 1 else ""

    def run(self, name: str, kills: tuple[Kill, ...] = ()) -> list[Observed] | Rehearsed:
        """Run the script once; return the observations of its workers, or the rehearsal's result if the run failed."""
        folder = self.out / name
        failures = tuple(Failure(step=kill.step, kind="kill", targets=(kill.rank,)) for kill in kills)
        config = replace(self.config, failures=failures, max_restarts=len(kills))
        observations_folder = folder / OBSERVATIONS
        saves = tuple(sorted({kill.saved for kill in kills}))
        order = Rehearsal(folder=str(observations_folder.resolve()), steps=self.steps, saves=saves)
        about = "before steps " + ", ".join(str(kill.step) for kill in kills) if kills else "without a failure"
        self.print_line(f"{name}: {'killed' if kills else 'run'} {about}")
        began = monotonic()
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / f"{name}.log").open("w") as file:
            log = cast(IO[str], _Log(file, name, self.print_line))
            os.environ[REHEARSAL] = order.to_text()  # for the workers
            try:
                with redirect_stdout(log):
                    verdict = supervise(config, folder, preload=self.preload, console=Console(file=log))
            finally:
                del os.environ[REHEARSAL]
        texts = (path.read_text() for path in sorted(observations_folder.glob("rank-*.jsonl")))
        lines = (line for text in texts for line in text.splitlines(keepends=True))
        observed = [parse(line) for line in lines if line.endswith("\n")]  # a kill may have cut off the last line
        if verdict.verdict != "completed":
            return Rehearsed(run=name, cause=_failure(verdict, folder))
        trained = windows(observed)
        if not trained:
            raise BadInput(
                f"{config.script} trained nothing through run.batches(...), so there is nothing to compare: attach, protect "
                "and loop as the README shows."
            )
        self.print_line(
            f"{name}: {1 + trained[-1].step} steps, {counted(verdict.attempts, 'attempt')}, {monotonic() - began:.1f} s"
        )
        return observed


class _Log:
    """A text file for the supervisor's output, which also prints the progress of a long run."""

    def __init__(self, file: IO[str], name: str, print_line: Print) -> None:
        self._file, self._name, self._print_line = file, name, print_line
        self._began = monotonic()

    def write(self, text: str) -> int:
        if (step := _PROGRESS.match(text)) and monotonic() - self._began > SHORT_SECONDS:
            self._print_line(f"{self._name}: step {step[1]}")
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()

    def isatty(self) -> bool:
        return False


def _failure(verdict: RunVerdict, folder: Path) -> Cause:
    if verdict.verdict == "preempted":
        raise KeyboardInterrupt
    when = "after a kill" if folder.name == KILLED else "without a kill"
    files = sorted(folder.glob("logs/attempt-*/*.error.json"))
    raised = [error for file in files[-1:] if (error := read_error(file, Progress()))]
    if raised and raised[0].origin == "refused":
        return Cause(word="refused", why=f"holdfast refuses it {when}: {raised[0].message}")
    return Cause(word="the script failed", why=f"the script fails {when}: {verdict.because}")


def _other_difference(reference: Path, killed: Path, steps: list[int]) -> str:
    if steps:
        return f"steps {', '.join(map(str, steps))} were trained in one run and not in the other"
    if why := last_difference(reference, killed):
        return why
    fingerprints, expected = _fingerprints(killed), _fingerprints(reference)
    wrong = [step for step, rank in expected if fingerprints.get((step, rank)) != expected[step, rank]]
    return f"the recorded fingerprints differ since step {min(wrong)}" if wrong else ""


def last_difference(reference: Path, run: Path) -> str:
    """Return how the newest snapshots of two runs differ, with the names of the differing values; "" if they are equal.

    Their states were equal after each step. Of plain values, those of rank 0 are compared."""
    one, other = (open_run(str(folder), None) for folder in (reference, run))
    if one.step != other.step:
        return f"the last snapshots are of steps {one.step} and {other.step}"
    found = compare(one.state(of_all_ranks=False), other.state(of_all_ranks=False))
    if found.is_equal:
        return ""
    return f"the last snapshots differ in {listed(found.names)}: something protected changed after the last step was recorded"


def _restarts(folder: Path, kills: int) -> str:
    events = (event.what for event in read_history(folder).events)
    return restarts_of_live_recovery((event for event in events if isinstance(event, Restart | Detect)), kills)


def _fingerprints(folder: Path) -> dict[tuple[int, int], str | None]:
    steps = (event.what for event in read_history(folder).events)
    return {(step.step, step.rank): step.state for step in steps if isinstance(step, Step)}
