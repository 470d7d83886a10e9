"""The rank of this process, the number of ranks, short messages among ranks, and their agreement between two steps.

Under a supervisor or torchrun the ranks share a store and a process group; a process on its own is rank 0 of 1. A rank
that waits for a message polls the store. A blocking wait would keep other threads of this process from the store, and
would time out even if the peer is only busy.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they are public
from torch.distributed.rendezvous import rendezvous

from holdfast.distributed.process_group import leave_default_group, replace_default_group
from holdfast.errors import BadInput, WorkerLost

SUPERVISED = "HOLDFAST_ROUND"
TERM = "HOLDFAST_TERM"  # the number of the group of nodes that this worker belongs to, where there are several
NODE = "HOLDFAST_NODE"  # the node of this worker
JOINS = "HOLDFAST_JOINS"  # set for a worker that takes the place of a lost one: the unique number of its process
_SUPERVISED_PATIENCE = 86400.0  # seconds: the supervisor detects a hanging peer long before this
_BUSY = "busy"
BEAT_SECONDS = 1.0
NEVER = sys.maxsize  # a boundary that is never reached
_FIRST_POLL, _LAST_POLL = 0.0005, 0.02  # seconds between two looks, at first and in the long run
_POLL_GROWTH = 1.2  # a message is noticed at most a fifth of its waiting time late


def node_key(token: str, node: int) -> str:
    """Return a key for the store. If the key is set, `node` belongs to the group of nodes with the unique id `token`."""
    return f"term/{token}/{node}"


class BoundaryGate:
    """A gate between two steps, at which other threads can make training wait.

    Threads do this when a worker is lost or wants to join, or when the run should stop. `next` is the first step that
    training has not entered. Hold `lock` to read or change `next` and `waiting`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.next = 0
        self.waiting: set[object] = set()

    def passes(self, step: int) -> bool:
        """Return True and let training enter `step`. If a thread has asked training to wait, return False instead."""
        with self.lock:
            if self.waiting:
                return False
            self.next = step + 1
            return True

    def wait(self, owner: object) -> int:
        """Ask training to wait between two steps, on behalf of `owner`; return the step before which it will wait."""
        with self.lock:
            self.waiting.add(owner)
            return self.next

    def leave(self, owner: object) -> None:
        """Withdraw the request that `owner` made with `wait`."""
        with self.lock:
            self.waiting.discard(owner)


class RanksChanged(Exception):
    """Raised when the set of ranks changes while this rank waits for a message."""


@dataclass(slots=True, kw_only=True, eq=False)
class Ranks:
    """The rank of this process, the number of ranks, and messages between ranks through a store.

    `grouped` is True if there is a process group. A wait for a message fails after `patience` seconds. If workers can
    be lost without a restart, the ranks may change: once `has_changed` returns True, waits raise RanksChanged until
    `renumber` is called."""

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
    tensor_parallel: int = 1  # that many consecutive ranks train the same samples; they share the work on each tensor

    @property
    def share(self) -> int:
        """The number of the share of samples that this rank trains or evaluates, one of `shares`."""
        return self.rank // self.tensor_parallel

    @property
    def shares(self) -> int:
        """The number of shares into which samples are divided: one for each tensor-parallel group."""
        return self.size // self.tensor_parallel

    def fixed(self) -> "Ranks":
        """Return a copy for a background thread. The copy keeps the present ranks when the ranks of this object change."""
        return replace(self, has_changed=self.watch_members())

    def group(self, tensor_parallel: int) -> None:
        """Let every `tensor_parallel` consecutive ranks train the same samples, as a tensor-parallel group."""
        self.tensor_parallel = tensor_parallel

    def renumber(self, rank: int, size: int, number: int) -> None:
        """Change this process to `rank` of `size` ranks, after workers were lost or joined.

        `number` is the number of the new membership. Messages from before the change are not visible any more."""
        assert self.connect is not None
        self.rank, self.size = rank, size
        self.store = PrefixStore(f"run/{number}", self.connect())

    def post(self, topic: str, value: str) -> None:
        """Post `value` under `topic`, for every rank that waits for that topic."""
        self.store.set(topic, value)

    def wait_for(self, topic: str) -> str:
        """Wait for the message under `topic` and return it.

        While rank 0 is in its `busy` context, no time limit applies."""
        pause, beats, deadline = _FIRST_POLL, -1, time.monotonic() + self.patience
        while not self.is_posted(topic):
            if pause == _LAST_POLL and (newest := int(self.store.add(_BUSY, 0))) != beats:
                beats, deadline = newest, time.monotonic() + self.patience
            if self.has_changed():
                raise RanksChanged(topic)
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"rank {self.rank} waited {self.patience:g} s for a message of a peer ({topic}): "
                    "check that it still runs, or give attach() a longer timeout."
                )
            time.sleep(pause)
            pause = min(_POLL_GROWTH * pause, _LAST_POLL)
        return bytes(self.store.get(topic)).decode()

    def is_posted(self, topic: str) -> bool:
        """Return True if a message was posted under `topic`."""
        return bool(self.store.check([topic]))

    def from_rank_0(self, topic: str, value: str | None) -> str:
        """Return rank 0's `value` on every rank. Other ranks pass None and wait; `topic` is the key of the message."""
        if value is not None:
            self.post(topic, value)
            return value
        return self.wait_for(topic)

    def gather(self, topic: str, value: str) -> list[str] | None:
        """Return the values of all ranks in a list on rank 0. Return None on other ranks, which do not wait."""
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
        """Signal once a second, inside this context, that rank 0 is alive, so that waiting ranks do not time out."""
        if self.rank or self.size == 1:
            yield
            return
        over = threading.Event()

        def beat() -> None:
            with suppress(DistError):  # the store is gone: this rank finds that out with its next message
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
    """Initialise torch.distributed, and return the rank of this process and its connection to other ranks.

    Without a supervisor, collectives and waits for messages fail after `timeout` seconds."""
    if dist.is_initialized():
        raise BadInput("attach() initialises torch.distributed itself: leave out init_process_group().")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks(rank=0, size=1, store=HashStore(), grouped=False, device=_device())
    is_supervised = SUPERVISED in os.environ
    patience = max(timeout, _SUPERVISED_PATIENCE) if is_supervised else timeout
    seat = os.environ.get(JOINS)  # a joining worker has a rank in messages only once it is a member
    rank, size = int(seat or os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _device()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", size))  # NCCL requires a device for each of them
    has_devices = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    backend = "cpu:gloo,cuda:nccl" if has_devices else "gloo"
    store = _store(timedelta(seconds=timeout))
    if seat:  # its peers formed their group without it
        replace_default_group(int(os.environ["RANK"]) % size, size)
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
    """Leave the process group, so that the peers do not mistake the exit of this process for a crash."""
    leave_default_group()


def _store(patience: timedelta) -> Store:
    """Connect to the store of the supervisor or torchrun; store operations time out after `patience`."""
    if SUPERVISED not in os.environ:
        store: Store = next(rendezvous("env://", timeout=patience))[0]
        store.set_timeout(patience)
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = TCPStore(address, port, is_master=False, timeout=patience)
    return PrefixStore(f"holdfast/{os.environ[SUPERVISED]}", server)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
