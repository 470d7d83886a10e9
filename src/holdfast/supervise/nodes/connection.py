"""A connection to a store in which nodes meet: it keeps nobody waiting, and says again and again that we are alive.

A machine that is cut off closes no connection, and torch would wait for its answer for ever. So a thread asks, and
whoever wants to know waits for the thread, for a limited time. No such thread may outlast the interpreter: one that
comes back from torch into a Python that shuts down takes the process with it, and its exit status.

What nodes say when they meet: each greets, and the node that keeps the store answers with who starts. Plain JSON.
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


class Greeting(TypedDict):
    """What a node says when it has come for the next start."""

    node: int
    of: int  # how many nodes there are, as its user said
    who: str  # a name that this supervisor alone has: one that was started anew for the same node has another
    attempt: int  # the number that it would give the next attempt
    workers: int  # how many it starts
    term: int  # the term that it was in last; 0 if it has met nobody yet
    where: str  # it keeps a store of its own there, in which the others meet if the one at the endpoint is lost
    wrong: str | None  # why it cannot use the checkpoints
    command: Mapping[str, Any]  # what must be the same on all nodes


class Answer(TypedDict):
    """What closes a round: those that start, and with what; or why they cannot start together."""

    nodes: list[Greeting]
    host: int  # the node that says so
    refused: str | None
    # If nothing is refused:
    term: NotRequired[list[Any]]
    round: NotRequired[str]
    address: NotRequired[str]  # of the workers' store
    port: NotRequired[int]


BEAT = 0.5
CONNECTS_WITHIN = 2.0
CUT_WITHIN = 2 * CONNECTS_WITHIN  # seconds for a thread to find its connection cut, or to end its attempt to connect
T = TypeVar("T")


class Unreachable(Exception):
    """Whoever keeps the store is gone, or does not answer."""


class Connection(threading.Thread):
    """Asks the store at `host:port`, in the name of one supervisor."""

    def __init__(self, where: str, who: str, patience: float) -> None:
        super().__init__(name="holdfast-rendezvous", daemon=True)
        self.where, self.who, self._patience = where, who, patience
        self._work: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any], bool]] = queue.SimpleQueue()
        self.start()

    def ask(self, what: Callable[[Store], T], within: float | None = None, *, last: bool = False) -> T:
        """What the store says; after a `last` question nothing more is said to it, not even that we are alive."""
        answer: Future[T] = Future()
        self._work.put((what, answer, last))
        limit = self._patience if within is None else within
        try:
            return answer.result(limit)
        except TimeoutError as error:
            raise Unreachable(f"{self.where} did not answer for {limit:g} s") from error
        except (RuntimeError, ValueError) as error:
            raise Unreachable((str(error).splitlines() or [type(error).__name__])[0]) from error

    def end(self) -> None:
        """Say nothing more."""
        self._work.put((lambda _: None, Future(), True))

    def run(self) -> None:
        try:
            host, port = split(self.where)
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECTS_WITHIN))
        except (RuntimeError, ValueError) as error:
            self._refuse(error)
            return
        due = time.monotonic()
        while True:
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT
                try:
                    store.add(beat(self.who), 1)
                except RuntimeError as error:  # for good: torch connects once
                    self._refuse(error)
                    return
            with suppress(queue.Empty):
                what, answer, last = self._work.get(timeout=max(0.0, due - time.monotonic()))
                _do(store, what, answer)
                if last:
                    return

    def _refuse(self, error: Exception) -> None:
        """Whoever asks finds out."""
        last = False
        while not last:
            _, answer, last = self._work.get()
            answer.set_exception(error)


def end_all(who: str, within: float) -> bool:
    """End every connection of a supervisor; one that has no answer in so many seconds is cut. Whether all have ended."""
    several = [each for each in threading.enumerate() if isinstance(each, Connection) and each.who == who]
    for each in several:
        each.end()
    _join(several, within)
    deadline = time.monotonic() + CUT_WITHIN
    while (left := [each for each in several if each.is_alive()]) and time.monotonic() < deadline:
        for each in left:
            _cut(each.where)
        _join(left, BEAT)  # one that is about to connect tries again, for a while
    return not left


def _join(several: Iterable[Connection], within: float) -> None:
    deadline = time.monotonic() + within
    for each in several:
        each.join(max(0.0, deadline - time.monotonic()))


def _cut(where: str) -> None:
    """Shut down every socket of this process that is connected to there: torch does not let go of its own."""
    for number in (int(each.name) for each in Path("/proc/self/fd").iterdir()):
        with suppress(OSError, ValueError):  # it is closed by now, or is no socket that is connected
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and _is_at(found.getpeername(), where):
                        found.shutdown(socket.SHUT_RDWR)


def _is_at(peer: Any, where: str) -> bool:
    host, port = split(where)
    return peer[1] == port and _plain(peer[0]) == _plain(host)


def _plain(address: str) -> object:
    """An address of version 4 may be written as one of version 6."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def _do(store: Store, what: Callable[[Store], Any], answer: Future[Any]) -> None:
    try:
        answer.set_result(what(store))
    except Exception as error:
        answer.set_exception(error)


def beat(who: str) -> str:
    """Where a supervisor counts up for as long as it lives."""
    return f"beat/{who}"


def beats(store: Store, several: Iterable[str]) -> dict[str, int]:
    """How far each of these supervisors has counted."""
    return {who: store.add(beat(who), 0) for who in several}


def said(store: Store, key: str) -> Any:
    """What somebody has written there, as JSON; nothing if nobody has."""
    return json.loads(store.get(key)) if store.check([key]) else None


def listens(where: str) -> bool:
    """Whether somebody accepts connections there: to find out takes less than to wait for a store."""
    with suppress(OSError), socket.create_connection(split(where), 1.0):
        return True
    return False


def refuses(where: str) -> bool:
    """Whether nobody listens there for certain: the machine answers, and says so."""
    try:
        with socket.create_connection(split(where), 1.0):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def split(where: str) -> tuple[str, int]:
    """A `host:port` in its parts."""
    host, _, port = where.rpartition(":")
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """The inverse."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
