"""Where a run's first weights come from: looked at once, before anything is made, and remembered by the run's folder."""

from pathlib import Path

from holdfast.errors import BadInput
from holdfast.events import JSON
from holdfast.runs.config import RUN, read_config
from holdfast.runs.source import Source
from holdfast.supervise.child_call import Aside

READ_WITHIN = 3600.0


def beginning(wished: Source | None, out: Path, *, has_begun: bool) -> Source | None:
    """The source that the run in this folder began with, if it has; or else the one that is wished for, as it is now.

    A source that is no longer there, or has changed, is no obstacle to a run that has saved a step. It is read in a
    process of its own: to read tensors may start threads, which no fork survives.
    """
    before = read_config(out).source if has_begun and (out / RUN).exists() else None
    if before and (wished is None or wished.wish == before.wish):
        return before
    if wished is None:
        return None
    if wished.place == str(out):
        raise BadInput(f"{out} cannot begin with its own weights: name another --out, or leave out --from.")
    told = Aside(lambda: _look(wished), wished.place).result(READ_WITHIN)
    return Source.from_json(told)


def _look(wished: Source) -> JSON:
    from holdfast.weights.initial import settled

    return settled(wished).to_json()
