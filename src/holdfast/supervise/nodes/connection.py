"""A connection to the TCPStore in which the nodes of a run meet, and the messages that they exchange there.

A machine that is cut off closes no connection, and torch would wait forever for its answer. So a thread talks to the
store, and callers wait for the thread for a limited time. The thread also sends heartbeats. The thread must end before
the interpreter does: a thread that returns from torch during the interpreter's shutdown crashes the process.
"""

import ipaddress
import json
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # they are public

BEAT = 0.5
CONNECTS_WITHIN = 2.0
CUT_WITHIN = 2 * CONNECTS_WITHIN  # seconds for a thread to find its connection cut, or to give up connecting
T = TypeVar("T")


class NodeRegistration(TypedDict):
    """The message with which a node registers at the rendezvous, for the next start of the workers."""

    node: int
    of: int
    who: str  # a later supervisor of the same node has another name
    attempt: int  # the number of its next attempt, as far as it knows
    workers: int  # the number that it starts
    term: int  # the term that it was in last; 0 if it has not met other nodes yet
    where: str  # address of its own store, where the others meet if the one at the endpoint is lost
    wrong: str | None
    command: Mapping[str, Any]


class RoundResult(TypedDict):
    """The message that ends a rendezvous: the nodes that start together, and the address of the workers' store."""

    nodes: list[NodeRegistration]
    host: int  # the node that closed the round
    refused: str | None
    # If nothing is refused:
    term: NotRequired[list[Any]]
    attempt: NotRequired[int]
    round: NotRequired[str]
    address: NotRequired[str]  # of the workers' store
    port: NotRequired[int]


class Unreachable(Exception):
    """Raised if the node that hosts the rendezvous store has exited, or does not answer in time."""


class Connection(threading.Thread):
    """A thread that talks to the TCPStore at address `where` and sends heartbeats of the supervisor `who`.

    Requests time out after `patience` seconds."""

    def __init__(self, where: str, who: str, patience: float) -> None:
        super().__init__(name="holdfast-rendezvous", daemon=True)
        self.where, self.who, self._patience = where, who, patience
        self.is_silent = False  # a question was not answered for the whole patience, while this process ran
        self._work: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any], bool]] = queue.SimpleQueue()
        self.start()

    def ask(self, question: Callable[[Store], T], within: float | None = None, *, last: bool = False) -> T:
        """Call `question` with the store in the connection's thread, and return its result.

        Raise Unreachable after `within` seconds. If `last`, the thread ends after this call."""
        answer: Future[T] = Future()
        self._work.put((question, answer, last))
        limit, asked = self._patience if within is None else within, time.monotonic()
        try:
            return answer.result(limit)
        except TimeoutError as error:
            self.is_silent |= self._patience <= time.monotonic() - asked < limit + BEAT  # later: we were suspended
            raise Unreachable(f"{self.where} did not answer for {limit:g} s") from error
        except (RuntimeError, ValueError) as error:
            raise Unreachable((str(error).splitlines() or [type(error).__name__])[0]) from error

    def end(self) -> None:
        """Make the thread exit after all queued requests; return at once."""
        self._work.put((lambda _: None, Future(), True))

    def run(self) -> None:
        try:
            host, port = split_address(self.where)
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECTS_WITHIN))
        except (RuntimeError, ValueError) as error:
            self._refuse(error)
            return
        due = time.monotonic()
        while True:
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT
                try:
                    store.add(heartbeat_key(self.who), 1)
                except RuntimeError as error:  # for good: torch connects once
                    self._refuse(error)
                    return
            with suppress(queue.Empty):
                question, answer, last = self._work.get(timeout=max(0.0, due - time.monotonic()))
                try:
                    answer.set_result(question(store))
                except Exception as error:
                    answer.set_exception(error)
                if last:
                    return

    def _refuse(self, error: Exception) -> None:
        last = False
        while not last:
            _, answer, last = self._work.get()
            answer.set_exception(error)


def end_all(who: str, within: float) -> bool:
    """End all connections of the supervisor `who`, by force after `within` seconds; return True if all ended."""
    connections = [thread for thread in threading.enumerate() if isinstance(thread, Connection) and thread.who == who]
    for connection in connections:
        connection.end()
    _join(connections, within)
    deadline = time.monotonic() + CUT_WITHIN
    while (left := [thread for thread in connections if thread.is_alive()]) and time.monotonic() < deadline:
        for connection in left:
            _cut(connection.where)
        _join(left, BEAT)  # a thread that is about to connect tries again, for a while
    return not left


def _join(connections: Iterable[Connection], within: float) -> None:
    deadline = time.monotonic() + within
    for connection in connections:
        connection.join(max(0.0, deadline - time.monotonic()))


def _cut(where: str) -> None:
    """Shut down every socket of this process that is connected to the address `where`."""
    host, port = split_address(where)
    for number in (int(file.name) for file in Path("/proc/self/fd").iterdir()):
        with suppress(OSError, ValueError):  # closed by now, or not a connected socket
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as peer:
                    if peer.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    address, at = peer.getpeername()[:2]
                    if at == port and _plain(address) == _plain(host):
                        peer.shutdown(socket.SHUT_RDWR)


def _plain(address: str) -> object:
    parsed = ipaddress.ip_address(address)
    return getattr(parsed, "ipv4_mapped", None) or parsed


def heartbeat_key(who: str) -> str:
    return f"beat/{who}"


def heartbeats(store: Store, supervisors: Iterable[str]) -> dict[str, int]:
    return {who: store.add(heartbeat_key(who), 0) for who in supervisors}


def read_json(store: Store, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


def is_listening(where: str) -> bool:
    """Return True if a process accepts TCP connections at `where` (host:port); wait at most one second."""
    with suppress(OSError), socket.create_connection(split_address(where), 1.0):
        return True
    return False


def is_refused(where: str) -> bool:
    """Return True if the machine at `where` (host:port) refuses the connection, since no process listens there."""
    try:
        with socket.create_connection(split_address(where), 1.0):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def split_address(where: str) -> tuple[str, int]:
    host, _, port = where.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
