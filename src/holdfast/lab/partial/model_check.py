"""What is wrong with a workload of one's own, found before trials are run: in goes the workload, out come sentences.

A trial must depend on its own state, iteration and stream alone, and the criterion must be within reach. What does not
keep to that gives costs that look like others and mean nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput
from holdfast.lab.experiment import Progress
from holdfast.workloads.registry import as_workload, load_for_lab
from holdfast.workloads.simple_model import OneState
from holdfast.workloads.workload import Arrays, Clock, Stack, Workload, stacked, unstacked

LIMIT = 10_000  # iterations of an unperturbed run; measurements allow no more
STUCK = 1_000  # iterations in which the loss has not fallen
USUAL_INTERVAL = 8  # iterations between two full checkpoints, unless the user says otherwise


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found: sentences about what is wrong, none for a workload that can be measured, and what it is like."""

    problems: list[str]
    summary: str


def check(
    workload: OneState | Workload | str | Path,
    *,
    data: str | Path | None = None,
    limit: int = LIMIT,
    progress: Progress = lambda done: None,
) -> Checked:
    """Look for what would make trials of a workload meaningless: shapes, changes in place, lanes, streams, criterion."""
    folder = None if data is None else Path(data)
    found = (
        load_for_lab(str(workload), folder)
        if isinstance(workload, str | Path)
        else as_workload(workload, "the workload")
    )
    with threadpool_limits(1):  # as trials are run
        try:
            for look in (_arrays, _blocks, _losses, _iteration, _norm, _lanes, _streams):
                if problems := list(look(found)):
                    return Checked(problems, "")  # what comes after rests on what came before
            problems, length = _reached(found, limit, progress)
        except BadInput as error:  # such as a step that changes a shape
            return Checked([str(error)], "")
    return Checked(problems, _summary(found, length) if length is not None else "")


def _arrays(workload: Workload) -> Iterator[str]:
    start = workload.start(0)
    if not isinstance(start, dict) or not start:
        yield f"start returns a {type(start).__name__} and not a dict of arrays by name"
        return
    for name, value in start.items():
        if not isinstance(value, np.ndarray):
            yield f"array {name!r} of start is a {type(value).__name__} and not a numpy array"
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
        yield f"array {name!r} belongs to no block, so it is never lost and never goes back"


def _norm(workload: Workload) -> Iterator[str]:
    start, other = workload.start(0), _after(workload, 1)
    found, same = (np.asarray(workload.norm(workload.blocks, start, each)) for each in (other, start))
    if found.shape != (len(workload.blocks),):
        yield f"norm returns shape {found.shape} and not one distance for each of the {len(workload.blocks)} blocks"
    elif not np.isfinite(found).all() or (found < 0).any():
        yield "norm returns distances that are negative or not finite"
    elif same.any():
        yield "norm of a state to itself is not 0"
    elif not found.any():
        yield "the first iteration moves no block, by the norm"


def _losses(workload: Workload) -> Iterator[str]:
    stack = _filled(workload, workload.start(0))
    before = _copied(stack)
    found = np.asarray(workload.loss(stack))
    if found.shape != (workload.lanes,):
        yield f"loss returns shape {found.shape} and not one number for each of {workload.lanes} lanes"
    elif not np.isfinite(found).all():
        yield f"the loss of the start is {found[0]}"
    elif float(found[0]) < workload.criterion:
        yield f"the loss of the start, {found[0]:g}, is under the criterion {workload.criterion:g}: there is nothing to train"
    if changed := _changed(before, stack):
        yield f"loss changes array {changed!r} that it is given"


def _iteration(workload: Workload) -> Iterator[str]:
    stack = _filled(workload, workload.start(0))
    before = _copied(stack)
    after = workload.advance(stack, _clock(workload))
    if changed := _changed(before, stack):
        yield f"advance changes array {changed!r} in place: it must return new arrays"
        stack = _copied(before)
    if set(after) != set(before):
        yield f"advance returns arrays {', '.join(sorted(after))} and not {', '.join(sorted(before))}"
        return
    for name, value in after.items():
        if value.shape != before[name].shape or value.dtype != before[name].dtype:
            yield (
                f"advance makes {value.dtype}{list(value.shape)} of array {name!r}, which is "
                f"{before[name].dtype}{list(before[name].shape)}"
            )
    if changed := _changed(_copied(after), workload.advance(stack, _clock(workload))):
        yield f"the same iteration gave two values of array {changed!r}: random numbers must follow from the clock alone"


