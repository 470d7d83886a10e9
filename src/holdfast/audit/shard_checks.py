"""Audit checks of lost shards that came back with older values (`--recovery partial`), and their description.

Each worker that replaced a lost one declares where every part of its shard came from. The bits of such a step cannot be
those of a run without failures, so the audit checks the declaration and not the bits.
"""

from collections.abc import Iterator, Mapping

from holdfast.audit.memberships import MemberChange, Memberships
from holdfast.audit.rank_session import RankSession
from holdfast.audit.run_record import RunRecord
from holdfast.events import GATHERED, JSON, SNAPSHOT, SURVIVORS, Reassembled

_TEXTS = {GATHERED: "weights gathered in", SNAPSHOT: "the snapshot of", SURVIVORS: "the surviving rows of"}


def wrong_shards(record: RunRecord, memberships: Memberships) -> Iterator[str]:
    """Yield a message for each replacement whose declaration of its shard is absent or impossible."""
    committed = {save.commit.step for save in record.saves}
    for change, session in _replacements(memberships):
        if change.strategy != "partial":
            if session.reassembled:
                yield f"{session.who} put a shard together from older values, in a recovery by {change.strategy!r:.20}"
            continue
        declared = declaration(session)
        if declared is None or declared.step != session.first_step:
            yield (
                f"{session.who} replaced a lost worker in step {session.first_step} of attempt {memberships.attempt}, and "
                "does not declare where its shard is from"
            )
        else:
            wrong = (_wrong_source(source, declared.step, committed) for source in _sources(declared))
            yield from (f"{session.who} declares a shard from {text}" for text in wrong if text)


def _replacements(memberships: Memberships) -> Iterator[tuple[MemberChange, RankSession]]:
    """Yield the changes in which workers joined, each with the events of one that then trained."""
    for change in memberships.changes:
        for join in change.joined:
            if join.session and join.session.recover:
                yield change, join.session


def declaration(session: RankSession) -> Reassembled | None:
    """Return the event in which a replacement declared its shard when it joined, or None."""
    return next((event for event in reversed(session.reassembled) if event.number == session.joined_as), None)


def _sources(declared: Reassembled) -> list[Mapping[str, JSON]]:
    return [*declared.parameters, *declared.moments]


def _wrong_source(source: Mapping[str, JSON], step: int, committed: set[int]) -> str | None:
    origin, at = source.get("origin"), source.get("step")
    if origin not in _TEXTS or type(at) is not int or not 0 <= at <= step:
        return f"{origin!r:.20} of step {at!r:.20}, which cannot be known before step {step}"
    if origin == SNAPSHOT and at not in committed:
        return f"the snapshot of step {at}, which the run has not committed"
    return None


def describe_shards(change: MemberChange) -> str:
    """Return text on where the shards of the workers that joined in `change` came from; empty if nothing is declared."""
    sessions = (join.session for join in change.joined if join.session)
    events = [event for event in map(declaration, sessions) if event]
    steps: dict[str, set[int]] = {}
    for source in (source for event in events for source in _sources(event)):
        steps.setdefault(str(source.get("origin")), set()).add(int(str(source.get("step"))))
    parts = [f"{_TEXTS[origin]} {_step_names(steps[origin])}" for origin in _TEXTS if origin in steps]
    rounded = sorted({event.rounded for event in events if event.rounded})
    text = f", its shard from {' and '.join(parts)}" if parts else ""
    return text + (f" (weights rounded to {', '.join(rounded)})" if rounded else "")


def _step_names(steps: set[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, sorted(steps)))}"
