"""Whose events tell what a run waited for: rank 0's, and when it was lost those of the first member that is left.

In a run that recovers live, whoever is the first of the members saves and sets the pace, so the critical path is told by
one file after another. A member that joins in the middle of an attempt tells it from its regroup on.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from holdfast.events import Attempt, Event, Open, Regroup, Step

Place = tuple[int, int]  # an attempt, and the number of its membership


def leading(history: Sequence[Event]) -> list[Event]:
    """The events of whoever was the first rank at the time, in order; of rank 0 alone if no member was ever lost."""
    files: defaultdict[str, list[Event]] = defaultdict(list)
    for event in history:
        if event.who.startswith("rank-"):
            files[event.who].append(event)
    first = _first(history)
    if all(who == "rank-0" for who in first.values()):
        return [e for place, e in _placed(files["rank-0"]) if place is not None] if first else files["rank-0"]
    told = {who: list(_placed(events)) for who, events in files.items()}
    path = [event for who, events in told.items() for place, event in events if _leads(first, who, place)]
    return sorted([*path, *_unwritten(first, told, path)], key=lambda event: event.time)


def _first(history: Sequence[Event]) -> dict[Place, str]:
    """Who was the first member of each membership that was declared."""
    regroups = (event.what for event in history if isinstance(event.what, Regroup) and event.what.members)
    return {(each.attempt, each.number): f"rank-{min(each.members)}" for each in regroups}


def _placed(events: Sequence[Event]) -> Iterator[tuple[Place | None, Event]]:
    """Every event with its membership; what a member writes before it has joined has none."""
    begun: set[int] = set()
    place: Place | None = (0, 0)
    for at, event in enumerate(events):
        what = event.what
        if isinstance(what, Open):
            number = next((e.what.attempt for e in events[at + 1 :] if isinstance(e.what, Attempt)), 0)
            place = None if number in begun else (number, 0)
            begun.add(number)
        elif isinstance(what, Regroup):
            place = (what.attempt, what.number)
        yield place, event


def _leads(first: Mapping[Place, str], who: str, place: Place | None) -> bool:
    return place is not None and who == first.get(place, "rank-0")


def _unwritten(
    first: Mapping[Place, str], told: Mapping[str, Sequence[tuple[Place | None, Event]]], path: Sequence[Event]
) -> Iterator[Event]:
    """The last steps of those who were killed before they could write them, as their successors tell them."""
    known = {(event.what.attempt, event.what.step) for event in path if isinstance(event.what, Step)}
    for who in sorted({*first.values()}, key=lambda who: int(who.removeprefix("rank-"))):
        for place, event in told.get(who, ()):
            what = event.what
            if isinstance(what, Step) and place is not None and (what.attempt, what.step) not in known:
                known.add((what.attempt, what.step))
                yield event
