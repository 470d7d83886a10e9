"""Gloo connections among the workers of a run, which are all shut down and rebuilt when a worker is lost.

Gloo ends an operation that waits for a peer when the connection to that peer breaks. But a worker that dies breaks only
the connections to its neighbours. So a worker that learns of a loss shuts down all its connections, which ends every
operation on them.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]  # they are public
from torch.futures import Future

from holdfast.errors import WorkerLost

END_SECONDS = 10.0  # operations end within this time once their connections are shut down
FREE_SECONDS = 2.0  # the threads of a group are idle this long after its operations have ended
CONNECT_TIMEOUT = timedelta(seconds=60)
POLL_SECONDS = 0.0005


class GroupBroken(RuntimeError):
    """Raised when an operation fails because a worker was lost or the set of workers has changed."""


class CompletedWork(dist.Work):
    """A torch.distributed `Work` that has already completed successfully."""

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


class FailedWork(CompletedWork):
    """A `Work` for an operation that could not start. DDP notices the failure once all gradients are computed."""

    def __init__(self) -> None:
        super().__init__([])
        # torch's C++ code sees an error that a callback raises; an error set on the future only Python would see.
        self._future = self._future.then(_raise_broken)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return _raise_broken()

    def is_success(self) -> bool:
        return False


def _raise_broken(_: object = None) -> NoReturn:
    raise GroupBroken("the membership has changed")


class NoPeersLink:
    """A process group of one worker: every collective returns the worker's own values."""

    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> CompletedWork:
        return CompletedWork(tensors)

    broadcast = allreduce

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *_: Any) -> CompletedWork:
        for output in outputs[0]:
            output.copy_(inputs[0])  # DDP compares the ranks' values; those of others come later, with the state
        return CompletedWork(outputs[0])


class Link:
    """A connection to the other workers, on which collectives run.

    `hang_up` breaks the connection, and `connect` builds a new one."""

    def __init__(self) -> None:
        self._group: Any = NoPeersLink()
        self._ports: tuple[int, frozenset[int]] = (0, frozenset())  # this worker's listening port, and its peers'
        self._parts: list[Link] = []
        self.is_broken = False
        """True after a failure or `hang_up`, until `connect` succeeds; meanwhile every operation fails."""

    def part(self) -> "Link":
        """Return a link for some of the workers, which breaks whenever this link breaks, and is connected on its own."""
        self._parts.append(Link())
        return self._parts[-1]

    def post(self, operation: str, *arguments: Any) -> Any:
        """Start the collective named `operation` and return its `Work`. If the link is broken, the `Work` fails."""
        if self.is_broken:
            return FailedWork()
        try:
            return getattr(self._group, operation)(*arguments)
        except RuntimeError:
            self.hang_up()
            return FailedWork()

    def do(self, operation: str, *arguments: Any) -> None:
        """Start the collective named `operation` and wait until it has completed."""
        self.wait(self.post(operation, *arguments))

    def wait(self, work: Any) -> None:
        """Wait until `work` has completed; raise GroupBroken if it fails."""
        try:
            work.wait()
        except RuntimeError as error:
            self.hang_up()
            raise GroupBroken(str(error)) from error

    def hang_up(self) -> None:
        """Shut down all connections to peers, so that every operation under way fails. Any thread may call this."""
        self.is_broken = True
        for part in self._parts:
            part.hang_up()
        own_port, peer_ports = self._ports
        for connection in _sockets():
            # Connections may open later than the group, so they are recognised by port. A listening socket has no
            # peer name and is left alone, because gloo does not survive its loss.
            with suppress(OSError):
                if connection.getpeername()[1] in peer_ports or connection.getsockname()[1] == own_port:
                    connection.shutdown(socket.SHUT_RDWR)

    def connect(self, store: Callable[[], Store], rank: int, size: int, outdated: Callable[[], bool]) -> None:
        """Build a new process group of `size` workers, in which this process has `rank`. All these workers must call this.

        `store` opens a connection to the store through which the workers find each other. Raise GroupBroken as soon as
        `outdated` returns True."""
        _free_later(self._group)
        if size == 1:
            self._group, self._ports = NoPeersLink(), (0, frozenset())
            self.is_broken = False
            return
        builder = _GroupBuilder(store, rank, size)
        while builder.is_alive():
            if outdated():
                raise GroupBroken("the membership has changed while its group was built")  # the builder ends by itself
            time.sleep(POLL_SECONDS)
        if builder.ports is None:
            raise GroupBroken(str(builder.error)) from builder.error
        self._group, self._ports = builder.group, builder.ports
        self.is_broken = False
        self.do("allreduce", [torch.zeros(1)])  # the group exists for every member, or for none


def _free_later(group: Any) -> None:
    """Free the threads and files of a broken process group after `FREE_SECONDS`, when its operations have ended.

    Freeing a group earlier could deadlock: it joins threads that may need the GIL, which the caller holds."""
    timer = threading.Timer(FREE_SECONDS, list.clear, [[group]])
    timer.daemon = True
    timer.start()


class _GroupBuilder(threading.Thread):
    """A thread that builds a gloo process group. If a worker dies meanwhile, the caller abandons the thread."""

    def __init__(self, store: Callable[[], Store], rank: int, size: int) -> None:
        super().__init__(name="holdfast-group", daemon=True)
        self._store, self._rank, self._size = store, rank, size
        self.group: Any = None
        self.ports: tuple[int, frozenset[int]] | None = None  # None until the group is built
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            store = self._store()
            before = _listening_ports()
            self.group = ProcessGroupGloo(store, self._rank, self._size, CONNECT_TIMEOUT)
            self.group._set_default_timeout(timedelta(days=1))  # the supervisor detects hangs
            (port,) = _listening_ports() - before
            store.set(f"port/{self._rank}", str(port))
            peers = frozenset(int(store.get(f"port/{peer}")) for peer in range(self._size) if peer != self._rank)
            self.ports = (port, peers)
        except (RuntimeError, ValueError) as error:
            self.error = error


def _listening_ports() -> set[int]:
    listens = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return {handle.getsockname()[1] for handle in _sockets() if handle.getsockopt(*listens)}


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each IPv4 socket of this process, and close the duplicate afterwards."""
    for file in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if str(file.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(file.name))) as handle:
                    if handle.family == socket.AF_INET:
                        yield handle


def wait_until_ended(works: list[Any]) -> None:
    """Wait until all `works` of a broken link have ended. After that, their tensors can be used again."""
    deadline = time.monotonic() + END_SECONDS
    while not all(work.is_completed() for work in works):
        if time.monotonic() > deadline:
            raise WorkerLost("operations of a lost group do not end: the run restarts from its newest snapshot.")
        time.sleep(POLL_SECONDS)
