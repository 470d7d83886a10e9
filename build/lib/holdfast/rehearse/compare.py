"""The comparison of two runs of the same script: the first step with a different result, and what differs. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.train.observe.observations import Observed, UnprotectedValue, Window, differing, is_tensor, windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first step in which a rank's results in `run` and in `reference` differ, with the observations of both."""

    reference: Window
    run: Window
    began: int  # the first step after the last start of the workers
    before: int | None = None  # the step at which a kill caused that start

    @property
    def paths(self) -> list[str]:
        """The paths of the differing values in the protected state, such as `model/0.weight`; tensors come first."""
        run, reference = self.run.after, self.reference.after
        return sorted(differing(reference, run), key=lambda path: not is_tensor(reference.get(path)))


Key = tuple[int, int]


def by_step(observed: Iterable[Observed]) -> dict[Key, Window]:
    """Return the observations by (step, rank). If a step was trained twice, the last observation counts."""
    return {(window.step, window.rank): window for window in windows(observed)}


def divergence(reference: Iterable[Observed], run: Iterable[Observed]) -> Divergence | None:
    """Return the first step of `run` with other results than in `reference`; None if all results are equal."""
    expected, trained = by_step(reference), windows(run)
    for window in trained:
        other = expected.get((window.step, window.rank))
        if other is None or window.after == other.after:
            continue
        began = min(same.step for same in trained if same.attempt == window.attempt)
        earlier = [previous for previous in trained if previous.attempt < window.attempt]
        last = max((previous.attempt for previous in earlier), default=None)
        before = None if last is None else 1 + max(previous.step for previous in earlier if previous.attempt == last)
        return Divergence(reference=other, run=window, began=began, before=before)
    return None


def live_divergence(reference: Iterable[Observed], run: Iterable[Observed], kills: Iterable[int]) -> Divergence | None:
    """Return the first step in which `run`, with killed and replaced workers, differs from `reference`, or None.

    `kills` are the steps before which a worker was killed. If several ranks differ, the newest worker is chosen."""
    expected = by_step(reference)
    wrong = [
        (other, window)
        for window in windows(run)
        if (other := expected.get((window.step, window.rank))) and window.after != other.after
    ]
    if not wrong:
        return None
    right, window = min(wrong, key=lambda pair: (pair[1].step, -pair[1].attempt))
    before = max((step for step in kills if step <= window.step), default=None)
    return Divergence(reference=right, run=window, began=before or 0, before=before)


def first_steps(run: Iterable[Observed]) -> tuple[int, ...]:
    """Return the first step of each attempt of `run`; every restart begins a new attempt."""
    first: dict[int, int] = {}
    for window in windows(run):
        first.setdefault(window.attempt, window.step)
    return tuple(first.values())


def unmatched(reference: Iterable[Observed], run: Iterable[Observed]) -> list[int]:
    return sorted({step for step, _ in by_step(reference).keys() ^ by_step(run).keys()})


def unstable(one: Iterable[Observed], other: Iterable[Observed]) -> set[str]:
    """Return the paths of values outside `run.protect`, such as a time, that differ between two runs without kills."""
    expected = by_step(one)
    paths: set[str] = set()
    for key, window in by_step(other).items():
        if match := expected.get(key):
            for here, there in ((window.held, match.held), (window.kept, match.kept)):
                paths |= {path for path in here.keys() | there.keys() if here.get(path) != there.get(path)}
    return paths


def lost(
    reference: Window, run: Window, apart_from: Iterable[str] = ()
) -> dict[str, tuple[UnprotectedValue, UnprotectedValue]]:
    """Return the values outside `run.protect` that differ between two runs both at the start and at the end of a step.

    Each path maps to (value in `reference`, value in `run`). The paths in `apart_from` are left out."""
    ignored = set(apart_from)
    return {
        path: (value, run.held[path])
        for path, value in reference.held.items()
        if path not in ignored
        and path in run.held
        and value.mark != run.held[path].mark
        and reference.kept.get(path) != run.kept.get(path)
    }


def left_behind(
    reference: Sequence[Observed], run: Sequence[Observed], apart_from: Iterable[str]
) -> dict[str, UnprotectedValue]:
    """Return the values outside `run.protect` that kills made `run` lose, by path, except those in `apart_from`."""
    expected = by_step(reference)
    values: dict[str, UnprotectedValue] = {}
    firsts: dict[Key, Window] = {}
    for window in windows(run):
        firsts.setdefault((window.attempt, window.rank), window)
    for window in firsts.values():
        if window.attempt > 1 and (match := expected.get((window.step, window.rank))):
            values |= {path: pair[0] for path, pair in lost(match, window, apart_from).items()}
    return values


def changed(before: Mapping[str, str] | None, after: Mapping[str, str] | None) -> set[str]:
    """Return the paths whose values differ between two states; empty if one of the states is None."""
    return set(differing(before, after)) if before is not None and after is not None else set()
