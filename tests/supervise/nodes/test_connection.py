"""A connection ends on request, also where no process answers; otherwise its thread would outlast the interpreter."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is public

from holdfast.supervise.nodes.connection import Connection, Unreachable, end_all, heartbeat_key
from supervisor_process import Command, StartCommand, alive, wait_until

KEEPER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
"""

# Its thread is in a call of the store when it ends; the store's process is killed while the interpreter shuts down.
ASKER = """
import os, signal, sys, time, types
from holdfast.supervise.nodes.connection import Connection, Unreachable, end_all
where, keeper = sys.argv[1], int(sys.argv[2])

class Last:
    def __del__(self, keeper=keeper, kill=os.kill, sleep=time.sleep):
        kill(keeper, 9)
        sleep(0.5)

at = Connection(where, "asker", 1.0)
at.ask(lambda store: store.check(["a"]))
os.kill(keeper, signal.SIGSTOP)
try:
    while True:  # suspending it takes a moment
        at.ask(lambda store: store.check(["a"]))
except Unreachable:
    pass
assert end_all("asker", 0.1)  # without it: SIGABRT
sys.modules["late"] = types.ModuleType("late")
sys.modules["late"].last = Last()  # deleted when the interpreter has begun to shut down
print("the verdict", file=sys.stderr, flush=True)
sys.exit(75)
"""


@pytest.fixture
def keeper(start_command: StartCommand) -> Iterator[tuple[Command, str]]:
    """A process that keeps a store, and its address."""
    process = start_command(instead=KEEPER)
    wait_until(lambda: process.over or process.stdout.endswith("\n"), "the store")
    assert not process.over, process.stderr
    yield process, f"127.0.0.1:{int(process.stdout)}"
    if alive(process.pid):
        process.signal(signal.SIGKILL)


def threads(who: str) -> list[Connection]:
    return [thread for thread in threading.enumerate() if isinstance(thread, Connection) and thread.who == who]


def ask_for_ever(at: Connection) -> None:
    while True:
        at.ask(lambda store: store.check(["a"]))


def test_no_heartbeat_follows_the_last_question() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    at = Connection(f"127.0.0.1:{store.port}", "a", 5.0)
    count = at.ask(lambda store: store.add("count", 1), last=True)
    at.join(5.0)
    assert not at.is_alive()
    assert (count, store.add("count", 0)) == (1, 1)
    assert store.add(heartbeat_key("a"), 0) == 1
    with pytest.raises(Unreachable):
        at.ask(lambda store: store.add("count", 1), 0.1)


def test_every_question_to_a_lost_connection_raises_unreachable(keeper: tuple[Command, str]) -> None:
    process, where = keeper
    at = Connection(where, "b", 5.0)
    assert at.ask(lambda store: store.check(["a"])) is False
    process.signal(signal.SIGKILL)
    wait_until(lambda: not alive(process.pid), "the end of the process")
    for _ in range(3):
        with pytest.raises(Unreachable):
            at.ask(lambda store: store.check(["a"]))
    assert end_all("b", 5.0)


def test_a_connection_to_a_suspended_process_is_cut(keeper: tuple[Command, str]) -> None:
    process, where = keeper
    at = Connection(where, "c", 0.2)
    at.ask(lambda store: store.check(["a"]), 5.0)
    process.signal(signal.SIGSTOP)
    with pytest.raises(Unreachable, match="did not answer"):
        ask_for_ever(at)  # suspending it takes a moment
    assert end_all("c", 0.1)
    assert threads("c") == []


def test_a_connection_that_is_accepted_and_never_answered_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        Connection(f"127.0.0.1:{server.getsockname()[1]}", "d", 0.2)
        begun = time.monotonic()
        assert end_all("d", 0.1)
        assert time.monotonic() - begun < 10.0


def test_connections_of_other_supervisors_are_kept() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine, other = (Connection(f"127.0.0.1:{store.port}", who, 5.0) for who in "ef")
    assert end_all("e", 5.0)
    assert not mine.is_alive()
    assert other.ask(lambda store: store.check(["a"])) is False
    assert end_all("f", 5.0)


def test_a_process_with_an_unanswered_connection_keeps_its_exit_status(
    keeper: tuple[Command, str],
) -> None:
    process, where = keeper
    command = [sys.executable, "-c", ASKER, where, str(process.pid)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr.splitlines()[-1] == "the verdict", ended.stderr
