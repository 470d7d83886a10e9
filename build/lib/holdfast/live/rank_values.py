"""Storage of each rank's protected plain values at its last step boundaries, for a worker that replaces the rank.

Plain values (dicts, lists, tensors, arrays) belong to one rank, so the survivors do not have the values of a lost rank.
With `--recovery replay` every rank writes its values to the workers' shared store at each step boundary. A replacement
begins the interrupted step with the values that the lost rank had at the boundary before it.
"""

import json

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # it is public

from holdfast.distributed.membership import LIVE, Coordination
from holdfast.train.state.protected import Protected

KEPT = 2  # boundaries: a lost rank may have been one step ahead of the others


class RankValues:
    """A store in which each rank keeps its protected plain values, and the buffers of its sharded models.

    A worker that replaces a lost worker reads the lost worker's values from this store."""

    def __init__(self, coordination: Coordination, protected: Protected) -> None:
        self._store, self._protected = PrefixStore(f"{LIVE}/values", coordination.store()), protected

    def keep(self, member: int, step: int) -> None:
        """Write this rank's current values to the store before `step`, for a worker that may replace this worker.

        `member` is the number of this worker, under which the values are stored."""
        own = self._protected.own()
        self._store.set(f"{member}/{step % KEPT}", "\n".join([json.dumps([step, *own]), *own.values()]))

    def restore(self, member: int, step: int) -> bool:
        """Set this rank's values to those that worker `member` stored before `step`; return False if it stored none."""
        key = f"{member}/{step % KEPT}"
        if not self._store.check([key]):
            return False
        head, *texts = self._store.get(key).decode().split("\n")  # there are no line breaks in JSON texts
        posted, *names = json.loads(head)
        if posted != step:
            return False
        self._protected.restore_own(dict(zip(names, texts, strict=True)))
        return True
