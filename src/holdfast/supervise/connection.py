"""A connection to a store in which nodes meet: it keeps nobody waiting, and says again and again that we are alive.

A machine that is cut off closes no connection, and torch would wait for its answer for ever. So a thread asks, and
whoever wants to know waits for the thread, for a limited time.
"""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # they are public

BEAT = 0.5
CONNECTS_WITHIN = 2.0
Answer = TypeVar("Answer")


class Unreachable(Exception):
    """Whoever keeps the store is gone, or does not answer."""


class Connection(threading.Thread):
    """Asks the store at `host:port`, in the name of one supervisor."""

    def __init__(self, where: str, who: str, patience: float) -> None:
        super().__init__(name="holdfast-rendezvous", daemon=True)
        self.where, self._who, self._patience = where, who, patience
        self._work: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.start()

    def ask(self, what: Callable[[Store], Answer], within: float | None = None) -> Answer:
        """What the store says."""
        answer: Future[Answer] = Future()
        self._work.put((what, answer))
        limit = self._patience if within is None else within
        try:
            return answer.result(limit)
        except TimeoutError as error:
            raise Unreachable(f"{self.where} did not answer for {limit:g} s") from error
        except (RuntimeError, ValueError) as error:
            raise Unreachable((str(error).splitlines() or [type(error).__name__])[0]) from error

    def end(self) -> None:
        """Say nothing more."""
        self._work.put(None)

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
                with suppress(RuntimeError):  # whoever asks next finds out
                    store.add(beat(self._who), 1)
            with suppress(queue.Empty):
                job = self._work.get(timeout=max(0.0, due - time.monotonic()))
                if job is None:
                    return
                _do(store, *job)

    def _refuse(self, error: Exception) -> None:
        while (job := self._work.get()) is not None:
            job[1].set_exception(error)


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
