"""Windows that were not trained as planned: which, and in what way, as far as digests can tell.

A window is compared as a whole: the shares that its ranks report must add up to it, however many ranks there were.
Only a window that differs is looked into share by share.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple, TypeVar

from holdfast.audit.ledger import CannotTell, Ledger, Step, rank_of
from holdfast.blocks import Ids
from holdfast.geometry import Geometry, Position
from holdfast.samples import Samples

SHOWN = 3  # defects of a kind that are told one by one
_TOGETHER = 1 << 14  # ids whose intermediate results stay in the processor's cache
_EPOCHS = 10_000  # searched for a window of the same cursor
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Defects:
    """The windows that differ from the plan, by the way in which they do."""

    missing: Sequence[range]  # numbers of steps
    duplicated: Sequence[Position]
    extra: Sequence[Position]
    changed: Sequence[Position]
    compared: int
    unfinished: int  # not reported by all ranks and not committed either: a run that goes on would train them again

    def __bool__(self) -> bool:
        return bool(self.missing or self.duplicated or self.extra or self.changed)


def defects(ledger: Ledger) -> Defects:
    """Every window that was kept, and every one up to the last commit, against the plan."""
    geometry = ledger.geometry
    inside = {geometry.step(at): reports for at, reports in ledger.windows.items() if at in geometry}
    repeated = {step for step, reports in inside.items() if _is_repeated(reports)}
    unfinished = {step for step, reports in inside.items() if step >= ledger.committed and absent(reports)} - repeated
    set_aside = repeated | unfinished
    compared = {step: reports for step, reports in inside.items() if step not in set_aside}
    return Defects(
        missing=_gaps(inside, min(ledger.committed, geometry.steps)),
        duplicated=[geometry.position(step) for step in sorted(repeated)],
        extra=[at for at in ledger.windows if at not in geometry],
        changed=[geometry.position(step) for step in _changed(geometry, compared)],
        compared=len(compared),
        unfinished=len(unfinished),
    )


def absent(reports: Sequence[Step]) -> list[str]:
    """Ranks of its world that did not report this window; not more of them than are told."""
    there, world = {report.who for report in reports}, reports[0].world
    if len(there) >= world:
        return []
    return list(islice((who for who in map("rank-{}".format, range(world)) if who not in there), SHOWN))


def described(ledger: Ledger, found: Defects) -> str:
    """The defects in words, kind by kind, a few of each."""
    geometry = ledger.geometry
    missing = sum(len(gap) for gap in found.missing)
    parts = [
        _listed(missing, "missing", found.missing, lambda gaps: [_named_range(geometry, gap) for gap in gaps]),
        _listed(len(found.duplicated), "duplicated", found.duplicated, lambda ats: [_twice(ledger, at) for at in ats]),
        _listed(len(found.extra), "extra", found.extra, lambda ats: [f"{at} is not in the plan" for at in ats]),
        _listed(len(found.changed), "with other samples", found.changed, lambda ats: _explained(ledger, ats)),
    ]
    return "; ".join(filter(None, parts))


def _listed(count: int, kind: str, several: Sequence[T], told: Callable[[Sequence[T]], list[str]]) -> str:
    if not several:
        return ""
    windows = "1 window" if count == 1 else f"{count} windows"
    more = ["and more"] if len(several) > SHOWN else []
    return f"{windows} {kind}: {', '.join(told(several[:SHOWN]) + more)}"


def _is_repeated(reports: Sequence[Step]) -> bool:
    return len({report.who for report in reports}) < len(reports) or len({report.attempt for report in reports}) > 1


def _gaps(steps: Iterable[int], committed: int) -> list[range]:
    reached = [-1, *steps]
    return [range(a + 1, b) for a, b in pairwise([*reached, max(committed, reached[-1] + 1)]) if b > a + 1]


def _changed(geometry: Geometry, windows: Mapping[int, Sequence[Step]]) -> Iterator[int]:
    for steps, rows in _computed(geometry, list(windows)):
        for step, planned in zip(steps, Samples.of_each(rows), strict=True):
            if _total(windows[step]) != planned:
                yield step


def _computed(geometry: Geometry, steps: Sequence[int]) -> Iterator[tuple[Sequence[int], Ids]]:
    """The windows of these steps, some at a time."""
    some = max(1, _TOGETHER // geometry.batch)
    for first in range(0, len(steps), some):
        chunk = steps[first : first + some]
        yield chunk, geometry.windows(chunk)


def _total(reports: Iterable[Step]) -> Samples:
    return Samples.total(map(_samples, reports))


def _samples(report: Step) -> Samples:
    if report.samples is None:
        raise CannotTell(f"a step event of {report.who} at {report.at} has no count and digest of samples")
    return report.samples


class _Share(NamedTuple):
    """What a rank of so many says that it trained."""

    rank: int
    world: int
    samples: Samples


def _explained(ledger: Ledger, windows: Sequence[Position]) -> list[str]:
    """What was trained instead in each of these windows."""
    geometry = ledger.geometry
    wrong = {at: _wrong_shares(geometry, at, ledger.windows[at]) for at in windows}
    wanted = {share for shares in wrong.values() for share in shares}
    steps = {geometry.step(at) for at in ledger.windows if at in geometry}
    epochs = range(min(geometry.epochs, _EPOCHS))
    steps |= {geometry.step(Position(epoch, at.cursor)) for epoch in epochs for at in windows}
    elsewhere = _found(geometry, sorted(steps), wanted | {_whole(ledger.windows[at]) for at in windows})
    return [_explanation(geometry, at, ledger.windows[at], wrong[at], elsewhere) for at in windows]


def _wrong_shares(geometry: Geometry, at: Position, reports: Iterable[Step]) -> list[_Share]:
    shares = [
        _Share(rank, report.world, _samples(report)) for report in reports if (rank := rank_of(report.who)) is not None
    ]
    formed = [share for share in shares if share.rank < share.world <= geometry.batch]
    return [share for share in formed if share.samples != Samples.of(geometry.share(at, share.rank, share.world))]


def _whole(reports: Sequence[Step]) -> _Share:
    return _Share(0, 1, _total(reports))


def _found(geometry: Geometry, steps: Sequence[int], wanted: Iterable[_Share]) -> dict[_Share, Position]:
    """Those of the wanted shares that are the same share of one of these windows, and of which."""
    places = {share[:2]: geometry.places(*share[:2]) for share in wanted}
    looked_for, found = set(wanted), dict[_Share, Position]()
    for chunk, rows in _computed(geometry, steps):
        for (rank, world), columns in places.items():
            for step, samples in zip(chunk, Samples.of_each(rows[:, columns.start : columns.stop]), strict=True):
                if (share := _Share(rank, world, samples)) in looked_for:
                    found[share] = geometry.position(step)
    return found


def _explanation(
    geometry: Geometry,
    at: Position,
    reports: Sequence[Step],
    wrong: Sequence[_Share],
    elsewhere: Mapping[_Share, Position],
) -> str:
    if other := elsewhere.get(_whole(reports)):
        return f"{_named(geometry, at)}: {other} was trained instead"
    silent = [f"{who} never reported it" for who in absent(reports)]
    told = [f"rank-{share.rank} {_instead(geometry, at, share, elsewhere)}" for share in wrong]
    return f"{_named(geometry, at)}: {', '.join(silent + told) or 'its shares do not add up to it'}"


def _instead(geometry: Geometry, at: Position, share: _Share, elsewhere: Mapping[_Share, Position]) -> str:
    """What this rank trained instead of its share."""
    for rank in range(share.world):
        if share.samples == Samples.of(geometry.share(at, rank, share.world)):
            return f"trained the share of rank-{rank}"
    if other := elsewhere.get(share):
        return f"trained the share of {other} instead"
    ids = geometry.share(at, share.rank, share.world)
    planned = Samples.of(ids)
    if share.samples.count < planned.count:
        return f"trained {_less(planned - share.samples, planned.count)}"
    if share.samples.count > planned.count:
        return f"trained {_more(share.samples - planned, planned.count)}"
    return f"trained {_exchanged(share.samples, planned, ids)}"


def _less(lacking: Samples, planned: int) -> str:
    which = "" if lacking.only_id is None else f" (sample {lacking.only_id})"
    return f"{planned - lacking.count} of its {planned} samples, {lacking.count} missing{which}"


def _more(surplus: Samples, planned: int) -> str:
    which = "" if surplus.only_id is None else f" (sample {surplus.only_id})"
    return f"{planned + surplus.count} samples instead of {planned}, {surplus.count} extra{which}"


def _exchanged(trained: Samples, planned: Samples, ids: Ids) -> str:
    for lost, alone in zip(ids.tolist(), Samples.of_each(ids[:, None]), strict=True):
        if (other := (trained + alone - planned).only_id) is not None:
            return f"sample {other} instead of sample {lost}"
    return "other samples instead"


def _twice(ledger: Ledger, at: Position) -> str:
    reports = ledger.windows[at]
    attempts = sorted({report.attempt for report in reports})
    if len(attempts) > 1:
        return f"{_named(ledger.geometry, at)} in attempts {' and '.join(map(str, attempts))}"
    ranks = [report.who for report in reports]
    again = sorted({who for who in ranks if ranks.count(who) > 1})
    return f"{_named(ledger.geometry, at)} by {', '.join(again)} in attempt {attempts[0]}"


def _named(geometry: Geometry, at: Position) -> str:
    return f"{at} (step {geometry.step(at)})"


def _named_range(geometry: Geometry, steps: range) -> str:
    first, last = geometry.position(steps[0]), geometry.position(steps[-1])
    return _named(geometry, first) if first == last else f"{_named(geometry, first)} to {_named(geometry, last)}"
