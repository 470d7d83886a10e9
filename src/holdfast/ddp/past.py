"""What the histories of earlier attempts in the same folder say that the next attempt must know. Pure but for reading."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.events import JSON, Event
from holdfast.history import recall

Struck = tuple[int, str, int]  # step, kind, rank


@dataclass(frozen=True, slots=True)
class Past:
    """The number of the last attempt, the steps whose commit is on record, and the failures that have struck."""

    attempt: int = 0
    committed: frozenset[int] = frozenset()
    struck: frozenset[Struck] = frozenset()


def read_past(folder: Path) -> Past:
    """The past of the run whose histories are in this folder; rank 0's tells of attempts and commits."""
    struck = (event for file in folder.glob("*.jsonl") for event in recall(file, "failure"))
    return past(list(recall(folder / "rank-0.jsonl", "attempt", "commit", "recover")), struck)


def past(of_first: Sequence[Event], failures: Iterable[Event]) -> Past:
    """The past that these events of rank 0, and these failures of all ranks, tell of."""
    attempts = [_whole(event, "attempt") for event in of_first]
    committed: set[int] = set()
    for event in of_first:
        if event.event == "commit":
            committed.add(_whole(event, "step"))
        elif event.event == "recover":  # a later commit of the same step is another snapshot
            restored = event.fields.get("restored")
            committed = {step for step in committed if isinstance(restored, int) and step <= restored}
    struck = frozenset((_whole(e, "step"), str(e.fields.get("kind")), _whole(e, "rank")) for e in failures)
    return Past(max(attempts, default=0), frozenset(committed), struck)


def _whole(event: Event, field: str) -> int:
    value: JSON = event.fields.get(field)
    return value if isinstance(value, int) else 0
