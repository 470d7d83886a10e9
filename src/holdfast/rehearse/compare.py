"""The comparison of two runs of the same script: the first step with a different result, and what differs. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.train.observe.observations import Observed, UnprotectedValue, Window, differing, is_tensor, windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first observed step of a rank after which the protected state of `run` differs from that of `reference`.

    `began` is the first step that the workers trained after their last start. That start follows a kill, which happened
    just before the step `before`; None if there was no kill yet."""

    reference: Window
    run: Window
    began: int
    before: int | None = None

    @property
    def paths(self) -> list[str]:
        """The paths at which the protected state differs, such as `model/0.weight`, with tensors first."""
        run, reference = self.run.after, self.reference.after
        return sorted(differing(reference, run), key=lambda path: not is_tensor(reference.get(path)))


Key = tuple[int, int]


def by_step(observed: Iterable[Observed]) -> dict[Key, Window]:
    """Return the windows (observations of a step) by (step, rank); for a step trained twice, the last window."""
    return {(window.step, window.rank): window for window in windows(observed)}


def divergence(reference: Iterable[Observed], run: Iterable[Observed]) -> Divergence | None:
    """Return the divergence at the first step whose results in `run` and `reference` differ, or None if none does."""
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
    """Return the divergence at the first step in which a rank of `run`, a run with live recovery, had another result.

    `kills` are the steps before which a worker was killed. If a replacement diverged in that step, it is named."""
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
    """Return the first step that each attempt of `run` trained, where every restart begins a new attempt."""
    first: dict[int, int] = {}
    for window in windows(run):
        first.setdefault(window.attempt, window.step)
    return tuple(first.values())


def unmatched(reference: Iterable[Observed], run: Iterable[Observed]) -> list[int]:
    """Return the steps that only one of the two runs trained."""
    return sorted({step for step, _ in by_step(reference).keys() ^ by_step(run).keys()})


def unstable(one: Iterable[Observed], other: Iterable[Observed]) -> set[str]:
    """Return the paths of unprotected values, such as a stored time, that differ between two runs without kills."""
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
    """Return the unprotected values that differ between `reference` and `run` both when a step begins and when it ends.

    Each path maps to the values (in `reference`, in `run`). The paths in `apart_from` are left out."""
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
    """Return the unprotected values of `reference` that `run` lost by a kill, by path, except for `apart_from`."""
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
    """Return the paths at which two states differ; empty if one of the states is unknown."""
    return set(differing(before, after)) if before is not None and after is not None else set()
