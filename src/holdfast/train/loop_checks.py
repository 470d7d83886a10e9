"""Checks for scripts that would not resume exactly: steps outside `run.batches`, and batches that are fetched ahead."""

import os
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast import progress
from holdfast.errors import BadInput
from holdfast.train.state.fingerprint import Fingerprints
from holdfast.train.step_log import WorkDone

LINE = (
    "holdfast: supervised only: these steps do not come from run.batches(). After a failure the script starts again, with "
    "checkpoints of its own if it keeps any; holdfast saves and checks nothing, protected or not."
)
_hook: Any = None


def watch() -> None:
    """Warn, in a worker of rank 0, if the first optimizer step comes before any loop of a run.

    A restarted script may be all that is wanted, for example with a trainer that keeps checkpoints of its own. But
    a user should not find out after a month that nothing was saved.
    """
    global _hook
    if os.environ.get("RANK") == "0" and os.environ.get("HOLDFAST_ATTEMPT", "1") == "1":
        _hook = register_optimizer_step_post_hook(_warn)


def begun() -> None:
    """Note that a loop of the run has begun: optimizer steps belong to it from now on."""
    progress.here.set_checked()
    _remove_hook()


def _warn(*_: Any) -> None:
    _remove_hook()
    sys.stderr.write(f"{LINE}\n")
    sys.stderr.flush()


def _remove_hook() -> None:
    global _hook
    if _hook is not None:
        _hook.remove()
        _hook = None


class FirstBatchCheck:
    """Refuses a script that asks for the second batch of a run before it has done anything with the first.

    The boundary of a step is where the next batch is asked for. A script that fetches a batch ahead trains the first
    one after its boundary, so the step would be saved untrained and lost in a restart.
    """

    def __init__(self, fingerprints: Fingerprints, work: WorkDone) -> None:
        self._fingerprints, self._work = fingerprints, work
        self._before: str | None = None

    def begin(self) -> None:
        """Remember the state before the first batch."""
        self._before = self._fingerprints.take().digest()

    def check(self) -> None:
        """Raise BadInput if nothing has changed since `begin`; later calls check nothing."""
        before, self._before = self._before, None
        if before is not None and self._work.is_idle and self._fingerprints.take().digest() == before:
            raise BadInput(
                "the second batch was asked for before anything was done with the first (no backward, no optimizer step, no "
                "change of a protected model): train each batch before asking for the next, as `for batch in "
                "run.batches(...)` does. A batch that is fetched ahead would be lost in a restart."
            )
