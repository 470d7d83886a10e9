"""The audit of a run: read its event files (the history), run every check, and return their findings."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.audit import (
    corruption_checks,
    history_checks,
    loss_checks,
    restore_checks,
    sample_checks,
    snapshot_checks,
    training_checks,
)
from holdfast.audit.run_record import RunRecord
from holdfast.events import Event
from holdfast.finding import SHOWN, CannotTell, Verdict, counted
from holdfast.history.folded import StepRun
from holdfast.history.log import TornLine, Where, stream_blocks
from holdfast.memory import no_collection
from holdfast.runs.histories import RunFacts, checkpoints_of, read_facts

SEVERITY: Sequence[Verdict] = ("pass", "unknown", "fail")
# Every check by name, in the order in which findings are shown. A check that returns None is left out.
CHECKS: Mapping[str, Callable[[RunRecord], tuple[Verdict, str] | None]] = {
    check.__name__: check
    for check in (
        history_checks.history_is_readable,
        history_checks.every_rank_has_a_history,
        history_checks.every_start_is_an_attempt,
        history_checks.one_plan,
        history_checks.reached_the_end,
        restore_checks.restores_only_committed,
        restore_checks.restored_states_agree,
        restore_checks.generators_restored,
        loss_checks.lost_workers_are_declared,
        sample_checks.every_step_follows_the_last,
        sample_checks.all_ranks_report_every_step,
        sample_checks.every_sample_trained_once,
        training_checks.every_step_was_trained,
        training_checks.repeated_steps_agree,
        corruption_checks.no_corruption_remains,
    )
}
# Checks that fail if the events of a node are missing.
_NEED_ALL_NODES = (
    "restores_only_committed",
    "restored_states_agree",
    "generators_restored",
    "lost_workers_are_declared",
    "reached_the_end",
    "every_step_follows_the_last",
    "all_ranks_report_every_step",
    "every_sample_trained_once",
)
_TRAINING_WRITER = re.compile(r"(rank|supervisor|injected)\b.*")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one audit check: its name (`check`), pass, fail or unknown (`verdict`), and the reason (`because`)."""

    check: str
    verdict: Verdict
    because: str


def audit(history: Iterable[Event], facts: RunFacts | None = None) -> tuple[Finding, ...]:
    """Run every audit check on the events of a run, and return the findings.

    The events of each process must be in order. `facts` are the settings of the run, such as its recovery strategy."""
    return audit_files(((event.who, event) for event in history), facts=facts)


def audit_run(path: Where, facts: RunFacts | None = None) -> tuple[Finding, ...]:
    """Audit a run, and return a `Finding` for each check. `path` is the folder of the run or of its history.

    The audit also checks the snapshots of the run, if it finds them. `facts` are the settings of the run. By default,
    the audit reads them from the file run.json of the run."""
    with no_collection():
        torn: list[TornLine] = []
        findings = audit_files(stream_blocks(path, torn, keep_damaged=True), torn, facts or read_facts(path))
    check = snapshot_checks.snapshots_hold_every_row_once
    place = checkpoints_of(path)
    verdict = check(place) if place else None
    return (*findings, Finding(check.__name__, *verdict)) if verdict else findings


def audit_files(
    lines: Iterable[tuple[str, Event | StepRun]], torn: Sequence[TornLine] = (), facts: RunFacts | None = None
) -> tuple[Finding, ...]:
    """Audit a run from (file name, event) pairs and the run's settings (`facts`); `torn` lists incomplete lines.

    Folded steps may be given as `StepRun` instead of as events."""
    record = RunRecord(torn=torn, facts=facts)
    others: list[tuple[str, Event]] = []
    for file, event in lines:
        if isinstance(event, StepRun):
            record.add_run(event, file)
        elif _TRAINING_WRITER.fullmatch(event.who):
            record.add(event, file)
        else:
            others.append((file, event))
    if others and (findings := _server_findings(others, torn, record)):
        return findings
    for file, event in others:
        record.add(event, file)
    findings = _excused(_run_checks(CHECKS, record), record)
    if record.has_trained:
        return findings
    # Every check would say the same in its own words; but an error is an error.
    failed = (finding for finding in findings if finding.verdict == "fail")
    return (*failed, Finding("training_has_begun", "unknown", _why_untrained(record)))


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict of `findings`, or "unknown" if there are none."""
    return max((finding.verdict for finding in findings), key=SEVERITY.index, default="unknown")


def _excused(findings: tuple[Finding, ...], record: RunRecord) -> tuple[Finding, ...]:
    """Return `findings`, with a failure changed to "unknown" where the absent history of a node may be its cause."""
    if not (absent := _absent_history(record)):
        return findings
    return tuple(
        Finding(finding.check, "unknown", f"{absent}. Without it: {finding.because}")
        if finding.verdict == "fail" and finding.check in _NEED_ALL_NODES
        else finding
        for finding in findings
    )


def _absent_history(record: RunRecord) -> str | None:
    """Return what is absent of the history of a run of several nodes, and what to do; None if nothing is."""
    if nodes := record.absent_nodes:
        numbers = ", ".join(map(str, nodes[:SHOWN])) + (", ..." if len(nodes) > SHOWN else "")
        absent, folder = ("node", "its folder") if len(nodes) == 1 else ("nodes", "each folder")
        return (
            f"the history of {absent} {numbers} is absent: name {folder} with --node-folder, or audit where the "
            "checkpoint store can be reached"
        )
    if record.nodes > 1 and (parts := record.absent_parts):
        ranks = ", ".join(parts[:SHOWN]) + (", ..." if len(parts) > SHOWN else "")
        return (
            f"the history of {ranks} is absent: the node that had it was lost before it sent it to the checkpoint store. "
            "If its folder still exists, name it with --node-folder"
        )
    return None


def _server_findings(
    lines: Sequence[tuple[str, Event]], torn: Sequence[TornLine], others: RunRecord
) -> tuple[Finding, ...]:
    """Return the audit findings of a parameter-server run, or () if no parameter server wrote `lines`.

    `lines` are (file name, event) pairs, `torn` lists incomplete lines, and `others` has the events of all other
    processes."""
    from holdfast.server.audit.checks import CHECKS as SERVER_CHECKS  # most audits do not need it
    from holdfast.server.audit.server_ledger import ServedLedger, writer_of

    served = ServedLedger(torn)
    strangers = {*others.writers}
    for file, event in lines:
        if writer_of(event.who) is None:
            strangers.add(event.who)
        else:
            served.take(event, file)
    if not served.is_served:
        return ()
    served.wrong += [f"{who} takes no part in a served run" for who in sorted(strangers)]
    return _run_checks(SERVER_CHECKS, served)


def _run_checks(checks: Mapping[str, Callable[..., tuple[Verdict, str] | None]], record: object) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            if verdict := check(record):
                findings.append(Finding(name, *verdict))
        except CannotTell as error:
            findings.append(Finding(name, "unknown", str(error)))
    return tuple(findings)


def _why_untrained(record: RunRecord) -> str:
    if any(verdict.verdict == "completed" for verdict in record.verdicts):
        return (
            "supervised only: the workers ended normally, but none called run.batches(). So the history does not say which "
            "samples were trained, nor whether the script resumed exactly after a failure"
        )
    starts = {launch.attempt for _, launch in record.launches} | set(record.attempts)
    return f"no rank reached its training loop in {counted(len(starts), 'attempt')}: nothing was trained yet"
