"""Unprotected values that a kill made a run lose, though its protected state is the same as without kills. No I/O.

A value that the script computes from its own old value was read again, so it stays wrong after a restart. If it is a
module, a gradient scaler, a generator or a tensor of several values, the script does not resume exactly. A plain number
may be a count for the log alone, so it is only noted.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from holdfast.rehearse.case import Cause, described, others, protection
from holdfast.rehearse.compare import by_step
from holdfast.train.observe.observations import Observed, UnprotectedValue, windows

_ONE_VALUE = re.compile(r"tensor (numpy )?\w+\[1?\] ")


def cause_of(
    forgotten: Mapping[str, UnprotectedValue], reference: Sequence[Observed], run: Sequence[Observed]
) -> Cause | None:
    """Return a Cause if the script computes one of the `forgotten` values, lost in a kill, from its old value."""
    read = {path: forgotten[path] for path in _read_again(forgotten, reference, run) if _is_state(forgotten[path])}
    if not read:
        return None
    path, value = next(iter(read.items()))
    return Cause(
        word="not protected",
        why=f"{path}, {described(value)}, is not protected: it started over after a kill, and the script computes it from "
        "its old value, so it stays wrong",
        instead=protection(path, value),
        evidence=("every bit of the protected state is the same after each step", *others(read, skip=1)),
    )


def _read_again(paths: Iterable[str], reference: Sequence[Observed], run: Sequence[Observed]) -> list[str]:
    """Return the subset of `paths` whose values a step after a kill changed to other values than in the reference."""
    expected = by_step(reference)
    pairs = [(expected.get((window.step, window.rank)), window) for window in windows(run) if window.attempt > 1]
    return [
        path
        for path in paths
        if any(
            right is not None
            and right.held.get(path) != right.kept.get(path)
            and path in window.kept
            and window.kept[path] != right.kept.get(path)
            for right, window in pairs
        )
    ]


def _is_state(value: UnprotectedValue) -> bool:
    return value.kind != "value" and not _ONE_VALUE.match(value.mark)
