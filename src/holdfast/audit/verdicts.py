"""Verdicts on a run, computed from its history alone: every check, what it found, and the worst of them."""

import gc
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from holdfast.audit import live, plan, record, replays, restores, supervisors, training, windows
from holdfast.audit.ledger import Ledger
from holdfast.events import Event
from holdfast.finding import CannotTell, Verdict, counted
from holdfast.history.log import Torn, Where, stream_history
from holdfast.server.audit.checks import CHECKS as SERVED_CHECKS
from holdfast.server.audit.server_ledger import ServedLedger, writer_of

Check: TypeAlias = Callable[[Ledger], tuple[Verdict, str]]
SEVERITY: Sequence[Verdict] = ("pass", "unknown", "fail")
# Every check by name, in the order in which findings are shown.
CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        record.history_is_readable,
        record.all_ranks_are_on_record,
        record.every_life_is_an_attempt,
        plan.one_plan,
        plan.reached_the_end,
        supervisors.supervisors_agree,
        restores.restores_only_committed,
        restores.restored_states_agree,
        restores.generators_restored,
        live.live_recoveries,
        windows.every_cursor_advances_once,
        windows.shares_agree,
        windows.every_sample_trained_once,
        training.every_window_was_trained,
        replays.replayed_steps_agree,
    )
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and because of what."""

    check: str
    verdict: Verdict
    because: str


def audit(history: Iterable[Event], recovery: str | None = None) -> tuple[Finding, ...]:
    """Every check's finding on the events of a run, in any order that keeps each writer's own."""
    return audit_files(((event.who, event) for event in history), recovery=recovery)


def audit_files(
    lines: Iterable[tuple[str, Event]],
    torn: Sequence[Torn] = (),
    argv: Sequence[str] | None = None,
    recovery: str | None = None,
    weights: str | None = None,
    *,
    at_home: bool = False,
) -> tuple[Finding, ...]:
    """Every check's finding on the events of a run, each with the name of the file it was read from."""
    ledger = Ledger(torn=torn, argv=argv, recovery=recovery, weights=weights, at_home=at_home)
    served = ServedLedger(torn)
    others: list[tuple[str, Event]] = []  # of writers that only a served run has
    for file, event in lines:
        if writer_of(event.who) is None:
            ledger.take(event, file)
        else:
            others.append((file, event))
    for file, event in others:
        served.take(event, file)
    if served.is_served:
        return _served_findings(served, ledger)
    for file, event in others:
        ledger.take(event, file)
    return _findings(ledger)


def audit_run(
    path: Where, argv: Sequence[str] | None = None, recovery: str | None = None, weights: str | None = None
) -> tuple[Finding, ...]:
    """Every check's finding on the history at this path, or at these.

    `argv` is what was to be run, with first `weights` of this digest if not with its own, and `recovery` how it was to
    recover, if that is known.
    """
    with no_collection():
        torn: list[Torn] = []
        told = (argv, recovery or recovery_of(path), weights)
        return audit_files(stream_history(path, torn), torn, *told, at_home=_is_at_home(path))


def recovery_of(path: Where) -> str | None:
    """How the run in this folder was to recover, or that in the first of these folders that says so."""
    said = (each.get("recovery") for each in _configs(path))
    return next((each for each in said if isinstance(each, str)), None)


def _is_at_home(path: Where) -> bool:
    """Whether the snapshots of the run in this folder, or with these files, lie in its folder."""
    return any("checkpoints" in each and each["checkpoints"] is None for each in _configs(path))


def _configs(path: Where) -> Iterator[dict[str, object]]:
    """What run.json says in each of these folders, or of the run that these are files of."""
    paths = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(each) for each in path]
    for folder in dict.fromkeys(each.parent.parent if each.suffix == ".jsonl" else each for each in paths):
        with suppress(OSError, ValueError):
            said = json.loads((folder / "run.json").read_text())
            if isinstance(said, dict):
                yield said


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict on the whole: the worst of its parts, and unknown if there are none."""
    return max((finding.verdict for finding in findings), key=SEVERITY.index, default="unknown")


def _findings(ledger: Ledger) -> tuple[Finding, ...]:
    findings = tuple(_find(name, partial(check, ledger)) for name, check in CHECKS.items())
    if ledger.has_begun:
        return findings
    # Every check would say the same in its own words; but what is wrong is wrong.
    return (*(each for each in findings if each.verdict == "fail"), Finding("training_has_begun", *_not_begun(ledger)))


def _served_findings(served: ServedLedger, others: Ledger) -> tuple[Finding, ...]:
    """The findings on a run of the parameter server, in which nobody else writes."""
    served.wrong += [f"{who} takes no part in a served run" for who in sorted(others.writers)]
    return tuple(_find(name, partial(check, served)) for name, check in SERVED_CHECKS.items())


def _not_begun(ledger: Ledger) -> tuple[Verdict, str]:
    if any(each.verdict == "completed" for life in ledger.supervisions for each in life.verdicts):
        return "unknown", (
            "supervised only: the workers ended in order, and none came to run.batches(): which samples were trained, and "
            "whether it went on exactly after a failure, is not on record"
        )
    starts = {number for each in ledger.supervisions for number in each.launches} | set(ledger.attempts)
    return "unknown", f"no rank came to its training loop in {counted(len(starts), 'attempt')}: nothing was trained yet"


def _find(name: str, check: Callable[[], tuple[Verdict, str]]) -> Finding:
    try:
        return Finding(name, *check())
    except CannotTell as error:
        return Finding(name, "unknown", str(error))


@contextmanager
def no_collection() -> Iterator[None]:
    """A long history is millions of objects that come and go: the collector of garbage would look at them in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
