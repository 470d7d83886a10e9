"""Windows that were not trained as planned: which, and in what way, as far as digests can tell.

The share of every rank is compared with what the plan gives it. Only a window that differs is looked into further.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from holdfast.audit.ledger import Ledger, ShareReport
from holdfast.audit.life import Life
from holdfast.audit.step_columns import Numbers
from holdfast.blocks.division import Ids
from holdfast.finding import SHOWN, CannotTell
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import Position, SamplePlan

_TOGETHER = 1 << 14  # ids whose intermediate results stay in the processor's cache
_WINDOW = 1 << 28  # ids of one window that are computed: no training has more, and a forged plan may say anything
_EPOCHS = 10_000  # searched for a window of the same cursor
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Defects:
    """The steps whose windows differ from the plan, by the way in which they do."""

    missing: Sequence[range]
    duplicated: Sequence[int]
    extra: Sequence[int]
    changed: Sequence[int]
    compared: int
    unfinished: int  # not reported by all ranks and not committed either: a run that goes on would train them again

    def __bool__(self) -> bool:
        return bool(self.missing or self.duplicated or self.extra or self.changed)


def defects(ledger: Ledger, complete: Mapping[int, Numbers]) -> Defects:
    """Every window that was kept, and every one up to the last commit, against the plan.

    `complete` are the steps that all ranks report, by attempt.
    """
    steps, committed = ledger.geometry.steps, ledger.committed
    kept = np.concatenate([*ledger.trained.values(), np.zeros(0, np.int64)])
    whole = np.concatenate([*complete.values(), np.zeros(0, np.int64)])
    repeated = _repeated(ledger)
    inside = np.unique(kept[kept < steps])
    partly = np.setdiff1d(inside[inside < committed], whole)
    if len(partly) and (absent := next(filter(None, map(ledger.absent, ledger.trained)), None)):
        raise CannotTell(f"there is no history of {', '.join(absent)}")
    return Defects(
        missing=_gaps(inside.tolist(), min(committed, steps)),
        duplicated=repeated,
        extra=np.unique(kept[kept >= steps]).tolist(),
        changed=sorted({*_changed(ledger), *partly.tolist()} - set(repeated)),
        compared=len(np.unique(whole[whole < steps])),
        unfinished=len(np.setdiff1d(inside[inside >= committed], whole)),
    )


def described(ledger: Ledger, found: Defects) -> str:
    """The defects in words, kind by kind, a few of each."""
    geometry = ledger.geometry
    missing = sum(len(gap) for gap in found.missing)
    parts = [
        _listed(missing, "missing", found.missing, lambda gaps: [_named_range(geometry, gap) for gap in gaps]),
        _listed(len(found.duplicated), "duplicated", found.duplicated, lambda them: [_twice(ledger, s) for s in them]),
        _listed(
            len(found.extra),
            "extra",
            found.extra,
            lambda them: [f"{_named(geometry, s)} is not in the plan" for s in them],
        ),
        _listed(len(found.changed), "with other samples", found.changed, lambda them: _explained(ledger, them)),
    ]
    return "; ".join(filter(None, parts))


def _listed(count: int, kind: str, several: Sequence[T], told: Callable[[Sequence[T]], list[str]]) -> str:
    if not several:
        return ""
    windows = "1 window" if count == 1 else f"{count} windows"
    more = ["and more"] if len(several) > SHOWN else []
    return f"{windows} {kind}: {', '.join(told(several[:SHOWN]) + more)}"


def _repeated(ledger: Ledger) -> list[int]:
    """Steps that were kept twice, of one rank or of two attempts."""
    several = list(ledger.trained.values())
    for number in ledger.trained:
        by_rank: defaultdict[int, list[Numbers]] = defaultdict(list)
        for life in ledger.attempts[number]:
            by_rank[life.rank].append(life.steps.step[ledger.kept(life)])
        several += [_twice_in(np.concatenate(rows)) for rows in by_rank.values() for _ in range(2)]
    return [] if not several else _twice_in(np.concatenate(several)).tolist()


def _twice_in(numbers: Numbers) -> Numbers:
    ordered = np.sort(numbers)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def _gaps(steps: Sequence[int], committed: int) -> list[range]:
    reached = [-1, *steps]
    return [range(a + 1, b) for a, b in pairwise([*reached, max(committed, reached[-1] + 1)]) if b > a + 1]


def _changed(ledger: Ledger) -> Iterator[int]:
    """Steps of which a rank reports other samples than its share."""
    geometry = ledger.geometry
    if geometry.batch > _WINDOW:
        raise CannotTell(f"windows of {geometry.batch} samples are too large to be computed")
    for number, steps in ledger.trained.items():
        lives = [_Kept(life, ledger.kept(life)) for life in ledger.attempts[number]]
        for chunk, rows in _computed(geometry, steps[steps < geometry.steps]):
            for life in lives:
                yield from life.unlike(geometry, chunk, rows)


class _Kept:
    """The kept steps of a life, to be compared with windows in order."""

    def __init__(self, life: Life, kept: Numbers) -> None:
        order = kept[np.argsort(life.steps.step[kept], kind="stable")]
        self._stretches = list(life.stretches())
        self._rows, self._steps, self._count = order, life.steps.step[order], life.steps.count[order]
        self._digest = life.steps.digest[order]

    def unlike(self, geometry: SamplePlan, chunk: Numbers, rows: Ids) -> Iterator[int]:
        """Which of these windows this rank reports and trained other samples of than its share."""
        first, last = np.searchsorted(self._steps, [chunk[0], chunk[-1] + 1])
        for those, rank, world in self._stretches:
            inside = (self._rows[first:last] >= those.start) & (self._rows[first:last] < those.stop)
            yield from self._other(geometry, chunk, rows, np.arange(first, last)[inside], rank, world)

    def _other(
        self, geometry: SamplePlan, chunk: Numbers, rows: Ids, mine: Numbers, rank: int, world: int
    ) -> Iterator[int]:
        """Which of these of its steps trained other samples than this rank of so many has to."""
        steps = self._steps[mine]
        if rank >= world or world > geometry.batch:
            yield from steps.tolist()
            return
        places = geometry.places(rank, world)
        planned = Samples.sums(rows[np.searchsorted(chunk, steps), places.start : places.stop])
        wrong = (self._digest[mine] != planned).any(axis=1) | (self._count[mine] != len(places))
        yield from steps[wrong].tolist()


def _computed(geometry: SamplePlan, steps: Numbers) -> Iterator[tuple[Numbers, Ids]]:
    """The windows of these steps, some at a time."""
    some = max(1, _TOGETHER // geometry.batch)
    for first in range(0, len(steps), some):
        chunk = steps[first : first + some]
        yield chunk, geometry.windows(chunk)


class _Share(NamedTuple):
    """What a rank of so many says that it trained."""

    rank: int
    world: int
    samples: Samples


def _explained(ledger: Ledger, windows: Sequence[int]) -> list[str]:
    """What was trained instead in each of these windows."""
    geometry = ledger.geometry
    reports = {step: ledger.reports(step) for step in windows}
    wrong = {step: _wrong_shares(geometry, step, reports[step]) for step in windows}
    wanted = {share for shares in wrong.values() for share in shares}
    epochs = range(min(geometry.epochs, _EPOCHS))
    length = geometry.steps_per_epoch
    steps = np.unique(
        np.concatenate(
            [*ledger.trained.values(), *([epoch * length + step % length for epoch in epochs] for step in windows)]
        )
    )
    elsewhere = _found(geometry, steps[steps < geometry.steps], wanted | {_whole(reports[step]) for step in windows})
    silent = {step: _silent(ledger, step, reports[step]) for step in windows}
    return [_explanation(geometry, step, reports[step], wrong[step], silent[step], elsewhere) for step in windows]


def _wrong_shares(geometry: SamplePlan, step: int, reports: Iterable[ShareReport]) -> dict[_Share, str]:
    """The shares that are not those of their rank, and who trained them."""
    at = geometry.position(step)
    shares = {_Share(report.rank, report.world, report.samples): report.who for report in reports}
    formed = {share: who for share, who in shares.items() if share.rank < share.world <= geometry.batch}
    return {s: who for s, who in formed.items() if s.samples != Samples.of(geometry.share(at, s.rank, s.world))}


def _whole(reports: Sequence[ShareReport]) -> _Share:
    return _Share(0, 1, Samples.total(report.samples for report in reports))


def _found(geometry: SamplePlan, steps: Numbers, wanted: Iterable[_Share]) -> dict[_Share, Position]:
    """Those of the wanted shares that are the same share of one of these windows, and of which."""
    places = {share[:2]: geometry.places(*share[:2]) for share in wanted}
    looked_for, found = set(wanted), dict[_Share, Position]()
    for chunk, rows in _computed(geometry, steps):
        for (rank, world), columns in places.items():
            for step, samples in zip(
                chunk.tolist(), Samples.of_each(rows[:, columns.start : columns.stop]), strict=True
            ):
                if (share := _Share(rank, world, samples)) in looked_for:
                    found[share] = geometry.position(step)
    return found


def _explanation(
    geometry: SamplePlan,
    step: int,
    reports: Sequence[ShareReport],
    wrong: Mapping[_Share, str],
    silent: Sequence[str],
    elsewhere: Mapping[_Share, Position],
) -> str:
    at = geometry.position(step)
    other = elsewhere.get(_whole(reports))
    if other not in (None, at):
        return f"{_named(geometry, step)}: {other} was trained instead"
    told = [f"{who} never reported it" for who in silent]
    told += [f"{who} {_instead(geometry, at, share, elsewhere)}" for share, who in wrong.items()]
    return f"{_named(geometry, step)}: {', '.join(told) or 'trained by a rank that is not of its world'}"


def _silent(ledger: Ledger, step: int, reports: Sequence[ShareReport]) -> list[str]:
    there, memberships = {report.who for report in reports}, ledger.memberships(reports[0].attempt)
    due = (each for each in memberships.basis(step) if not memberships.is_excused(each, step))
    return list(islice((who for who in map("rank-{}".format, due) if who not in there), SHOWN))


def _instead(geometry: SamplePlan, at: Position, share: _Share, elsewhere: Mapping[_Share, Position]) -> str:
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


def _twice(ledger: Ledger, step: int) -> str:
    reports = ledger.reports(step)
    attempts = sorted({report.attempt for report in reports})
    if len(attempts) > 1:
        return f"{_named(ledger.geometry, step)} in attempts {' and '.join(map(str, attempts))}"
    ranks = [report.who for report in reports]
    again = sorted({who for who in ranks if ranks.count(who) > 1})
    return f"{_named(ledger.geometry, step)} by {', '.join(again)} in attempt {attempts[0]}"


def _named(geometry: SamplePlan, step: int) -> str:
    return f"{Position(*divmod(step, geometry.steps_per_epoch))} (step {step})"


def _named_range(geometry: SamplePlan, steps: range) -> str:
    first, last = _named(geometry, steps[0]), _named(geometry, steps[-1])
    return first if first == last else f"{first} to {last}"
