"""What a rehearsal found, in lines for people. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.rehearse.cause import Cause
from holdfast.rehearse.compare import Divergence
from holdfast.train.observe.observations import Kill, UnprotectedValue, is_tensor

SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a rehearsal found: nothing, if the script resumes exactly; else what differs, and why."""

    run: str  # the folder of the run that came out otherwise, or of the last
    steps: int = 0
    kills: tuple[Kill, ...] = ()
    began: tuple[int, ...] = ()  # the step that it went on from after each kill
    found: Divergence | None = None
    cause: Cause | None = None
    forgotten: dict[str, UnprotectedValue] | None = None  # what did not come back, and changed nothing protected
    unseen: str = ""  # what this rehearsal was too short for

    @property
    def is_exact(self) -> bool:
        """Whether the script resumes exactly."""
        return self.cause is None


def lines(found: Rehearsed) -> Iterator[str]:
    """The answer first; then what differs, why, and what was seen that says so."""
    if found.cause is None:
        yield f"resumes exactly: {found.steps} steps, every bit of the protected state the same after each"
        for kill, began in zip(found.kills, found.began, strict=True):
            yield f"  killed before step {kill.step} ({kill.why}), went on from step {began}"
        yield from _forgotten(found.forgotten or {})
        if found.unseen:
            yield f"note: {found.unseen}"
        return
    if found.found:
        yield _where(found.found)
        yield from _what(found.found)
    else:
        yield f"does not resume exactly: {found.cause.why}"
    yield from _why(found.cause, again=found.found is None)


def _where(found: Divergence) -> str:
    since = f"since step {found.run.step}"
    if not found.is_resumed:
        return f"does not come out the same even without a kill: two runs differ {since}"
    return f"does not resume exactly: killed before step {found.before}, it went on from step {found.began} and differs {since}"


def _what(found: Divergence) -> Iterator[str]:
    paths = found.paths
    for path in paths[:SHOWN]:
        thing, _, rest = path.partition("/")
        there, here = found.reference.after.get(path), found.run.after.get(path)
        if is_tensor(there) and is_tensor(here):
            yield f"  {thing}: tensor {rest} differs"
        else:
            yield f"  {thing}: {rest} is {here or 'missing'}, and {there or 'missing'} in the reference"
    if len(paths) > SHOWN:
        yield f"  and {len(paths) - SHOWN} more"


def _why(cause: Cause, *, again: bool) -> Iterator[str]:
    if not again:
        yield f"likely cause: {cause.why}"
    for each in cause.evidence:
        yield f"  seen: {each}"
    if cause.instead:
        yield f"instead: {cause.instead}"


def _forgotten(forgotten: dict[str, UnprotectedValue]) -> Iterator[str]:
    if forgotten:
        named = [f"{path} ({each.type})" for path, each in forgotten.items()]
        rest = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        yield f"note: not protected, and not as before after a kill, without a difference so far: {', '.join(named[:SHOWN])}{rest}"
