"""Which rank of how many this process is, and how the ranks tell each other small things.

Under a supervisor or torchrun the ranks share a store and a process group; a process alone is a world of one.

Whoever waits for a peer waits by looking again and again: a wait inside the store would keep the other threads of this
process from it, and would end after a fixed time, however busy the peer is.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they are public
from torch.distributed.rendezvous import rendezvous

from holdfast.distributed import script_collectives
from holdfast.errors import BadInput, WorkerLost

SUPERVISED = "HOLDFAST_ROUND"
TERM = "HOLDFAST_TERM"  # which part of the nodes this worker is of, where there are several
NODE = "HOLDFAST_NODE"  # on which it runs
JOINS = "HOLDFAST_JOINS"  # set for a worker that takes the place of a lost one
_WATCHED = 86400.0  # seconds: a supervisor finds out who is stuck, long before this
_BUSY = "busy"
BEAT = 1.0
_QUICK, _SLOW = 0.0005, 0.02  # seconds between two looks, at first and in the long run
_GROWTH = 1.2  # from one look to the next: what is waited for is noticed at most a fifth of the wait too late


def ours(token: str, node: int) -> str:
    """Where the workers' store says that a term with this token is that of the workers of this node."""
    return f"term/{token}/{node}"


class Changed(Exception):
    """The peers that a rank waited for are no longer those that there are."""


@dataclass(slots=True, kw_only=True, eq=False)
class Ranks:
    """This process among its peers; it gives up on one that says nothing for `patience` seconds.

    Where a run recovers live the peers may change: `has_changed` says so to whoever waits, and `become` makes it so.
    """

    rank: int
    size: int
    store: Store
    grouped: bool
    device: torch.device
    backend: str = "gloo"
    patience: float = _WATCHED
    connect: Callable[[], Store] | None = None  # one more connection to the store of the workers, if they share one
    has_changed: Callable[[], bool] = lambda: False
    watch_members: Callable[[], Callable[[], bool]] = lambda: (
        lambda: False
    )  # asks, from now on, if one of these is lost

    def as_it_is(self) -> "Ranks":
        """The peers that there are now, for whoever has something to settle with them after they have changed."""
        return replace(self, has_changed=self.watch_members())

    def become(self, rank: int, size: int, number: int) -> None:
        """Be this rank of so many from now on; what is told under another membership is not heard."""
        assert self.connect is not None
        self.rank, self.size = rank, size
        self.store = PrefixStore(f"run/{number}", self.connect())

    def tell(self, topic: str, value: str) -> None:
        """Say something once, to whoever hears this topic."""
        self.store.set(topic, value)

    def hear(self, topic: str) -> str:
        """What was told, as soon as it is. Rank 0 may take as long as it needs, if it says that it is busy."""
        self._wait_for(topic)
        return bytes(self.store.get(topic)).decode()

    def is_told(self, topic: str) -> bool:
        """Whether it was told already."""
        return bool(self.store.check([topic]))

    def from_first(self, topic: str, value: str | None) -> str:
        """What rank 0 has to say, on every rank; only rank 0 gives the value."""
        if value is not None:
            self.tell(topic, value)
            return value
        return self.hear(topic)

    def gather(self, topic: str, value: str) -> list[str] | None:
        """What every rank has to say, in order, on rank 0; nothing on the others, which do not wait."""
        if self.rank:
            self.tell(f"{topic}/{self.rank}", value)
            return None
        return [value, *(self._taken(f"{topic}/{rank}") for rank in range(1, self.size))]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While this lasts, rank 0 says once a second that it is alive: nobody takes a slow save for a dead peer."""
        if self.rank or self.size == 1:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(over,), name="holdfast-busy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(BEAT):
            self.store.add(_BUSY, 1)

    def _taken(self, topic: str) -> str:
        said = self.hear(topic)
        self.store.delete_key(topic)
        return said

    def _wait_for(self, topic: str) -> None:
        pause, beats, deadline = _QUICK, -1, time.monotonic() + self.patience
        while not self.is_told(topic):
            if pause == _SLOW and (heard := int(self.store.add(_BUSY, 0))) != beats:
                beats, deadline = heard, time.monotonic() + self.patience
            if self.has_changed():
                raise Changed(topic)
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"rank {self.rank} waited {self.patience:g} s for a peer ({topic}) that said nothing: "
                    "see whether it still runs, or give attach() a longer timeout."
                )
            time.sleep(pause)
            pause = min(_GROWTH * pause, _SLOW)


def join(timeout: float) -> Ranks:
    """Find our peers, and be ready to add up gradients with them.

    Without a supervisor, collectives fail and waits end after so many seconds without a word from the peer.
    """
    if dist.is_initialized():
        raise BadInput("attach() starts the process group itself: leave out init_process_group")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks(rank=0, size=1, store=HashStore(), grouped=False, device=_device())
    patience = max(timeout, _WATCHED) if SUPERVISED in os.environ else timeout
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _device()
    store = _store(timedelta(seconds=timeout))
    group = PrefixStore("group", store)
    limit, backend = timedelta(seconds=patience), _backend()
    if JOINS in os.environ:  # its peers formed their group without it
        script_collectives.outlive(rank % size, size)
    else:
        dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=limit)
    run = PrefixStore("run", store)

    def connect() -> Store:
        return _store(timedelta(seconds=timeout))

    return Ranks(
        rank=rank,
        size=size,
        store=run,
        grouped=True,
        device=device,
        backend=backend,
        patience=patience,
        connect=connect if SUPERVISED in os.environ else None,
    )


def leave() -> None:
    """Part from our peers in order: a peer that goes without a word may be taken for one that crashed."""
    script_collectives.let_go()


def _store(patience: timedelta) -> Store:
    """The store that whoever started us provides; each round of a supervisor has its own part of it."""
    if SUPERVISED not in os.environ:
        found: Store = next(rendezvous("env://", timeout=patience))[0]
        found.set_timeout(patience)
        return found
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = TCPStore(address, port, is_master=False, timeout=patience)
    return PrefixStore(f"holdfast/{os.environ[SUPERVISED]}", server)


def _device() -> torch.device:
    """The accelerator that is this rank's, if there is any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _backend() -> str:
    """NCCL where every rank has a device of its own, which it insists on; gloo anywhere."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    own_device = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    return "cpu:gloo,cuda:nccl" if own_device else "gloo"
