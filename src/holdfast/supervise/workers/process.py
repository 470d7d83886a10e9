"""One worker process as its supervisor sees it, from its fork until all processes that it started are gone.

Also functions that read the state, exit status and CPU time of a process from /proc.
"""

import multiprocessing
import os
import re
import resource
import signal
import time
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

from holdfast.process import IN_ORDER
from holdfast.progress import Phase
from holdfast.supervise.error_record import read_error
from holdfast.supervise.failure_cause import WorkerExit
from holdfast.supervise.hang_detection import WorkerLook
from holdfast.supervise.workers import entry
from holdfast.supervise.workers.entry import Task

_PROC = Path("/proc")
_EXIT = 49  # index of the exit status in /proc/PID/stat, counted from the state
UP_WITHIN = 1.0  # seconds for a fork to begin: it takes a thousandth, and more only on an overloaded machine
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
STACK_TITLE = b"(most recent call first)"  # printed by faulthandler
STACK_WITHIN, STACK_BYTES = 0.2, 1 << 16
NO_CORE = 1  # bytes: where a program receives core dumps, the kernel takes 0 for no limit


class WorkerProcess:
    """A worker process with the unique number `seat`. Its `rank` equals `seat` until it replaces a lost worker."""

    def __init__(self, task: Task, *, seat: int, rank: int, local_rank: int) -> None:
        self.task, self.seat, self.rank, self.local_rank = task, seat, rank, local_rank
        self.hung = ""  # the reason why the worker counts as hung, or an empty text
        self.exit: int | None = None  # the exit status, or minus the signal that killed it; None while it runs
        self._log_size: int | None = None  # of the stderr log, before the worker was told to print its stacks
        self._process = self._fork()
        self.pid = int(self._process.pid or 0)

    def _fork(self) -> ForkProcess:
        # Scripts and libraries look for this name when they ask whether they are the main process.
        process = multiprocessing.get_context("fork").Process(target=entry.main, args=(self.task,), name="MainProcess")
        process.start()
        with suppress(OSError):  # the child does the same: the first one wins
            os.setpgid(int(process.pid or 0), int(process.pid or 0))
        return process

    def wait_until_up(self) -> None:
        """Wait until the process runs. If it hangs, because a lock was held during the fork, fork it again."""
        for _ in range(3):
            deadline = time.monotonic() + UP_WITHIN
            while not self.task.progress.is_up and self._process.is_alive() and time.monotonic() < deadline:
                time.sleep(0.0005)
            if self.task.progress.is_up or not self._process.is_alive():
                return
            self._process.kill()
            self._process.join()
            self._process = self._fork()
            self.pid = int(self._process.pid or 0)

    def poll(self) -> None:
        # Not by the process's sentinel: that is a pipe, which every child of the worker keeps open.
        if self.exit is None and self._has_exited():
            self._set_exit(self._process.exitcode)

    def poll_dying(self) -> None:
        """Set `exit` if the process has exited, or was killed but is not yet removed entirely by the kernel."""
        self.poll()
        if self.exit is None and (status := dying_status(self.pid)) is not None and status not in IN_ORDER:
            self._kill_group()
            self._set_exit(status)

    def _has_exited(self) -> bool:
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # multiprocessing collects dead children when it starts another
            return True
        in_order = ended and ended.si_code == os.CLD_EXITED and ended.si_status in IN_ORDER
        if ended and (not in_order or self.task.progress.is_in_its_loop):
            self._kill_group()  # before the process is collected: until then no other one can have its number
        return ended is not None

    def _set_exit(self, status: int | None) -> None:
        progress = self.task.progress
        self.exit = progress.status if progress.phase is Phase.ENDED and progress.status is not None else status

    @property
    def is_gone(self) -> bool:
        """True if the kernel has removed the process entirely, so that its CPU and GPU memory is free."""
        return self.exit is not None and self._process.exitcode is not None

    @property
    def membership(self) -> int | None:
        """The number of the membership (group of workers that train) that this worker is in; None if it waits to join."""
        return number if (number := self.task.progress.membership) >= 0 else None

    @property
    def is_in_reserve(self) -> bool:
        """True if the worker does not train yet: it is starting, or waits to join the workers that train."""
        return self.membership is None

    @property
    def is_ready(self) -> bool:
        """True if the worker has started, has a rank, and waits to join the workers that train."""
        return self.task.progress.phase is Phase.JOINING and not self.task.progress.asks_for_rank

    @property
    def is_starting(self) -> bool:
        """True if the worker will join the workers that train, but its script is not ready yet."""
        return self.is_in_reserve and self.task.progress.phase is not Phase.JOINING

    @property
    def has_failed(self) -> bool:
        """True if the worker exited with an error, left its training loop early, or hangs."""
        return bool(self.hung) or (self.exit is not None and self.exit not in IN_ORDER) or self.left_midway

    @property
    def left_midway(self) -> bool:
        """True if the worker exited with status 0 although its training loop had not ended."""
        return self.exit == 0 and self.task.progress.is_in_its_loop

    @property
    def can_lose_peers(self) -> bool:
        """True if the worker is in its training loop, where it can survive the loss of a peer."""
        return self.exit is None and self.task.progress.phase in (Phase.TRAINING, Phase.SAVING, Phase.RECOVERING)

    @property
    def has_finished(self) -> bool:
        """True if the worker has nothing left to train, or has exited."""
        return self.task.progress.phase in (Phase.CLOSING, Phase.DONE, Phase.ENDED) or self.exit is not None

    def look(self, is_member: bool, *, has_done_peers: bool = False) -> WorkerLook:
        """Return the worker's progress.

        `is_member` is True if this worker trains, and `has_done_peers` if another worker has finished."""
        progress, fields = self.task.progress, _stat_fields(_PROC / str(self.pid))
        state = fields[0] if fields else ""  # of the first thread
        return WorkerLook(
            seat=self.seat,
            boundaries=progress.boundaries,
            posted=progress.posted,
            moved=progress.moved,
            evaluated=progress.evaluated,
            phase=progress.phase,
            stopped=state in ("T", "t"),  # suspended, or traced
            asleep=state == "S",
            is_member=is_member or not self.is_in_reserve,
            has_done_peers=has_done_peers,
        )

    def send_signal(self, number: int) -> None:
        self.poll()
        if self.exit is None:
            os.kill(self.pid, number)

    def stack(self) -> str:
        """Return the stack of the worker's main thread, innermost call first; empty if the worker does not answer."""
        file, deadline = self.task.stack, time.monotonic() + STACK_WITHIN
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)  # all workers share the file and its position
        self.send_signal(entry.SHOW_STACK)
        while not (text := os.pread(file, STACK_BYTES, 0)).endswith(b"\n") and time.monotonic() < deadline:
            time.sleep(0.002)
        return text.decode(errors="replace")

    def abort(self) -> None:
        """Make the worker print the stacks of its threads and exit, by SIGABRT."""
        self.poll()
        if self.exit is None:
            with suppress(OSError):  # a log may be missing
                self._log_size = self.task.stderr.stat().st_size
            with suppress(OSError):  # it may have ended meanwhile
                resource.prlimit(self.pid, resource.RLIMIT_CORE, (NO_CORE, NO_CORE))
                os.kill(self.pid, signal.SIGABRT)
                os.kill(self.pid, signal.SIGCONT)

    @property
    def has_printed_stacks(self) -> bool:
        """True if `abort` was called, and the stacks of the worker's threads are in its stderr log."""
        with suppress(OSError):
            if self._log_size is not None:
                with self.task.stderr.open("rb") as log:
                    log.seek(self._log_size)
                    return STACK_TITLE in log.read()
        return False

    def kill(self) -> None:
        self.poll()
        if self.exit is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def append_error_to_log(self) -> None:
        """Append the exception that the worker raised to its stderr log; disk errors are ignored."""
        raised = read_error(self.task.error, self.task.progress)
        if raised and (raised.traceback or raised.message):
            with suppress(OSError), self.task.stderr.open("a") as log:
                log.write(f"{raised.traceback or raised.message}".rstrip() + "\n")

    def exit_report(self, idle: float, out: Path) -> WorkerExit:
        """Return a report of how the worker exited, or that it still runs without progress for `idle` seconds.

        The path of the worker's log in the report is relative to `out`."""
        progress = self.task.progress
        return WorkerExit(
            rank=self.rank,
            local_rank=self.local_rank,
            exit=self.exit,
            midway=self.left_midway,
            hung=self.hung,
            raised=read_error(self.task.error, progress),
            step=progress.step,
            place=(progress.boundaries, progress.posted),
            idle=idle,
            log=str(self.task.stderr.relative_to(out)) if self.has_printed_stacks else "",
            pid=self.pid,
        )


