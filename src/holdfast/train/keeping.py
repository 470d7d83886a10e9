"""What is protected stays as it came back, while a script does again what it does before the batches of an epoch.

A run that goes on in the middle of an epoch hands out the rest of it. What the script does before an epoch's batches
(set a learning rate, step a schedule) it has done before, and that is in the state that came back: it must not count
twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.checkpoint.state_tree import flatten
from holdfast.train.state.fingerprint import Fingerprints
from holdfast.train.state.protected import Protected, tree_digest


class Keeping:
    """Puts back what is protected, if it was changed."""

    def __init__(self, protected: Protected, fingerprints: Fingerprints, put_back: Callable[[], None]) -> None:
        self._protected, self._fingerprints, self._put_back = protected, fingerprints, put_back

    @contextmanager
    def state(self, again: bool) -> Iterator[None]:
        """If this is done again, what is protected is afterwards what it was before."""
        before = self._mark() if again else None
        yield
        if before is not None and self._mark() != before:
            self._put_back()

    def _mark(self) -> tuple[str | None, str]:
        """Cheap, since it is taken twice: a few values of every tensor, and all else."""
        return self._fingerprints.take().digest(), tree_digest(flatten(self._protected.capture()))
