"""Planned failures that killed no process, with the reasons."""

from collections.abc import Iterable, Iterator

from holdfast.events import Lost, Struck, What
from holdfast.faults.schedule import Schedule


def missed_kills(failures: Schedule, history: Iterable[What], iterations: int) -> Iterator[str]:
    """Yield a line for each process in `failures` that was not killed in a run of `iterations` iterations.

    `history` has the events that the controllers of the run recorded."""
    recorded = list(history)
    lost = {(what.kind, what.number): what.iteration for what in recorded if isinstance(what, Lost)}
    strikes = [what for what in recorded if isinstance(what, Struck)]
    killed = {(what.iteration, what.kind, target, what.point) for what in strikes for target in what.targets}
    for failure in failures:
        step, kind = failure.step, failure.kind
        if step >= iterations:
            yield f"no process was killed at iteration {step}: the run had ended before"
            continue
        for target in failure.targets:
            if (step, kind, target, failure.point) in killed:
                continue
            who = "the controller" if kind == "controller" else f"{kind} {target}"
            before = lost.get((kind, target))
            if before is not None and before <= step:
                why = f"it was lost in iteration {before}, and a {kind} that replaces it has a new number"
            else:
                why = f"the run did not come to the point '{failure.point}' in this iteration"
            yield f"{who} was not killed at iteration {step}: {why}"
