"""Guards of a loop against scripts that fetch batches ahead, or change restored state a second time."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.checkpoint.payload import flatten
from holdfast.errors import BadInput
from holdfast.train.state.protected import Protected, tree_digest
from holdfast.train.step_log import Fingerprints, WorkDone


class FirstBatchCheck:
    """A check that the script does something with the first batch before it asks for the second.

    A step ends when the script requests the next batch, and may be saved then. If the script fetched batches ahead, it
    would train a batch only after this save, and a restart would lose the batch.
    """

    def __init__(self, fingerprints: Fingerprints, work: WorkDone) -> None:
        self._fingerprints, self._work = fingerprints, work
        self._before: str | None = None

    def begin(self) -> None:
        """Remember the protected state before the first batch."""
        self._before = self._fingerprints.take().digest()

    def check(self) -> None:
        """On the first call, raise BadInput if the script has neither trained nor changed a model since `begin`."""
        before, self._before = self._before, None
        if before is not None and self._work.is_idle and self._fingerprints.take().digest() == before:
            raise BadInput(
                "the second batch was asked for before anything was done with the first (no backward, no optimizer step, no "
                "change of a protected model): train each batch before asking for the next, as `for batch in "
                "run.batches(...)` does. A batch that is fetched ahead would be lost in a restart."
            )


class StateKeeper:
    """A guard of the protected state when a run resumes in the middle of an epoch.

    A script may change protected state before the batches of an epoch, for example set a learning rate or step a
    scheduler. The restored state already contains this change, so making it again must have no effect.
    """

    def __init__(self, protected: Protected, fingerprints: Fingerprints, restore_again: Callable[[], None]) -> None:
        self._protected, self._fingerprints, self._restore_again = protected, fingerprints, restore_again

    @contextmanager
    def keeping(self, *, in_memory: bool = False) -> Iterator[None]:
        """Return a context manager that restores the protected state on exit if it has changed.

        The state is read from the snapshot again; if `in_memory`, because no snapshot has it, from a copy.
        """
        before, copied = self._mark(), copy.deepcopy(self._protected.capture()) if in_memory else None
        yield
        if self._mark() == before:
            return
        if copied is None:
            self._restore_again()
        else:
            self._protected.restore(copied)

    def _mark(self) -> tuple[str, str]:
        return self._fingerprints.take().digest(), tree_digest(flatten(self._protected.capture()))
