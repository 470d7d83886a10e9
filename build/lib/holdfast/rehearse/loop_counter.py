"""A likely cause of a difference: a counter in the loop, as by `enumerate`, starts again from 0 after a kill. No I/O."""

from collections.abc import Sequence

from holdfast.rehearse.case import Cause, DivergenceCase, listed
from holdfast.rehearse.compare import by_step
from holdfast.train.observe.observations import Window

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def loop_counter(case: DivergenceCase) -> Cause | None:
    """Return a Cause if a counter in the script's training loop started again from 0 after a kill."""
    counters = _counters(case)
    if not counters:
        return None
    name = counters[0]
    return Cause(
        word="loop counter",
        why=f"{name} counts the batches since the last start, so after the kill the loop did something else in step "
        f"{case.divergence.run.step} than without it",
        instead=f"write {_enumerate_advice(case, name)}, or use batch.step and batch.epoch",
        evidence=(*_values(case, counters), *_only_statistics(case.divergence.paths)),
    )


def moved_counters(case: DivergenceCase) -> tuple[str, ...]:
    """Return lines for the report about loop counters that started again from 0 after a kill; () if there are none."""
    counters = _counters(case)
    return (
        (*_values(case, counters), f"to continue such a count, write {_enumerate_advice(case, counters[0])}")
        if counters
        else ()
    )


def _counters(case: DivergenceCase) -> list[str]:
    """Return the paths of loop counters whose values in `run` lack the batches that were trained before the kill."""
    reference, run, began = case.divergence.reference, case.divergence.run, case.divergence.began
    if case.divergence.before is None:
        return []
    first = case.reference_window(began, run.rank)
    bases = {began, began - _start_of_epoch(case, first.epoch) if first else 0} - {0}
    return [
        path
        for path, value in reference.kept.items()
        if path in run.kept
        and path not in case.lost
        and path not in case.unstable
        and (lag := _number(value.mark) - _number(run.kept[path].mark)) > 0
        and any(lag % base == 0 for base in bases)
    ]


def _values(case: DivergenceCase, counters: Sequence[str]) -> tuple[str, ...]:
    reference, run = case.divergence.reference, case.divergence.run
    return tuple(
        f"at the end of step {run.step}, {path} is {run.kept[path].mark}, and {reference.kept[path].mark} in the reference"
        for path in counters[:2]
    )


def _only_statistics(paths: Sequence[str]) -> tuple[str, ...]:
    if not all(path.endswith(STATISTICS) for path in paths):
        return ()
    return (
        f"only buffers differ ({listed(paths)}), no parameter: a forward in training mode more or fewer, as for an "
        "evaluation or a picture, explains that",
    )


def _enumerate_advice(case: DivergenceCase, counter: str) -> str:
    """Return the call of `enumerate` with which `counter` has the right value after a restart, as advice to the user."""
    later = [window for window in by_step(case.reference).values() if window.epoch]
    restarts = [_starts_again(window, counter) for window in later]
    epoch, batches = "enumerate(epoch, epoch.initial)", "enumerate(batches, batches.initial)"
    if not restarts:
        return f"{epoch}, or {batches} in a single loop"
    return epoch if all(restarts) else batches


def _starts_again(window: Window, counter: str) -> bool:
    value = window.kept.get(counter)
    return value is not None and _number(value.mark) < window.step


def _start_of_epoch(case: DivergenceCase, epoch: int) -> int:
    return min(window.step for window in by_step(case.reference).values() if window.epoch == epoch)


def _number(mark: str) -> int:
    return int(mark) if mark.isdecimal() else 0
