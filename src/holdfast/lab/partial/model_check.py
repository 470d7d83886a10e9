"""`holdfast lab check`: find faults of the user's own model that would make its trials meaningless.

A trial must depend only on its own state, iteration and random seed, and its convergence criterion must be reachable. A
model that breaks these rules has costs that look plausible and mean nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from holdfast.errors import BadInput
from holdfast.lab.experiment import Progress
from holdfast.lab.partial.own_model import load_model
from holdfast.workloads.simple_model import OneState
from holdfast.workloads.workload import Arrays, Clock, Stack, Workload, stacked, unstacked

LIMIT = 10_000  # iterations of an unperturbed run; measurements allow no more
STUCK = 1_000  # iterations without a lower loss
LEAST_LATER = 10  # iterations that are watched after the criterion is met; as many as before it, if these are more
USUAL_INTERVAL = 8  # iterations between two full checkpoints by default


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking a workload: its problems (empty if none), and a one-line summary."""

    problems: list[str]
    summary: str


def check(
    workload: OneState | Workload | str | Path,
    *,
    data: str | Path | None = None,
    limit: int = LIMIT,
    progress: Progress = lambda done: None,
) -> Checked:
    """Check that failures of a workload can be simulated.

    The result has two fields: `problems`, a list of the problems of the workload (empty if there are none), and
    `summary`, one line with the number of blocks of the workload and the number of iterations until it converges.

    `workload` is the model, as an object or as the path of a Python file that defines it, and `data` is the folder with
    its data. If the workload does not converge within `limit` iterations, this is reported as a problem. `progress(1)` is called
    after each iteration."""
    model = load_model(workload, data)
    with threadpool_limits(1):  # as trials run
        try:
            for problems_of in (_arrays, _blocks, _losses, _iteration, _norm, _lanes, _streams):
                if problems := list(problems_of(model)):
                    return Checked(problems, "")  # later checks rely on the earlier ones
            problems, length = _reached(model, limit, progress)
        except BadInput as error:  # such as a step that changes a shape
            return Checked([str(error)], "")
    if length is None:
        return Checked(problems, "")
    sizes = model.blocks.sizes
    summary = f"{model.name}: {len(sizes)} blocks, {int(sizes.sum()):,} values, {length} iterations to the criterion "
    summary += f"{model.criterion:g}"
    if length <= 2 * USUAL_INTERVAL:
        summary += (
            f"; with a full checkpoint every {USUAL_INTERVAL} iterations most failures would come before the first one: use "
            "a smaller interval or a lower criterion"
        )
    return Checked(problems, summary)


def _arrays(workload: Workload) -> Iterator[str]:
    start = workload.start(0)
    if not isinstance(start, dict) or not start:
        yield f"start returns a {type(start).__name__}, not a dict of arrays by name"
        return
    for name, value in start.items():
        if not isinstance(value, np.ndarray):
            yield f"array {name!r} of start is a {type(value).__name__}, not a numpy array"
        elif value.dtype.kind not in "fiub":
            yield f"array {name!r} of start holds {value.dtype}: only numbers can be lost and restored"
        elif value.dtype.kind == "f" and not np.isfinite(value).all():
            yield f"array {name!r} of start has values that are not finite"


def _blocks(workload: Workload) -> Iterator[str]:
    if len(workload.blocks) < 2:
        yield f"there are {len(workload.blocks)} blocks: a failure that loses some of them needs 2 or more"
    start = workload.start(0)
    for name in sorted(set(workload.blocks.members) - set(start)):
        yield f"blocks are cut from array {name!r}, which start does not return"
    for name in sorted(set(start) - set(workload.blocks.members)):
        yield f"array {name!r} belongs to no block, so it is never lost and never restored"


def _norm(workload: Workload) -> Iterator[str]:
    start, after = workload.start(0), _after(workload, 1)
    moved, same = (np.asarray(workload.norm(workload.blocks, start, state)) for state in (after, start))
    if moved.shape != (len(workload.blocks),):
        yield f"norm returns shape {moved.shape}, not one distance for each of the {len(workload.blocks)} blocks"
    elif not np.isfinite(moved).all() or (moved < 0).any():
        yield "norm returns distances that are negative or not finite"
    elif same.any():
        yield "the norm between a state and itself is not 0"
    elif not moved.any():
        yield "by the norm, the first iteration moves no block"


def _losses(workload: Workload) -> Iterator[str]:
    stack = _filled(workload, workload.start(0))
    before = _copied(stack)
    losses = np.asarray(workload.loss(stack))
    if losses.shape != (workload.lanes,):
        yield f"loss returns shape {losses.shape}, not one number for each of {workload.lanes} lanes"
    elif not np.isfinite(losses).all():
        yield f"the loss of the start is {losses[0]}"
    elif float(losses[0]) < workload.criterion:
        yield f"the loss of the start, {losses[0]:g}, is below the criterion {workload.criterion:g}: nothing is left to train"
    if changed := _changed(before, stack):
        yield f"loss changes its argument: array {changed!r}"