def innermost_call(stack: str, script: str) -> str:
    """Return, as text, the innermost line of `script` in `stack` (printed by faulthandler), and the call in progress."""
    frames = [(path, f"{Path(path).name}:{line}", name) for path, line, name in _FRAME.findall(stack)]
    if not frames:
        return ""
    own = next((frame for frame in frames if frame[0] == script), None)
    call = f"{frames[0][2]} in {frames[0][1]}"
    if own is None:
        return f" ({call})"
    return f" ({own[1]})" if own == frames[0] else f" ({own[1]}, which called {call})"


def dying_status(pid: int) -> int | None:
    """Return the exit status of a killed process that still has threads; otherwise None.

    `waitpid` does not report such a process until all its threads are gone, which takes 0.2 s with a GPU."""
    fields = _stat_fields(_PROC / str(pid))
    if len(fields) <= _EXIT or fields[0] != "Z" or not (status := int(fields[_EXIT])):
        return None  # the kernel writes 0 if we may not see the status
    return os.waitstatus_to_exitcode(status)


def cpu_seconds(group: int) -> float | None:
    """Return the CPU seconds that a process group has used, or has waited for on a busy machine; None without /proc."""
    if not _PROC.exists():
        return None
    seconds = 0.0
    for folder in _PROC.iterdir():
        fields = _stat_fields(folder) if folder.name.isdigit() else []
        if fields and fields[2] == str(group):
            seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            with suppress(OSError, IndexError, ValueError):  # it has gone, or the kernel does not say
                seconds += int((folder / "schedstat").read_text().split()[1]) / 1e9
    return seconds


def _stat_fields(folder: Path) -> list[str]:
    with suppress(OSError):
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