def _lanes(workload: Workload) -> Iterator[str]:
    """Two states with copies of themselves beside them, and with each other, at other iterations and on other streams."""
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
            yield f"array {name!r} of a trial comes out otherwise with other trials beside it: lanes depend on each other"
            return
        if losses[lane] != np.asarray(workload.loss(_filled(workload, state)))[lane]:
            yield "the loss of a trial comes out otherwise with other trials beside it: lanes depend on each other"
            return


def _streams(workload: Workload) -> Iterator[str]:
    if workload.stochastic:
        return
    if name := _changed(workload.start(0), workload.start(1)):
        yield f"array {name!r} starts otherwise on another stream: say `stochastic = True`"
        return
    one, other = (
        unstacked(workload.advance(_filled(workload, workload.start(0)), _clock(workload, stream)), 0)
        for stream in (0, 1)
    )
    if name := _changed(one, other):
        yield f"array {name!r} comes out otherwise on another stream: say `stochastic = True`"


def _reached(workload: Workload, limit: int, progress: Progress) -> tuple[list[str], int | None]:
    """Train without failures: problems with the criterion, and after how many iterations it is reached."""
    losses = [np.inf]
    for iteration, loss in _unperturbed(workload, limit, progress):
        if loss < workload.criterion:
            losses.append(loss)
            return list(_run(workload, np.array(losses[1:]))), iteration
        losses.append(loss)
        lowest = min(losses)
        if not np.isfinite(loss) or (len(losses) > STUCK and min(losses[-STUCK:]) > lowest):
            break
    line = (
        f"the criterion {workload.criterion:g} is out of reach: after {len(losses) - 2} iterations the loss is {losses[-1]:g}, "
        f"its lowest was {min(losses):g}; raise the criterion, or let it be the loss at some iteration, LossAt(100)"
    )
    return [line], None


def _unperturbed(workload: Workload, limit: int, progress: Progress) -> Iterator[tuple[int, float]]:
    stack = _filled(workload, workload.start(0))
    for iteration in range(limit + 1):
        yield iteration, float(np.asarray(workload.loss(stack))[0])
        clock = Clock(np.full(workload.lanes, iteration), np.zeros(workload.lanes, dtype=np.int64))
        stack = workload.advance(_copied(stack), clock)
        progress(1)


def _run(workload: Workload, losses: Floats) -> Iterator[str]:
    """What is wrong with a run that did converge."""
    length = len(losses) - 1
    if length < 2:
        yield f"the criterion is reached after {length} iteration: a failure needs a run of 2 or more"
    if workload.steady and (np.diff(losses) > 0).any():
        yield "the loss rises on its way to the criterion: `steady` must be False"


def _summary(workload: Workload, length: int) -> str:
    sizes = workload.blocks.sizes
    early = (
        f"; with a full checkpoint every {USUAL_INTERVAL} iterations most failures would come before the first one: give a "
        "smaller interval or a lower criterion"
        if length <= 2 * USUAL_INTERVAL
        else ""
    )
    return (
        f"{workload.name}: {len(sizes)} blocks, {int(sizes.sum()):,} values, {length} iterations to the criterion "
        f"{workload.criterion:g}{early}"
    )


def _after(workload: Workload, iterations: int) -> Arrays:
    stack = _filled(workload, workload.start(0))
    for iteration in range(iterations):
        clock = Clock(np.full(workload.lanes, iteration), np.zeros(workload.lanes, dtype=np.int64))
        stack = workload.advance(_copied(stack), clock)
    return unstacked(stack, 0)


def _filled(workload: Workload, state: Arrays) -> Stack:
    """A stack that holds one state in every lane."""
    return stacked([state] * workload.lanes)


def _clock(workload: Workload, stream: int = 0) -> Clock:
    return Clock(np.zeros(workload.lanes, dtype=np.int64), np.full(workload.lanes, stream))


def _copied(arrays: Arrays) -> Arrays:
    return {name: value.copy() for name, value in arrays.items()}


def _changed(before: Arrays, after: Arrays) -> str | None:
    """An array whose bits differ, if there is one."""
    return next((name for name in before if before[name].tobytes() != np.asarray(after[name]).tobytes()), None)
