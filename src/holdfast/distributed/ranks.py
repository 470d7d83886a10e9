"""The rank of this process and the number of ranks, short messages among the ranks, and the gate at a step boundary.

Under a supervisor or torchrun the ranks share a store and a process group; a process alone is a world of one. A rank that
waits for a message polls the store: a blocking wait would keep the other threads of this process from the store, and
would end after a fixed time however busy the peer is.
"""

import os
import sys
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

from holdfast.distributed.process_group import leave_default_group, replace_default_group
from holdfast.errors import BadInput, WorkerLost

SUPERVISED = "HOLDFAST_ROUND"
TERM = "HOLDFAST_TERM"  # the part of the nodes that this worker belongs to, where there are several
NODE = "HOLDFAST_NODE"  # the node of this worker
JOINS = "HOLDFAST_JOINS"  # set for a worker that takes the place of a lost one
_SUPERVISED_PATIENCE = 86400.0  # seconds: the supervisor detects a hanging peer long before this
_BUSY = "busy"
BEAT_SECONDS = 1.0
NEVER = sys.maxsize  # a boundary that is never reached
_FIRST_POLL, _LAST_POLL = 0.0005, 0.02  # seconds between two looks, at first and in the long run
_POLL_GROWTH = 1.2  # a message is noticed at most a fifth of its waiting time late


def ours(token: str, node: int) -> str:
    """Return the key in the workers' store that marks `token` as the term of the workers of `node`."""
    return f"term/{token}/{node}"


class BoundaryGate:
    """The next step boundary: training passes it unless another thread waits for it there.

    Other threads learn of a loss, of a worker that wants to join, or of a request to stop, and post to the peers which
    boundary this rank comes to next. Hold `lock` to read or change `next` and `waiting`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.next = 0
        self.waiting: set[object] = set()

    def passes(self, step: int) -> bool:
        """Pass the boundary before `step`; return False if a thread waits there."""
        with self.lock:
            if self.waiting:
                return False
            self.next = step + 1
            return True

    def wait(self, owner: object) -> int:
        """Make the training stop for `owner`; return the boundary that it comes to next."""
        with self.lock:
            self.waiting.add(owner)
            return self.next

    def leave(self, owner: object) -> None:
        """Let the training pass as far as `owner` is concerned."""
        with self.lock:
            self.waiting.discard(owner)


class Changed(Exception):
    """The membership changed while a rank waited for a message."""


@dataclass(slots=True, kw_only=True, eq=False)
class Ranks:
    """This process among its peers; a peer that is silent for `patience` seconds is given up.

    With live recovery the peers may change: then waits end because `has_changed` returns True, until `renumber` is called.
    """

    rank: int
    size: int
    store: Store
    grouped: bool
    device: torch.device
    backend: str = "gloo"
    patience: float = _SUPERVISED_PATIENCE
    connect: Callable[[], Store] | None = None  # opens another connection to the workers' store, if they share one
    has_changed: Callable[[], bool] = lambda: False
    watch_members: Callable[[], Callable[[], bool]] = lambda: lambda: False  # see Coordination.watch_members

    def fixed(self) -> "Ranks":
        """Return a copy for the present members, for threads that must finish with them after the membership changes."""
        return replace(self, has_changed=self.watch_members())

    def renumber(self, rank: int, size: int, number: int) -> None:
        """Be `rank` of `size` from now on; messages of other memberships than `number` are not seen."""
        assert self.connect is not None
        self.rank, self.size = rank, size
        self.store = PrefixStore(f"run/{number}", self.connect())

    def post(self, topic: str, value: str) -> None:
        """Post a message once, for every rank that waits for `topic`."""
        self.store.set(topic, value)

    def wait_for(self, topic: str) -> str:
        """Wait for a message and return it; a busy rank 0 may take as long as it needs."""
        pause, beats, deadline = _FIRST_POLL, -1, time.monotonic() + self.patience
        while not self.is_posted(topic):
            if pause == _LAST_POLL and (newest := int(self.store.add(_BUSY, 0))) != beats:
                beats, deadline = newest, time.monotonic() + self.patience
            if self.has_changed():
                raise Changed(topic)
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"rank {self.rank} waited {self.patience:g} s for a message of a peer ({topic}): "
                    "check that it still runs, or give attach() a longer timeout."
                )
            time.sleep(pause)
            pause = min(_POLL_GROWTH * pause, _LAST_POLL)
        return bytes(self.store.get(topic)).decode()

    def is_posted(self, topic: str) -> bool:
        """Return True if the message was posted."""
        return bool(self.store.check([topic]))

    def from_rank_0(self, topic: str, value: str | None) -> str:
        """Return the value of rank 0 on every rank; only rank 0 gives one."""
        if value is not None:
            self.post(topic, value)
            return value
        return self.wait_for(topic)

    def gather(self, topic: str, value: str) -> list[str] | None:
        """Return every rank's value in order on rank 0; return None on other ranks, which do not wait."""
        if self.rank:
            self.post(f"{topic}/{self.rank}", value)
            return None
        values = [value]
        for rank in range(1, self.size):
            values.append(self.wait_for(f"{topic}/{rank}"))
            self.store.delete_key(f"{topic}/{rank}")
        return values

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Report once a second that rank 0 is alive, so that no peer takes a slow save for a dead process."""
        if self.rank or self.size == 1:
            yield
            return
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_SECONDS):
                self.store.add(_BUSY, 1)

        thread = threading.Thread(target=beat, name="holdfast-busy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def join(timeout: float) -> Ranks:
    """Find the peers of this process, and initialise torch.distributed with them.

    Without a supervisor, collectives fail and waits end after `timeout` seconds without a message from the peer.
    """
    if dist.is_initialized():
        raise BadInput("attach() initialises torch.distributed itself: leave out init_process_group().")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks(rank=0, size=1, store=HashStore(), grouped=False, device=_device())
    is_supervised = SUPERVISED in os.environ
    patience = max(timeout, _SUPERVISED_PATIENCE) if is_supervised else timeout
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _device()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", size))  # NCCL requires a device for each of them
    has_devices = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    backend = "cpu:gloo,cuda:nccl" if has_devices else "gloo"
    store = _store(timedelta(seconds=timeout))
    if JOINS in os.environ:  # its peers formed their group without it
        replace_default_group(rank % size, size)
    else:
        limit = timedelta(seconds=patience)
        dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=limit)
    return Ranks(
        rank=rank,
        size=size,
        store=PrefixStore("run", store),
        grouped=True,
        device=device,
        backend=backend,
        patience=patience,
        connect=(lambda: _store(timedelta(seconds=timeout))) if is_supervised else None,
    )


def leave() -> None:
    """Leave the peers in order; they take a process that disappears for one that crashed."""
    leave_default_group()


def _store(patience: timedelta) -> Store:
    """Connect to the store of the supervisor or of torchrun; each round of a supervisor has its own part of it."""
    if SUPERVISED not in os.environ:
        store: Store = next(rendezvous("env://", timeout=patience))[0]
        store.set_timeout(patience)
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = TCPStore(address, port, is_master=False, timeout=patience)
    return PrefixStore(f"holdfast/{os.environ[SUPERVISED]}", server)


def _device() -> torch.device:
    """Return the accelerator of this rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
