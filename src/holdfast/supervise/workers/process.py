"""One worker process, from its fork to the end of everything it started, as its supervisor sees it.

What the kernel says of a worker: what it is doing, and how much of the processor it and its children have used.
"""

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

from torch.distributed.elastic.agent.server.api import Worker

from holdfast.process import IN_ORDER
from holdfast.progress import Phase
from holdfast.supervise import error_file, hang_detection
from holdfast.supervise.failure_cause import WorkerExit
from holdfast.supervise.workers import entry
from holdfast.supervise.workers import members as roll
from holdfast.supervise.workers.entry import Task

_PROC = Path("/proc")
_EXIT = 49  # which field is the exit status, from the state on


def state(pid: int) -> str:
    """One letter for its first thread: R it runs or could, S it sleeps, D it waits for a disk, T or t it is stopped."""
    fields = _fields(_PROC / str(pid))
    return fields[0] if fields else ""


def leaving(pid: int) -> int | None:
    """The exit status, as waitid gives it, of a process whose first thread has gone and whose other threads go; else nothing.

    Nobody can wait for such a process yet: it takes 0.2 s to give back a GPU. Nothing, too, if the kernel does not say.
    """
    fields = _fields(_PROC / str(pid))
    if len(fields) <= _EXIT or fields[0] != "Z" or not (status := int(fields[_EXIT])):
        return None  # 0 is what the kernel says where it would rather not
    return os.waitstatus_to_exitcode(status)


def processor_seconds(group: int) -> float | None:
    """What all processes of a group have used of the processor, or waited for it; nothing where the kernel does not say."""
    if not _PROC.exists():
        return None
    members = [(folder, fields) for folder, fields in _all() if fields[2] == str(group)]
    ticks = sum(sum(map(int, fields[11:15])) for _, fields in members)
    return float(ticks / os.sysconf("SC_CLK_TCK")) + sum(_waited(folder) for folder, _ in members)


