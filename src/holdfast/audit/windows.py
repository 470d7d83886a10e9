"""Whether the windows of the plan were trained, each once, in order, by all ranks, with the samples that are theirs."""

import numpy as np

from holdfast.audit.defects import defects, described
from holdfast.audit.ledger import Ledger
from holdfast.audit.life import Life
from holdfast.audit.plan import leftover
from holdfast.audit.step_columns import Numbers
from holdfast.finding import CannotTell, Verdict, counted
from holdfast.sampler.plan import SamplePlan


def every_cursor_advances_once(ledger: Ledger) -> tuple[Verdict, str]:
    """Without what was rolled back, every window is trained in one attempt, in order, and none is left out."""
    geometry = ledger.geometry
    for lives in ledger.attempts.values():
        for life in lives:
            if because := _jump(geometry, life):
                return "fail", f"{life.who} in attempt {life.number} {because}"
    if not ledger.trained:
        return "unknown", "no step was trained and kept"
    if because := _run_jumps(ledger):
        return "fail", because
    last = max(int(steps[-1]) for steps in ledger.trained.values())
    return "pass", f"{counted(last + 1, 'window')} from {_at(geometry, 0)} to {_at(geometry, last)}"


def shares_agree(ledger: Ledger) -> tuple[Verdict, str]:
    """All ranks of a world report every step that is committed."""
    complete = 0
    for number, steps in ledger.trained.items():
        shares, memberships = _shares(ledger, number), ledger.memberships(number)
        committed = steps[steps < ledger.committed]
        for rank in range(min(ledger.world(number), len(shares) + 1)):
            lacking = np.setdiff1d(memberships.due(rank, committed), shares.get(rank, steps[:0]))
            if len(lacking):
                _must_be_on_record(ledger, number, rank)
                place = _place(ledger.geometry, int(lacking[0]))
                return "fail", f"rank-{rank} never reported {place}, which was committed"
        complete += len(_by_all(ledger, number))
    if not complete:
        return "unknown", "no step was reported by all ranks of its world"
    return "pass", f"{counted(complete, 'step')} reported by all ranks of their world"


def every_sample_trained_once(ledger: Ledger) -> tuple[Verdict, str]:
    """The windows that were kept hold exactly the samples that the plan gives them, each rank its share."""
    complete = {number: _by_all(ledger, number) for number in ledger.trained}
    found = defects(ledger, complete)
    if found:
        return "fail", described(ledger, found)
    if not found.compared:
        return "unknown", "no window was reported by all ranks of its world"
    rest = (
        f"; {counted(found.unfinished, 'window')} not reported by all ranks or committed yet"
        if found.unfinished
        else ""
    )
    batch = ledger.geometry.batch
    windows = f"{counted(found.compared, 'window')} of {counted(batch, 'sample')}"
    lacking = ledger.lacking()
    if any(plan.loader for _, plan in ledger.plans):
        return "pass", (
            f"{counted(found.compared, 'window')} of {batch} batch{'es' * (batch != 1)}, as many as planned; samples are "
            f"the loader's own: not checked{rest}"
        )
    if any(plan.own for _, plan in ledger.plans):
        return "pass", (
            f"{windows}, each drawn once: as many as planned, from generators keyed for each window, so that what is "
            f"trained again is the same; which samples the script drew is its own and not proved{rest}"
        )
    exactly = (
        f"every sample exactly once but {lacking} declared missing" if lacking else "duplicates = missing = extra = 0"
    )
    return "pass", f"{windows}: {exactly}; {leftover(ledger.geometry)}{rest}"


def _shares(ledger: Ledger, attempt: int) -> dict[int, Numbers]:
    """The kept steps of each rank of an attempt."""
    shares: dict[int, Numbers] = {}
    for rank, life in ledger.of_ranks(attempt):
        steps = np.unique(life.steps.step[ledger.kept(life)])
        shares[rank] = np.union1d(shares[rank], steps) if rank in shares else steps
    return shares


def _by_all(ledger: Ledger, attempt: int) -> Numbers:
    """The kept steps of an attempt that all report who must."""
    shares, memberships = _shares(ledger, attempt), ledger.memberships(attempt)
    steps = ledger.trained[attempt]
    if len(shares) < ledger.world(attempt):
        return steps[:0]
    for rank, share in shares.items():
        due = memberships.due(rank, steps)
        if not np.array_equal(due, share):
            steps = np.setdiff1d(steps, np.setdiff1d(due, share))
    return steps


def _must_be_on_record(ledger: Ledger, attempt: int, rank: int) -> None:
    if f"rank-{rank}" not in ledger.lives:
        raise CannotTell(f"there is no history of rank-{rank}, of the {ledger.world(attempt)} of attempt {attempt}")


def _jump(geometry: SamplePlan, life: Life) -> str | None:
    """The first move of a rank within an attempt that is not to the next window and step."""
    steps, epochs, cursors = life.steps.step, life.steps.epoch, life.steps.cursor
    if not len(steps):
        return None
    if steps[0] != life.start:
        return f"began with {_told(life, 0)}, not with step {life.start}"
    length = geometry.steps_per_epoch
    wrong = (np.diff(steps, prepend=steps[0] - 1) != 1) | (epochs != steps // length) | (cursors != steps % length)
    if not wrong.any():
        return None
    row = int(wrong.argmax())
    return f"went from {_told(life, row - 1)} to {_told(life, row)}" if row else f"began with {_told(life, 0)}"


def _run_jumps(ledger: Ledger) -> str | None:
    """The first move of the run from one window to another that is not to the next."""
    geometry, trained = ledger.geometry, ledger.trained
    run = np.sort(np.concatenate(list(trained.values())))
    if len(again := run[1:][run[1:] == run[:-1]]):
        attempts = [number for number, steps in trained.items() if again[0] in steps]
        return (
            f"{_at(geometry, int(again[0]))} was trained in attempt {attempts[0]} and in attempt {attempts[1]}, and no "
            "recover declares either rolled back"
        )
    if run[0]:
        return f"the run starts at {_place(geometry, int(run[0]))}"
    gaps = np.flatnonzero(np.diff(run) != 1)
    if not len(gaps):
        return None
    a, b = int(run[gaps[0]]), int(run[gaps[0] + 1])
    return f"the run went from {_place(geometry, a)} to {_place(geometry, b)}"


def _told(life: Life, row: int) -> str:
    columns = life.steps
    return f"epoch {columns.epoch[row]} cursor {columns.cursor[row]} (step {columns.step[row]})"


def _place(geometry: SamplePlan, step: int) -> str:
    return f"{_at(geometry, step)} (step {step})"


def _at(geometry: SamplePlan, step: int) -> str:
    epoch, cursor = divmod(step, geometry.steps_per_epoch)
    return f"epoch {epoch} cursor {cursor}"
