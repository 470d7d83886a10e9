"""Connections among the present members of a run, which are broken as a whole and then replaced.

Gloo ends an operation that waits for a peer when its connection breaks, and a worker that dies breaks only those to its
neighbours. So whoever learns of a loss shuts down all connections of this process, and every operation on them ends.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]  # they are public
from torch.futures import Future

from holdfast.errors import WorkerLost

ENDS_WITHIN = 10.0  # seconds that operations take to end once their connections are shut down
CONNECTS_WITHIN = timedelta(seconds=60)
LOOK = 0.0005
_FILES = Path("/proc/self/fd")


class Broken(RuntimeError):
    """An operation ended because a member was lost, or the membership has changed."""


class FailedWork(dist.Work):
    """An operation that could not begin: DDP finds out once all gradients are computed."""

    def __init__(self) -> None:
        super().__init__()
        # What a callback raises is an error for torch's own code, too; one that is set here would only be for Python's.
        never: Future[Any] = Future()
        self._future = never.then(_fail)
        never.set_result(None)

    def get_future(self) -> Future[Any]:
        return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise Broken("the membership has changed")

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return False


def _fail(_: Future[Any]) -> None:
    raise Broken("the membership has changed")


class CompletedWork(dist.Work):
    """An operation that has ended."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(tensors)

    def get_future(self) -> Future[Any]:
        return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class NoPeersLink:
    """The group of a member that has no others, or none yet: its values are the sums, and nothing is copied."""

    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> CompletedWork:
        return CompletedWork(tensors)

    def broadcast(self, tensors: list[torch.Tensor], *_: Any) -> CompletedWork:
        return CompletedWork(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *_: Any) -> CompletedWork:
        for each in outputs[0]:
            each.copy_(inputs[0])  # DDP compares what all ranks have: later, with the state, others' values come
        return CompletedWork(outputs[0])


class Link:
    """The group that collectives run on, until it is broken."""

    def __init__(self) -> None:
        self._group: Any = NoPeersLink()
        self._ports: tuple[int, frozenset[int]] = (0, frozenset())  # where we listen, and where the others do
        self.is_broken = False
        """Whether its operations end in failure until it is connected again."""

    def post(self, operation: str, *arguments: Any) -> Any:
        """Begin an operation of the group, by its name; on a broken link it is one that fails."""
        if self.is_broken:
            return FailedWork()
        try:
            return getattr(self._group, operation)(*arguments)
        except RuntimeError:
            self.hang_up()
            return FailedWork()

    def do(self, operation: str, *arguments: Any) -> None:
        """Begin an operation and wait for its end."""
        self.wait(self.post(operation, *arguments))

    def wait(self, work: Any) -> None:
        """Wait for the end of an operation that has begun."""
        try:
            work.wait()
        except RuntimeError as error:
            self.hang_up()
            raise Broken(str(error)) from error

    def hang_up(self) -> None:
        """End every operation that is under way; any thread may ask for it."""
        self.is_broken = True
        here, there = self._ports
        for number in _files():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as each:
                # Connections may come later than the group, so they are told by their ports. A socket that listens has
                # no peer, and is left alone: gloo does not forgive its loss.
                if each.family == socket.AF_INET and (each.getpeername()[1] in there or each.getsockname()[1] == here):
                    each.shutdown(socket.SHUT_RDWR)

    def connect(self, store: Callable[[], Store], rank: int, size: int, outdated: Callable[[], bool]) -> None:
        """Replace the group by one of so many members, all of which do the same now."""
        _kept.append(self._group)  # to free it is to wait for its threads
        if size == 1:
            self._group, self._ports = NoPeersLink(), (0, frozenset())
            self.is_broken = False
            return
        built = _Building(store, rank, size)
        while not built.is_over:
            if outdated():
                raise Broken("the membership has changed while its group was built")  # it ends by itself
            time.sleep(LOOK)
        self._group, self._ports = built.result()
        self.is_broken = False
        self.do("allreduce", [torch.zeros(1)])  # it is there for every member, or for none


_kept: list[Any] = []


class _Building(threading.Thread):
    """Builds a group in a thread of its own: where a member has died since, that takes long, and is left behind."""

    def __init__(self, store: Callable[[], Store], rank: int, size: int) -> None:
        super().__init__(name="holdfast-group", daemon=True)
        self._store, self._place = store, (rank, size)
        self._found: tuple[Any, tuple[int, frozenset[int]]] | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            store = self._store()
            before = _listening()
            group = ProcessGroupGloo(store, *self._place, CONNECTS_WITHIN)
            group._set_default_timeout(timedelta(days=1))  # who is stuck is the supervisor's to find
            (port,) = _listening() - before
            rank, size = self._place
            store.set(f"port/{rank}", str(port))
            others = frozenset(int(store.get(f"port/{other}")) for other in range(size) if other != rank)
            self._found = group, (port, others)
        except (RuntimeError, ValueError) as error:
            self._error = error

    @property
    def is_over(self) -> bool:
        return not self.is_alive()

    def result(self) -> tuple[Any, tuple[int, frozenset[int]]]:
        if self._found is None:
            raise Broken(str(self._error)) from self._error
        return self._found


def _listening() -> set[int]:
    """The ports on which this process listens."""
    found = set()
    for number in _files():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as each:
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and each.family == socket.AF_INET:
                found.add(each.getsockname()[1])
    return found


def _files() -> list[int]:
    """The sockets among the open files of this process."""
    found = []
    for each in _FILES.iterdir():
        with suppress(OSError):
            if str(each.readlink()).startswith("socket:"):
                found.append(int(each.name))
    return found


def ended(works: list[Any]) -> None:
    """Wait until operations on a broken link have ended: from then on their memory is ours."""
    deadline = time.monotonic() + ENDS_WITHIN
    while not all(work.is_completed() for work in works):
        if time.monotonic() > deadline:
            raise WorkerLost("operations of a lost group do not end: the run starts again from its newest snapshot")
        time.sleep(LOOK)