def _iteration(workload: Workload) -> Iterator[str]:
    stack = _filled(workload, workload.start(0))
    before = _copied(stack)
    after = workload.advance(stack, _clock(workload))
    if changed := _changed(before, stack):
        yield f"advance changes array {changed!r} in place: it must return new arrays"
        stack = _copied(before)
    if set(after) != set(before):
        yield f"advance returns arrays {', '.join(sorted(after))}, not {', '.join(sorted(before))}"
        return
    for name, value in after.items():
        if value.shape != before[name].shape or value.dtype != before[name].dtype:
            yield (
                f"advance turns array {name!r} from {before[name].dtype}{list(before[name].shape)} into "
                f"{value.dtype}{list(value.shape)}"
            )
    if changed := _changed(_copied(after), workload.advance(stack, _clock(workload))):
        yield (
            f"the same iteration gave two values of array {changed!r}: draw random numbers only from the rng that step gets "
            "(advance: from the clock)"
        )


def _lanes(workload: Workload) -> Iterator[str]:
    """Yield a problem if the result of one trial depends on other trials that are computed in the same batch."""
    if workload.lanes < 2:
        return
    states = [workload.start(0), _after(workload, 3)]
    numbers = np.arange(workload.lanes)
    mixed = stacked([states[0], *[states[1]] * (workload.lanes - 1)])
    losses = np.asarray(workload.loss(mixed))
    together = workload.advance(mixed, Clock(numbers, numbers))
    for lane, state in enumerate(states):
        own = np.full(workload.lanes, lane)
        alone = workload.advance(_filled(workload, state), Clock(own, own))
        if name := _changed(unstacked(alone, lane), unstacked(together, lane)):
            yield f"array {name!r} of a trial depends on the other trials of its stack: lanes must be independent"
            return
        if losses[lane] != np.asarray(workload.loss(_filled(workload, state)))[lane]:
            yield "the loss of a trial depends on the other trials of its stack: lanes must be independent"
            return


def _streams(workload: Workload) -> Iterator[str]:
    if workload.stochastic:
        return
    if name := _changed(workload.start(0), workload.start(1)):
        yield f"array {name!r} starts differently on another stream: set `stochastic = True`"
        return
    one, other = (
        unstacked(workload.advance(_filled(workload, workload.start(0)), _clock(workload, stream=stream)), 0)
        for stream in (0, 1)
    )
    if name := _changed(one, other):
        yield f"array {name!r} is computed differently on another stream: set `stochastic = True`"


def _reached(workload: Workload, limit: int, progress: Progress) -> tuple[list[str], int | None]:
    """Train up to `limit` iterations; return problems, and the iterations to convergence (None: not reached)."""
    losses, run = list[float](), (float(np.asarray(workload.loss(stack))[0]) for stack in _run(workload, progress))
    for loss in islice(run, limit + 1):
        losses.append(loss)
        if loss < workload.criterion:
            later = list(islice(run, max(LEAST_LATER, len(losses) - 1)))
            return list(_convergence(workload, losses, later)), len(losses) - 1
        if not np.isfinite(loss) or (len(losses) >= STUCK and min(losses[-STUCK:]) > min(losses)):
            break
    line = (
        f"the criterion {workload.criterion:g} is out of reach: after {len(losses) - 1} iterations the loss is {losses[-1]:g}, "
        f"its lowest was {min(losses):g}; raise the criterion, or use the loss at some iteration, such as LossAt(100)"
    )
    return [line], None


def _run(workload: Workload, progress: Progress = lambda done: None) -> Iterator[Stack]:
    """Yield the state of a run without failures before the first iteration and after each iteration, without end."""
    stack = _filled(workload, workload.start(0))
    for iteration in count():
        yield stack
        stack = workload.advance(_copied(stack), _clock(workload, iteration))
        progress(1)


def _convergence(workload: Workload, losses: Sequence[float], later: Sequence[float]) -> Iterator[str]:
    """Yield the problems of a run that meets its criterion with the last of `losses`.

    `later` has the losses of the iterations after that."""
    length = len(losses) - 1
    if length < 2:
        yield f"the criterion is reached after {length} iteration: a failure needs a run of 2 or more"
    if workload.steady and (np.diff(losses) > 0).any():
        yield "the loss rises before it reaches the criterion: `steady` must be False"
    above = [length + number for number, loss in enumerate(later, start=1) if not loss < workload.criterion]
    if above and above[-1] > length + max(1, length // 20):
        yield (
            f"the loss is below the criterion {workload.criterion:g} after {length} iterations, but not after {above[-1]} "
            f"({later[above[-1] - length - 1]:g}): where a run converges is then chance, and so is the cost of a failure. "
            "Take a loss that varies less, such as that of averaged values, or another criterion"
        )


def _after(workload: Workload, iterations: int) -> Arrays:
    return unstacked(next(islice(_run(workload), iterations, None)), 0)


def _filled(workload: Workload, state: Arrays) -> Stack:
    return stacked([state] * workload.lanes)


def _clock(workload: Workload, iteration: int = 0, stream: int = 0) -> Clock:
    return Clock(np.full(workload.lanes, iteration), np.full(workload.lanes, stream))


def _copied(arrays: Arrays) -> Arrays:
    return {name: value.copy() for name, value in arrays.items()}


def _changed(before: Arrays, after: Arrays) -> str | None:
    return next((name for name in before if before[name].tobytes() != np.asarray(after[name]).tobytes()), None)
