"""Steps of an optimizer that are no part of a run: a script that trains without `run.batches` is told so once.

A supervisor starts any script again after a failure, and that may be all that is wanted, as where a trainer keeps
checkpoints of its own. But nobody should find out after a month that nothing was saved.
"""

import os
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast import progress

LINE = (
    "holdfast: supervised only: these steps do not come from run.batches(). After a failure the script starts again, with "
    "checkpoints of its own if it keeps any; holdfast saves and checks nothing, protected or not."
)
_hook: Any = None


def watch() -> None:
    """In a worker, before its script: see whether the first step of an optimizer is one of a run."""
    global _hook
    if os.environ.get("RANK") == "0" and os.environ.get("HOLDFAST_ATTEMPT", "1") == "1":
        _hook = register_optimizer_step_post_hook(_Once())


def begun() -> None:
    """The steps from here on are those of a run."""
    global _hook
    progress.here.checks()
    if _hook is not None:
        _hook.remove()
        _hook = None


class _Once:
    def __init__(self) -> None:
        self._said = False

    def __call__(self, *_: Any) -> None:
        if not self._said:
            self._said = True
            sys.stderr.write(f"{LINE}\n")
            sys.stderr.flush()