def _waited(folder: Path) -> float:
    """For how long its first thread was ready to run while others did: on a busy machine a worker is slow, not stuck.

    Only the first: on such a machine threads that merely look now and then wait for most of the time.
    """
    with suppress(OSError, IndexError, ValueError):  # it has gone, or the kernel does not say
        return int((folder / "schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _all() -> Iterator[tuple[Path, list[str]]]:
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and (fields := _fields(folder)):
            yield folder, fields


def _fields(folder: Path) -> list[str]:
    """The fields of a process from its state on; none if it has gone."""
    with suppress(OSError):
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


UP_WITHIN = 1.0  # seconds for a fork to begin: it takes a thousandth, and more only where a machine is starved
FORKS = 3
LOOK = 0.0005
NO_CORE = 1  # bytes: the kernel takes 0 for no limit where a program receives core dumps


class Running:
    """A worker process; its seat is its own, and its rank may be another one's before it and after it."""

    def __init__(self, member: Worker, task: Task, seat: int) -> None:
        self.worker, self.task, self.seat, self.hung = member, task, seat, ""
        self.rank: int = member.global_rank
        self.exit: int | None = None
        """Its exit status when it was last looked at, minus the signal that killed it; nothing if it ran."""
        self._process = self._forked()
        self.pid = int(self._process.pid or 0)

    def _forked(self) -> ForkProcess:
        # The name is what scripts and libraries look for when they ask whether they are the main process.
        process = multiprocessing.get_context("fork").Process(target=entry.main, args=(self.task,), name="MainProcess")
        process.start()
        with suppress(OSError):  # it does the same: whichever comes first
            os.setpgid(int(process.pid or 0), int(process.pid or 0))
        return process

    def come_up(self) -> None:
        """Wait until it has begun; a fork that took a lock along which another thread held waits for ever, and is forked again."""
        for _ in range(FORKS):
            deadline = time.monotonic() + UP_WITHIN
            while not self.task.progress.is_up and self._process.is_alive() and time.monotonic() < deadline:
                time.sleep(LOOK)
            if self.task.progress.is_up or not self._process.is_alive():
                return
            self._process.kill()
            self._process.join()
            self._process = self._forked()
            self.pid = int(self._process.pid or 0)

    def look(self) -> None:
        """Find out whether it has ended. Between two looks nothing changes: workers that die at once are seen so."""
        # Not by its sentinel: that is a pipe, and everything the worker has forked keeps it open.
        if self.exit is None and self._has_ended():
            self._end(self._process.exitcode)

    def look_closer(self) -> None:
        """Find out whether it was killed, even if some of its threads have yet to go."""
        self.look()
        if self.exit is None and (status := leaving(self.pid)) is not None and status not in IN_ORDER:
            self._kill_group()
            self._end(status)

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left: its memory and its share of a GPU are free."""
        return self.exit is not None and self._process.exitcode is not None

    def _end(self, status: int | None) -> None:
        """A worker whose script had ended has done what it was to do: what meets it on the way out changes nothing."""
        told = self.task.progress
        self.exit = told.status if told.phase is Phase.ENDED and told.status is not None else status

    @property
    def membership(self) -> int | None:
        """The membership that it is in; none while it is in reserve."""
        return found if (found := self.task.progress.membership) >= 0 else None

    @property
    def joins(self) -> bool:
        """Whether it is in reserve: it comes up, or waits to be let in."""
        return self.membership is None

    @property
    def is_ready(self) -> bool:
        """Whether it can be let in."""
        return self.task.progress.phase is Phase.JOINING

    @property
    def has_fallen(self) -> bool:
        """Whether it has failed: it ended out of order, or is stuck."""
        return bool(self.hung) or (self.exit is not None and self.exit not in IN_ORDER) or self.left_midway

    @property
    def left_midway(self) -> bool:
        """Whether it ended as if all were well, and the run had not ended for it."""
        return self.exit == 0 and self.task.progress.is_in_its_loop

    @property
    def goes_on(self) -> bool:
        """Whether it is where the loss of a peer can be survived: in its loop, not before and not after it."""
        return self.exit is None and self.task.progress.phase in (Phase.TRAINING, Phase.SAVING, Phase.RECOVERING)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to train for it."""
        return self.task.progress.phase in (Phase.CLOSING, Phase.DONE, Phase.ENDED) or self.exit is not None

    def _has_ended(self) -> bool:
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # multiprocessing collects the dead when it starts another
            return True
        in_order = ended and ended.si_code == os.CLD_EXITED and ended.si_status in IN_ORDER
        if ended and (not in_order or self.task.progress.is_in_its_loop):
            self._kill_group()  # before we collect it: until then no other process can have its number
        return ended is not None

    def present(self) -> roll.WorkerStatus:
        """Whether it is a member."""
        return roll.WorkerStatus(seat=self.seat, is_ready=self.is_ready, membership=self.membership)

    def seen(self, is_member: bool) -> hang_detection.WorkerLook:
        """How far it is; a member is one that was told so, whether or not it has joined the others yet."""
        told, doing = self.task.progress, state(self.pid)
        return hang_detection.WorkerLook(
            seat=self.seat,
            boundaries=told.boundaries,
            posted=told.posted,
            moved=told.moved,
            evaluated=told.evaluated,
            phase=told.phase,
            stopped=doing in ("T", "t"),
            asleep=doing == "S",
            is_member=is_member or not self.joins,
        )

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        self.look()
        if self.exit is None:
            os.kill(self.pid, number)

    def abort(self) -> None:
        """Let it print the stacks of its threads, if it runs, which is the end of it."""
        self.look()
        if self.exit is None:
            with suppress(OSError):  # gone meanwhile
                resource.prlimit(self.pid, resource.RLIMIT_CORE, (NO_CORE, NO_CORE))
                os.kill(self.pid, signal.SIGABRT)
                os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the worker, if it runs, and all that it started."""
        self.look()
        if self.exit is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def keep_last_words(self) -> None:
        """Append what it raised to its log; a disk that refuses is no matter."""
        raised = error_file.read(self.task.error, self.task.progress)
        if raised and (raised.traceback or raised.message):
            with suppress(OSError), self.task.stderr.open("a") as log:
                log.write(f"{raised.traceback or raised.message}".rstrip() + "\n")

    def death(self, idle: float, out: Path) -> WorkerExit:
        """How it ended, or that it has not, for how long it had come no further."""
        told = self.task.progress
        return WorkerExit(
            rank=self.rank,
            local_rank=self.worker.local_rank,
            exit=self.exit,
            midway=self.left_midway,
            hung=self.hung,
            raised=error_file.read(self.task.error, told),
            step=told.step,
            place=(told.boundaries, told.posted),
            idle=idle,
            log=str(self.task.stderr.relative_to(out)),
        )
