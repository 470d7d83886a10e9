"""The result of a rehearsal, and its lines on the terminal. No I/O."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.events import Detect, Restart
from holdfast.finding import counted
from holdfast.rehearse.case import Cause
from holdfast.rehearse.compare import Divergence
from holdfast.train.observe.observations import Kill, UnprotectedValue, is_tensor

SHOWN = 6
GAVE_UP, RESTARTS = "cannot continue: ", ": the run restarts from its newest snapshot."  # of a failure's message


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """The result of a rehearsal; if `cause` is None, the script resumes exactly."""

    run: str  # the folder of the run that differs, or of the last run
    steps: int = 0
    kills: tuple[Kill, ...] = ()
    began: tuple[int, ...] = ()  # the first step after each kill
    divergence: Divergence | None = None
    cause: Cause | None = None
    forgotten: dict[str, UnprotectedValue] | None = None  # values outside `run.protect` that kills lost without effect
    untested: str = ""  # what a single worker leaves untested
    unseen: str = ""  # why the rehearsal was too short
    restarted: str = ""  # how many kills live recovery did not handle, and why


def lines(result: Rehearsed) -> Iterator[str]:
    """Yield the result of a rehearsal as text lines: whether the script resumes exactly, and if not, where and why."""
    if result.cause is None:
        yield f"resumes exactly: {result.steps} steps, every bit of the protected state the same after each"
        for kill, began in zip(result.kills, result.began, strict=True):
            yield f"  killed before step {kill.step} ({kill.why}), continued from step {began}"
        if named := [f"{path} ({value.type})" for path, value in (result.forgotten or {}).items()]:
            text = ", ".join(named[:SHOWN]) + (f" and {len(named) - SHOWN} more" if len(named) > SHOWN else "")
            yield f"note: not protected and different after a kill, without an effect so far: {text}"
        yield from (f"note: {note}" for note in (result.restarted, result.untested, result.unseen) if note)
        return
    if result.divergence:
        yield from _difference(result.divergence)
        yield f"likely cause: {result.cause.why}"
    else:
        yield f"does not resume exactly: {result.cause.why}"
    for line in result.cause.evidence:
        yield f"  seen: {line}"
    if result.cause.instead:
        yield f"instead: {result.cause.instead}"


def restarts_of_live_recovery(events: Iterable[Restart | Detect], kills: int) -> str:
    """Return how many of the `kills` ended in a restart, and the first reason; "" if there was no restart."""
    seen = [*events]
    restarts = sum(isinstance(event, Restart) for event in seen)
    messages = (event.message for event in seen if isinstance(event, Detect))
    why = next((text.removeprefix(GAVE_UP) for text in messages if text.startswith(GAVE_UP)), "")
    reason = f": {why.removesuffix(RESTARTS)}" if why else ""
    return (
        f"{restarts} of {counted(kills, 'kill')} ended in a restart, not in live recovery{reason}" if restarts else ""
    )


def _difference(divergence: Divergence) -> Iterator[str]:
    since = f"since step {divergence.run.step}"
    if divergence.before is not None:
        place = f"killed before step {divergence.before}, it continued from step {divergence.began}"
        yield f"does not resume exactly: {place} and differs {since}"
    else:
        yield f"is not even the same without a kill: two runs differ {since}"
    paths = divergence.paths
    for path in paths[:SHOWN]:
        thing, _, rest = path.partition("/")
        there, here = divergence.reference.after.get(path), divergence.run.after.get(path)
        if is_tensor(there) and is_tensor(here):
            yield f"  {thing}: tensor {rest} differs"
        else:
            yield f"  {thing}: {rest} is {here or 'missing'}, and {there or 'missing'} in the reference"
    if len(paths) > SHOWN:
        yield f"  and {len(paths) - SHOWN} more"
