"""Was it right: verdicts computed from a history alone. A check is a pure function of the events.

What the checks read of an event, beside who wrote it:

    step     attempt, step, epoch, cursor, world   a rank trained its share of window `cursor` of `epoch`
    commit   attempt, step                         the snapshot of `step` exists from now on
    recover  attempt, restored, epoch, cursor      the snapshot of step `restored` came back, and training goes on with
                                                   window `cursor` of `epoch`; what does not apply is left out

An attempt that is not given is the first. A `recover` declares as rolled back what was trained at its position or
beyond it by earlier attempts, whichever the rank, and by its own writer before it. Order across ranks is thus told by
attempts: clocks decide only within one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from holdfast.history import Event

Verdict: TypeAlias = Literal["pass", "fail", "unknown"]
Check: TypeAlias = Callable[[Sequence[Event]], tuple[Verdict, str]]
Position: TypeAlias = tuple[int, int]  # epoch, cursor
SEVERITY: Sequence[Verdict] = ("pass", "unknown", "fail")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and because of what."""

    check: str
    verdict: Verdict
    because: str


class _CannotTell(Exception):
    """An event lacks what a check reads, so the check has no verdict."""


def audit(history: Sequence[Event]) -> tuple[Finding, ...]:
    """Every check's finding on the events of a run."""
    return tuple(_find(name, check, history) for name, check in CHECKS.items())


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict on the whole: the worst of its parts, and unknown if there are none."""
    return max((finding.verdict for finding in findings), key=SEVERITY.index, default="unknown")


def _find(name: str, check: Check, history: Sequence[Event]) -> Finding:
    try:
        return Finding(name, *check(history))
    except _CannotTell as error:
        return Finding(name, "unknown", str(error))


@dataclass(frozen=True, slots=True)
class _Step:
    """A step event, read."""

    who: str
    attempt: int
    step: int
    at: Position
    world: int


def restores_only_committed(history: Sequence[Event]) -> tuple[Verdict, str]:
    """A snapshot comes back only if it was committed before."""
    committed: set[int] = set()
    restores = 0
    for event in sorted(history, key=_attempt):
        if event.event == "commit":
            committed.add(_number(event, "step"))
        elif event.event == "recover" and event.fields.get("restored") is not None:
            restores += 1
            if (step := _number(event, "restored")) not in committed:
                return "fail", f"{event.who} restored step {step} in attempt {_attempt(event)}, not committed by then"
    if not committed:
        return "unknown", "nothing was committed"
    return "pass", f"{_count(restores, 'restore')}, {_count(len(committed), 'committed step')}"


def every_cursor_advances_once(history: Sequence[Event]) -> tuple[Verdict, str]:
    """Without what was rolled back, every window is trained in one attempt, in order, and none is left out."""
    steps = _kept(history)
    if not steps:
        return "unknown", "no step was trained and kept"
    one_of_each = {step.at: step for step in steps}
    run = [one_of_each[at] for at in sorted(one_of_each)]
    if run[0].at != (0, 0):
        return "fail", f"the run starts at {_name(run[0].at)}"
    if because := _trained_again(steps) or _jump(steps, run):
        return "fail", because
    return "pass", f"{_count(len(run), 'window')} from {_name(run[0].at)} to {_name(run[-1].at)}"


def shares_agree(history: Sequence[Event]) -> tuple[Verdict, str]:
    """Ranks that report the same step mean the same window and the same world."""
    groups: defaultdict[tuple[int, int], list[_Step]] = defaultdict(list)
    for step in _kept(history):
        groups[step.attempt, step.step].append(step)
    complete = 0
    for (attempt, number), group in groups.items():
        first = group[0]
        for other in group[1:]:
            if (first.at, first.world) != (other.at, other.world):
                return "fail", (
                    f"step {number} of attempt {attempt} is {_name(first.at)} of world {first.world} to {first.who} "
                    f"and {_name(other.at)} of world {other.world} to {other.who}"
                )
        complete += len({step.who for step in group}) == first.world
    if not complete:
        return "unknown", "no step was reported by all ranks of its world"
    return "pass", f"{_count(complete, 'step')} reported by all ranks of their world"


# Every check by name, in the order in which findings are shown.
CHECKS: Mapping[str, Check] = {
    check.__name__: check for check in (restores_only_committed, every_cursor_advances_once, shares_agree)
}


def _kept(history: Sequence[Event]) -> list[_Step]:
    """The steps that no recover declares rolled back, in the order of the history."""
    by_attempt: dict[int, Position] = {}  # the lowest position that a recover of this attempt goes back to
    for event in history:
        if (back := _goes_back_to(event)) is not None:
            by_attempt[_attempt(event)] = min(back, by_attempt.get(_attempt(event), back))
    by_writer: dict[str, Position] = {}  # the lowest position that this writer goes back to later on
    kept: list[_Step] = []
    for event in reversed(history):
        if (back := _goes_back_to(event)) is not None:
            by_writer[event.who] = min(back, by_writer.get(event.who, back))
        elif event.event == "step":
            step = _read_step(event)
            backs = [back for attempt, back in by_attempt.items() if attempt > step.attempt]
            backs += [by_writer[step.who]] if step.who in by_writer else []
            if all(step.at < back for back in backs):
                kept.append(step)
    return kept[::-1]


def _trained_again(steps: Iterable[_Step]) -> str | None:
    first: dict[Position, _Step] = {}
    for step in steps:
        before = first.setdefault(step.at, step)
        if before.attempt != step.attempt:
            return (
                f"{before.who} trained {_name(step.at)} in attempt {before.attempt} and {step.who} in attempt "
                f"{step.attempt}, and no recover declares either rolled back"
            )
    return None


def _jump(steps: Iterable[_Step], run: Sequence[_Step]) -> str | None:
    """The first move, of a rank within an attempt or of the run, that is not to the next window and step."""
    paths: defaultdict[str, list[_Step]] = defaultdict(list)
    for step in steps:
        paths[f"{step.who} in attempt {step.attempt}"].append(step)
    paths["the run"].extend(run)
    # The history does not say how long an epoch is; but all are as long as the longest that came to an end.
    length = max((a.at[1] + 1 for a, b in pairwise(run) if a.at[0] < b.at[0]), default=None)
    for whose, path in paths.items():
        for a, b in pairwise(path):
            if b.at != _next(a.at, length) or b.step != a.step + 1:
                return f"{whose} went from {_name(a.at)} (step {a.step}) to {_name(b.at)} (step {b.step})"
    return None


def _next(position: Position, length: int | None) -> Position:
    epoch, cursor = position
    return (epoch + 1, 0) if cursor + 1 == length else (epoch, cursor + 1)


def _goes_back_to(event: Event) -> Position | None:
    if event.event != "recover" or event.fields.get("cursor") is None:
        return None
    return _number(event, "epoch"), _number(event, "cursor")


def _read_step(event: Event) -> _Step:
    at = (_number(event, "epoch"), _number(event, "cursor"))
    return _Step(event.who, _attempt(event), _number(event, "step"), at, _number(event, "world"))


def _attempt(event: Event) -> int:
    return _number(event, "attempt") if "attempt" in event.fields else 1


def _number(event: Event, field: str) -> int:
    value = event.fields.get(field)
    if type(value) is not int:
        raise _CannotTell(f"a {event.event} event of {event.who} has no whole number {field!r}")
    return value


def _name(position: Position) -> str:
    return f"epoch {position[0]} cursor {position[1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
