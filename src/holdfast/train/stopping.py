"""How all ranks end before the same window, when one of them was asked to stop, or its script ends the run.

A rank that leaves its peers in a collective leaves them waiting, and a rank may be many windows ahead of another, where
a device works through what it was given. So a rank that hears of the wish says which boundary it comes to next, and goes
no further than that boundary until all have said so; the furthest of them is where everybody stops. Whoever is behind
can get there: the others have begun every collective up to it.

There each rank gives its last word: that it was asked (preemption), that its script called `run.stop()`, that its script
has left the loop, or none of these. A rank that can get nowhere any more, since it waits in a collective for one that has
left, says that. From these words all know how the run ends; a loop that some ranks have left and others have not is a
mistake, which is named.

A thread listens for the wish, because a rank may hear of it while it waits for a peer in the middle of a window.

How a worker ends where nothing that it raises is heard: as its script lets go of the loop, Python ignores errors.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, NoReturn

from holdfast import process, progress
from holdfast.distributed.boundary import BoundaryGate
from holdfast.distributed.ranks import Changed, Ranks
from holdfast.errors import BadInput

_last: list[Callable[[BaseException], None]] = []


def tell(last_words: Callable[[BaseException], None]) -> None:
    """Have this called with the error that ends the process, before it ends."""
    _last.append(last_words)


def die(error: BaseException) -> NoReturn:
    """End this process at once, for this reason: closing our connections is how peers learn of it."""
    for each in _last:
        each(error)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - nobody else can say it
    sys.stdout.flush()
    os._exit(1)


WANTED = "stop-wanted"
NEXT = "stop-next"
STOP = "stop"
STOPPED = "stopped"
LEFT = "stop-left"
WORD = "stop-word"
DECIDED = "stop-decided"
EPOCH = "stop-epoch"
LOOK = 0.05  # seconds between two looks for the wish
ENDS_WITHIN = 1.0  # seconds for the thread that listens, which may be asking the store
Word = tuple[Literal["asked", "script", "left", "here", "beyond"], int]
"""What a rank says at last, and before which window."""


class Apart(BadInput):
    """Some ranks have left the loop, and others have not."""


class Stopping:
    """Whether and where this run stops before its end."""

    def __init__(self, world: Ranks, start: int, turn: BoundaryGate | None = None, *, wanted: bool = False) -> None:
        self._world, self._turn = world, turn or BoundaryGate()
        self.wanted = wanted  # by the script of this rank
        self.by_script = False  # known where the run stops: whether a script ends it, and not a signal
        self._over = threading.Event()
        self._listener: threading.Thread | None = None
        self.begin(start)

    def begin(self, start: int) -> None:
        """Before this window, with the peers that there are now: agree anew on where to stop, if asked to."""
        self._over.set()
        self._over = threading.Event()
        self._stop: int | None = None
        self._worded = threading.Event()
        with self._turn.lock:
            self._turn.next = start
            self._turn.waiting.discard(self)
        if self._world.size == 1:
            self._turn.wait(self)  # it is asked at every boundary: nobody listens
        else:
            self._listener = threading.Thread(
                target=self._listen, args=(self._over,), name="holdfast-stopping", daemon=True
            )
            self._listener.start()

    def here(self, step: int) -> bool:
        """Whether all ranks stop before the window with this number, or could have before; asked at every boundary."""
        if self._world.size == 1:
            self.by_script = self.wanted
            return self.wanted or process.requested.is_set()
        with self._turn.lock:
            if not (self in self._turn.waiting or self.wanted):
                self._turn.next = step + 1
                return False
        if self._stop is None:
            self._stop = int(self._world.wait_for(STOP))
        if self._stop > step:
            return False
        word = "script" if self.wanted else "asked" if process.requested.is_set() else "here"
        self._settle((word, step))  # type: ignore[arg-type]  # one of those
        return True

    def agree(self, step: int) -> None:
        """At the boundary after an epoch: if the script of any rank wants to stop, those of all do.

        All come here, and nobody goes on before: so the run ends with the epoch, whichever rank has asked for it.
        """
        if self._world.size == 1:
            return
        progress.here.count_post()
        told = self._world.gather(f"{EPOCH}/{step}", "stop" if self.wanted else "")
        self.wanted = bool(self._world.from_rank_0(f"{EPOCH}/{step}", None if told is None else "stop" * any(told)))

    def leave(self, step: int) -> None:
        """The script of this rank has left the loop, before the window with this number: do all ranks, there?"""
        self.by_script = True
        if self._world.size == 1:
            return
        with self._turn.lock:
            self._turn.next = step
            self._left = (progress.here.step, progress.here.posted)
        self._world.post(LEFT, json.dumps([self._world.rank, *self._left]))
        self._settle(("left", step))

    def meet(self) -> None:
        """Wait until rank 0 has saved: a rank that has gone may be the end of the others."""
        self._world.from_rank_0(STOPPED, None if self._world.rank else "")

    def close(self) -> None:
        """Listen no longer: the loop has ended.

        The thread is waited for: one that comes back from the store while the interpreter ends would abort the process.
        """
        self._over.set()
        if self._listener is not None:
            self._listener.join(ENDS_WITHIN)

    def _settle(self, word: Word) -> None:
        """Give our last word, and hear what all of them come to."""
        progress.here.count_post()
        self._say(word)
        words = [(str(said), int(step)) for said, step in json.loads(self._world.wait_for(DECIDED))]
        if why := apart(words):
            raise Apart(why)
        self.by_script = any(said in ("script", "left") for said, _ in words)

    def _say(self, word: Word) -> None:
        with self._turn.lock:
            if self._worded.is_set():
                return
            self._worded.set()
        self._world.post(f"{WORD}/{self._world.rank}", json.dumps(word))

    def _listen(self, over: threading.Event) -> None:
        with suppress(Changed):  # then it begins anew
            while not over.wait(LOOK):
                if self.wanted or process.requested.is_set() or any(map(self._world.is_posted, (WANTED, LEFT))):
                    self._agree(over)
                    return

    def _agree(self, over: threading.Event) -> None:
        world = self._world
        world.post(WANTED, "")
        nearest = self._turn.wait(self)
        world.post(f"{NEXT}/{world.rank}", str(nearest))
        if world.rank == 0:
            world.post(STOP, str(max(int(world.wait_for(f"{NEXT}/{rank}")) for rank in range(world.size))))
        while not self._worded.is_set() and not over.wait(LOOK):
            if self._is_beyond():
                self._say(("beyond", nearest))
        if world.rank == 0:
            words = [json.loads(world.wait_for(f"{WORD}/{rank}")) for rank in range(world.size)]
            world.post(DECIDED, json.dumps(words))

    def _is_beyond(self) -> bool:
        """Whether this rank has begun an exchange in which it waits for one that has left its loop before that."""
        if not self._world.is_posted(LEFT):
            return False
        rank, step, posted = json.loads(self._world.wait_for(LEFT))
        mine = (progress.here.step, progress.here.posted)
        return bool(rank != self._world.rank and None not in (mine[0], step) and mine > (step, posted))


def apart(words: Sequence[tuple[str, int]]) -> str | None:
    """Why ranks with these last words do not end together, if they do not. Pure."""
    left = [rank for rank, (said, _) in enumerate(words) if said == "left"]
    ends = {said for said, _ in words} & {"asked", "script"}
    if not left or (len({step for _, step in words}) == 1 and (ends or len(left) == len(words))):
        return None
    stayed = [rank for rank, (said, step) in enumerate(words) if said != "left" or step != words[left[0]][1]]
    return (
        f"rank {left[0]} left the loop (break, return) at step {words[left[0]][1]} and rank {stayed[0]} did not: leave it on "
        "all ranks at the same step, or call run.stop(), which one rank may do for all"
    )
