"""Heavy imports of a script, done once before workers are forked, so that a restart does not wait for them."""

import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.supervise.imports import imports_of
from holdfast.supervise.trial import imported, tried

WORTH = 0.3  # seconds: of imports that take less nobody notices
MOST_TRIALS = 4  # each ends with an import that is left to the workers


def import_for(script: Path, say: Callable[[str], None]) -> None:
    """Import what this script imports of installed packages, as far as workers can be forked with it; say what is not."""
    left = [each for each in imports_of(script) if _package(each) not in sys.modules]
    taken, seconds = [], 0.0
    for _ in range(MOST_TRIALS):
        if not left:
            break
        try:
            found = tried(left)
        except HoldfastError:  # it takes too long to try: workers import as they always did
            break
        good = left[: len(found.seconds) - (found.why is not None)]
        if sum(found.seconds) >= WORTH:
            for statement in good:
                imported(statement)
            taken += good
            seconds += sum(found.seconds[: len(good)])
        if found.why is None:
            break
        bad, left = left[len(good)], left[len(good) + 1 :]
        if found.seconds[-1] >= WORTH:
            say(f"every start of a worker imports {_package(bad)} anew ({found.seconds[-1]:.1f} s): {found.why}")
    if seconds >= WORTH:
        names = ", ".join(dict.fromkeys(map(_package, taken)))
        say(f"imported {names} once for all workers: a restart need not ({seconds:.1f} s)")


def _package(statement: str) -> str:
    return statement.split()[1].partition(".")[0]
