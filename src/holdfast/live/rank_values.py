"""The plain values that each rank protects, as they were at its last step boundaries, kept in the workers' store.

Plain values belong to one rank (see `train/state/plain_values.py`), so the survivors do not have those of a lost rank.
With `--recovery replay` every rank posts its values at each boundary, and a replacement begins the interrupted step
with the values that the lost rank had there.
"""

import json

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # it is public

from holdfast.distributed.membership import LIVE, Coordination
from holdfast.train.state.protected import Protected

KEPT = 2  # boundaries: a lost rank may have been one step ahead of the others


class RankValues:
    """A store in which each rank keeps its protected plain values (dicts, lists, tensors, arrays).

    A worker that replaces a lost one reads the values of the lost worker from this store."""

    def __init__(self, coordination: Coordination, protected: Protected) -> None:
        self._store, self._protected = PrefixStore(f"{LIVE}/values", coordination.store()), protected

    def keep(self, member: int, step: int) -> None:
        """Write this rank's values, as they are before `step`, to the store, for a worker that may replace this one.

        `member` is the number of this worker, under which the store keeps the values."""
        own = self._protected.own()
        self._store.set(f"{member}/{step % KEPT}", "\n".join([json.dumps([step, *own]), *own.values()]))

    def restore(self, member: int, step: int) -> bool:
        """Set this rank's values to those that worker `member` stored before `step`; return False if there are none."""
        key = f"{member}/{step % KEPT}"
        if not self._store.check([key]):
            return False
        head, *texts = self._store.get(key).decode().split("\n")  # there are no line breaks in JSON texts
        posted, *names = json.loads(head)
        if posted != step:
            return False
        self._protected.restore_own(dict(zip(names, texts, strict=True)))
        return True
