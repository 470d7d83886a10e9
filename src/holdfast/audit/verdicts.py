"""Verdicts on a run, computed from its history alone: every check, what it found, and the worst of them."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from holdfast.audit import checks
from holdfast.audit.checks import Verdict, counted
from holdfast.audit.ledger import CannotTell, Ledger
from holdfast.events import Event
from holdfast.history import Torn, stream_history

Check: TypeAlias = Callable[[Ledger], tuple[Verdict, str]]
SEVERITY: Sequence[Verdict] = ("pass", "unknown", "fail")
# Every check by name, in the order in which findings are shown.
CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        checks.one_plan,
        checks.reached_the_end,
        checks.restores_only_committed,
        checks.every_cursor_advances_once,
        checks.shares_agree,
        checks.every_sample_trained_once,
        checks.generators_restored,
    )
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and because of what."""

    check: str
    verdict: Verdict
    because: str


def audit(history: Iterable[Event]) -> tuple[Finding, ...]:
    """Every check's finding on the events of a run."""
    return _findings(Ledger(history))


def audit_run(path: Path | Sequence[Path]) -> tuple[Finding, ...]:
    """Whether the history at this path, or at these, is whole, and every check's finding on it."""
    with _no_collection():
        torn: list[Torn] = []
        ledger = Ledger(stream_history(path, torn))
        return (_readable(ledger, torn), *_findings(ledger))


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict on the whole: the worst of its parts, and unknown if there are none."""
    return max((finding.verdict for finding in findings), key=SEVERITY.index, default="unknown")


def _findings(ledger: Ledger) -> tuple[Finding, ...]:
    return tuple(_find(name, check, ledger) for name, check in CHECKS.items())


def _find(name: str, check: Check, ledger: Ledger) -> Finding:
    try:
        return Finding(name, *check(ledger))
    except CannotTell as error:
        return Finding(name, "unknown", str(error))


def _readable(ledger: Ledger, torn: Sequence[Torn]) -> Finding:
    """A torn line was promised to nobody: if a step is missing because of it, another check says so."""
    said = f"{counted(ledger.events, 'event')} of {counted(len(ledger.writers), 'writer')}"
    lines = [f"{each.path.name} line {each.line}, {each.size} bytes" for each in torn]
    left = f"; killed writers left {counted(len(torn), 'torn line')}: {'; '.join(lines)}" if torn else ""
    return Finding("history_is_readable", "pass" if ledger.events else "unknown", said + left)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A long history is millions of objects that all stay: the collector of garbage would visit them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
