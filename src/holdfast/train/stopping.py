"""Stop all ranks before the same step, when one of them was asked to stop or its script called `run.stop()`.

A rank that stops earlier than its peers would leave them waiting in a collective, and a rank may be many steps ahead of
another, because a GPU works through a queue. So a rank that learns of the request announces the boundary that it
reaches next, and waits there until all ranks have announced their boundaries. All ranks stop at the latest of these
boundaries. A rank that is behind can reach it, because the other ranks have begun every collective up to it.

At that boundary the ranks agree on how the run ends: stopped by a script, which is part of the saved state, or
preempted.

A thread listens for the request, because a rank may learn of it while it waits for a peer in the middle of a step.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import DistError

from holdfast import process, progress
from holdfast.distributed.ranks import BoundaryGate, Ranks, RanksChanged

WANTED = "stop-wanted"
NEXT = "stop-next"
STOP = "stop"
STOPPED = "stopped"
SCRIPT = "stop-script"
EPOCH = "stop-epoch"
LOOK = 0.05  # seconds between two looks for a request
ENDS_WITHIN = 1.0  # seconds for the listening thread to end; it may be asking the store


class Stopping:
    """An object through which all ranks agree whether to stop the run early, and before which step."""

    def __init__(
        self,
        ranks: Ranks,
        start: int,
        gate: BoundaryGate | None = None,
        *,
        wanted: bool = False,
        on_request: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_request` is called in a thread when another rank, or this one, is asked to stop; not for a rank alone."""
        self._ranks, self._gate, self._on_request = ranks, gate or BoundaryGate(), on_request
        self.wanted = wanted
        """True once this rank's script has called run.stop(). At the final boundary: True if any rank's script has."""
        self._over = threading.Event()
        self._listener: threading.Thread | None = None
        self.begin(start)

    def begin(self, start: int) -> None:
        """Start to listen for stop requests, before step `start`. Call this again when the ranks have changed."""
        self._over.set()
        self._over = threading.Event()
        self._stop: int | None = None
        with self._gate.lock:
            self._gate.next = start
            self._gate.waiting.discard(self)
        if self._ranks.size == 1:
            self._gate.wait(self)  # a rank alone looks at every boundary, without a thread
        else:
            self._listener = threading.Thread(
                target=self._listen, args=(self._over,), name="holdfast-stopping", daemon=True
            )
            self._listener.start()

    def request(self) -> None:
        """Ask all ranks to stop before the same step, as soon as possible. Called when the script calls run.stop()."""
        self.wanted = True

    def is_here(self, step: int) -> bool:
        """Return True if all ranks stop before `step`, because of a stop signal or a call of run.stop().

        If they do, set `wanted` to the same value on all ranks: True if any rank's script called run.stop()."""
        if self._ranks.size == 1:
            return self.wanted or process.requested.is_set()
        with self._gate.lock:
            if not (self in self._gate.waiting or self.wanted):
                self._gate.next = step + 1
                return False
        if self._stop is None:
            self._stop = int(self._ranks.wait_for(STOP))
        if self._stop > step:
            return False
        self.wanted = self._any_wants(SCRIPT)
        return True

    def agree(self, step: int) -> None:
        """At the end of an epoch, before `step`: set `wanted` to True on all ranks if any rank called run.stop()."""
        if self._ranks.size > 1:
            self.wanted = self._any_wants(f"{EPOCH}/{step}")

    def wait_for_save(self) -> None:
        """Wait until rank 0 has saved. A rank that exits earlier could make other ranks fail."""
        self._ranks.from_rank_0(STOPPED, None if self._ranks.rank else "")

    def close(self) -> None:
        """Stop the listener thread and wait for it to end.

        A thread that uses the store at interpreter exit would abort the process."""
        self._over.set()
        if self._listener is not None:
            self._listener.join(ENDS_WITHIN)

    def _any_wants(self, topic: str) -> bool:
        """Return True if any rank's script called run.stop(). All ranks must call this with the same key `topic`."""
        progress.here.count_post()
        wishes = self._ranks.gather(topic, "stop" if self.wanted else "")
        return bool(self._ranks.from_rank_0(topic, None if wishes is None else "stop" * any(wishes)))

    def _listen(self, over: threading.Event) -> None:
        # If the ranks change, `begin` is called again. If the store is gone, training finds that out for itself.
        with suppress(RanksChanged, DistError):
            while not over.wait(LOOK):
                if self.wanted or process.requested.is_set() or self._ranks.is_posted(WANTED):
                    self._on_request()
                    self._agree_where()
                    return

    def _agree_where(self) -> None:
        ranks = self._ranks
        ranks.post(WANTED, "")
        ranks.post(f"{NEXT}/{ranks.rank}", str(self._gate.wait(self)))
        if ranks.rank == 0:
            ranks.post(STOP, str(max(int(ranks.wait_for(f"{NEXT}/{rank}")) for rank in range(ranks.size))))
