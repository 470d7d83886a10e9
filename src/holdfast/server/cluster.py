"""Start, check and stop Ray on this machine, or connect to a Ray cluster."""

import os
import signal
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from tempfile import gettempdir
from threading import current_thread, main_thread
from types import ModuleType
from unittest.mock import patch

from holdfast.errors import BadInput, WorkerLost
from holdfast.extras import import_extra

CONNECT_WITHIN = 10.0  # seconds for a cluster to answer
END_WITHIN = 10.0  # seconds for Ray's own processes to end
OBJECTS = 512 << 20  # bytes of memory for messages between actors
NEEDED = ("raylet", "gcs_server")  # without these processes of Ray, no actor can be started or found


class LocalRay:
    """The module `ray`, and the processes of Ray that this process has started (none if it joined a cluster)."""

    def __init__(self, ray: ModuleType) -> None:
        self.ray, node = ray, ray._private.worker._global_node
        processes = {} if node is None else node.all_processes
        self._processes: dict[str, list[Popen[bytes]]] = {
            name: [info.process for info in group] for name, group in processes.items()
        }
        self.logs = "" if node is None else node.get_logs_dir_path()

    def ended(self) -> str | None:
        """Return a message if a process of Ray that a run needs has ended, otherwise None."""
        for name in NEEDED:
            for process in self._processes.get(name, []):
                if (status := process.poll()) is not None:  # actors end themselves once the raylet is no zombie
                    how = (
                        f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                    )
                    return f"Ray's process {name} (pid {process.pid}) {how}"
        return None

    def await_end(self, seconds: float) -> None:
        """Wait up to `seconds` for each of these Ray processes to end.

        Kill a process that does not end, and its children."""
        for process in [process for group in self._processes.values() for process in group]:
            try:
                process.wait(seconds)
            except TimeoutExpired:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                process.kill()
                process.wait(END_WITHIN)
                for child in children:
                    with suppress(ProcessLookupError):
                        os.kill(int(child), signal.SIGKILL)


@contextmanager
def cluster(address: str | None = None) -> Iterator[LocalRay]:
    """Connect to the Ray cluster at `address`, or start Ray on this machine; stop it on exit if it was started here."""
    ray = _ray()
    if address is not None:
        require_answer(address)
    if ray.is_initialized():
        yield LocalRay(ray)
        return
    try:
        with _uninterrupted(ray), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray does not wait for the processes that it starts
            _start(ray, address)
        yield LocalRay(ray)
    finally:
        started = LocalRay(ray)
        is_complete = started.ended() is None
        ray.shutdown()
        # Ray has asked its processes to end, and does not wait; without one of them, others might never end.
        started.await_end(END_WITHIN if is_complete else 1.0)


def _start(ray: ModuleType, address: str | None) -> None:
    embedded = {"include_dashboard": False, "num_cpus": os.cpu_count(), "object_store_memory": OBJECTS}
    try:
        options = {} if address is not None else embedded
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:  # Ray raises no narrower one
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise WorkerLost(
            f"Ray did not start: {why} If the machine is busy, repeat the same command, with the same --out. Ray's logs in "
            f"{_newest_logs()} may say why."
        ) from error


def _newest_logs() -> Path:
    """Return the folder in which Ray writes the logs of its newest start on this machine."""
    return Path(os.environ.get("RAY_TMPDIR") or gettempdir()) / "ray" / "session_latest" / "logs"


@contextmanager
def _uninterrupted(ray: ModuleType) -> Iterator[None]:
    """Delay SIGINT and SIGTERM while Ray starts, because an interrupted start would leave processes behind.

    Afterwards SIGTERM ends this process as Ctrl-C does; Ray's own handler would print a stack trace."""
    if current_thread() is not main_thread():  # signals can only be handled in the main thread
        yield
        return
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        with patch.object(ray._private.utils, "set_sigterm_handler", lambda _: None):
            yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signals:
        raise KeyboardInterrupt


def _ray() -> ModuleType:
    # Before its import: Ray would print every death to our output, and lower the priority of its processes.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return import_extra("ray", "ray", "The parameter server needs Ray")


GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # of HTTP/2, which Ray speaks
SETTINGS_FRAME = 4  # with which its other side answers


def require_answer(address: str) -> None:
    """Raise BadInput if no Ray cluster answers at `address`; without this check, Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    hint = "Give HOST:PORT as `ray start` prints it."
    try:
        with socket.create_connection((host, int(port)), CONNECT_WITHIN) as connection:
            connection.sendall(GREETING)
            answer = connection.recv(9)
    except (OSError, ValueError, OverflowError) as error:
        raise BadInput(f"there is no Ray cluster at {address}: {error}. {hint}") from None
    if len(answer) < 4 or answer[3] != SETTINGS_FRAME:
        raise BadInput(f"there is no Ray cluster at {address}: the server there is not Ray. {hint}")
