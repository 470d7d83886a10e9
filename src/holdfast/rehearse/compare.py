"""Two histories of the same training compared: the first window that did not come out the same, and what differs. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.train.observe.observations import Observed, UnprotectedValue, Window, differing, is_tensor, windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first window of a run after which the protected state is not that of the reference."""

    reference: Window
    run: Window
    began: int  # the step that its attempt began with
    before: int | None = None  # the step that the attempt before it came to, if there was one

    @property
    def is_resumed(self) -> bool:
        """Whether the run had been killed before."""
        return self.before is not None

    @property
    def paths(self) -> list[str]:
        """Where the protected state differs, tensors first."""
        mine, its = self.run.after, self.reference.after
        return sorted(differing(its, mine), key=lambda path: not is_tensor(its.get(path)))


Key = tuple[int, int]


def by_step(several: Iterable[Observed]) -> dict[Key, Window]:
    """The windows by step and rank; of one that was trained several times the last."""
    return {(each.step, each.rank): each for each in windows(several)}


def divergence(reference: Iterable[Observed], run: Iterable[Observed]) -> Divergence | None:
    """Where a run first differs from its reference, in the order in which it was trained; nothing if nowhere."""
    known, trained = by_step(reference), windows(run)
    for each in trained:
        its = known.get((each.step, each.rank))
        if its is None or each.after == its.after:
            continue
        mine = [other.step for other in trained if other.attempt == each.attempt]
        earlier = [other for other in trained if other.attempt < each.attempt]
        last = max((other.attempt for other in earlier), default=None)
        before = None if last is None else 1 + max(other.step for other in earlier if other.attempt == last)
        return Divergence(reference=its, run=each, began=min(mine), before=before)
    return None


def begins(run: Iterable[Observed]) -> tuple[int, ...]:
    """The step that each attempt began with."""
    first: dict[int, int] = {}
    for each in windows(run):
        first.setdefault(each.attempt, each.step)
    return tuple(first.values())


def unmatched(reference: Iterable[Observed], run: Iterable[Observed]) -> list[int]:
    """Steps that only one of the two has trained."""
    one, other = by_step(reference), by_step(run)
    return sorted({step for step, _ in one.keys() ^ other.keys()})


def restless(one: Iterable[Observed], other: Iterable[Observed]) -> set[str]:
    """What the script holds that is not even the same in two runs of which none was killed, such as a time."""
    known = by_step(one)
    found: set[str] = set()
    for key, each in by_step(other).items():
        if its := known.get(key):
            for mine, theirs in ((each.held, its.held), (each.kept, its.kept)):
                found |= {path for path in mine.keys() | theirs.keys() if mine.get(path) != theirs.get(path)}
    return found


def lost(
    reference: Window, run: Window, apart_from: Iterable[str] = ()
) -> dict[str, tuple[UnprotectedValue, UnprotectedValue]]:
    """What the script holds without protecting it, and what was not as in the reference when the window began, nor at
    its end: by where it is, as it was there and here."""
    ignored = set(apart_from)
    return {
        path: (its, run.held[path])
        for path, its in reference.held.items()
        if path not in ignored and path in run.held and _differs(path, reference, run)
    }


def _differs(path: str, reference: Window, run: Window) -> bool:
    if reference.held[path].mark == run.held[path].mark:
        return False
    return reference.kept.get(path) != run.kept.get(path)


def left_behind(
    reference: Sequence[Observed], run: Sequence[Observed], apart_from: Iterable[str]
) -> dict[str, UnprotectedValue]:
    """What did not come back after some kill, though nothing protected came out otherwise for it, yet."""
    known = by_step(reference)
    found: dict[str, UnprotectedValue] = {}
    firsts: dict[Key, Window] = {}
    for each in windows(run):
        firsts.setdefault((each.attempt, each.rank), each)
    for each in firsts.values():
        if each.attempt > 1 and (its := known.get((each.step, each.rank))):
            found |= {path: pair[0] for path, pair in lost(its, each, apart_from).items()}
    return found


def changed(before: Mapping[str, str] | None, after: Mapping[str, str] | None) -> set[str]:
    """What changed in between, where both are known."""
    return set(differing(before, after)) if before is not None and after is not None else set()
