"""The kinds of strikes: what each does to a running job from outside, and how many processes it has hit."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from job import Job, kill

ONE, TWO = "SIGKILL of one", "SIGKILL of two at once"
SCALED, RAISED, SUPERVISOR = "scaled down and up", "exception in one", "SIGKILL of the supervisor"
LIVE_ONLY, RESTART_ONLY = (SCALED,), (RAISED, SUPERVISOR)


@dataclass(frozen=True)
class Strike:
    """A failure `steps` steps of the whole world and `delay` seconds after the last one; `ranks` in order of choice."""

    kind: str
    steps: int
    delay: float
    ranks: tuple[int, ...]
    then: float  # seconds to the second kill, if it has one
    newcomer: bool  # True if the second kill hits the replacement


def _kill_one(job: Job, strike: Strike) -> int:
    return _hit(job, strike.ranks)


def _kill_first(job: Job, strike: Strike) -> int:
    return _hit(job, (0,))


def _kill_two(job: Job, strike: Strike) -> int:
    return _hit(job, strike.ranks, count=2)


def _stop(job: Job, strike: Strike) -> int:
    return _hit(job, strike.ranks, signal.SIGSTOP)


def _raise(job: Job, strike: Strike) -> int:
    return _hit(job, strike.ranks, signal.SIGUSR1)


def _kill_supervisor(job: Job, strike: Strike) -> int:
    """Kill the supervisor, and start the same command again when its workers are gone."""
    kill(job.supervisor)
    job.start_again()
    return 1


def _kill_in_recovery(job: Job, strike: Strike) -> int:
    """Kill one worker, and another while the survivors regroup."""
    first = _hit(job, strike.ranks[:1])
    time.sleep(strike.then / 5)
    return first + _hit(job, strike.ranks[1:])


def _kill_at_joining(job: Job, strike: Strike) -> int:
    """Kill one worker, and after the start of its replacement the replacement or another worker."""
    old = job.children()
    first = _hit(job, strike.ranks[:1])
    job.wait(lambda: bool(job.children() - old))
    time.sleep(strike.then)
    if not strike.newcomer:
        return first + _hit(job, strike.ranks[1:])
    return first + sum(kill(pid) for pid in job.children() - old)


def _scale(job: Job, strike: Strike) -> int:
    """Put one worker to sleep for some steps, then wake it."""
    reached = job.reached()
    job.command_line("scale", job.out, "--workers", job.workers - 1)
    job.wait(lambda: any(tail.world == job.workers - 1 and tail.step > reached for tail in job.look()))
    job.command_line("scale", job.out, "--workers", job.workers)
    return 1


def _hit(job: Job, ranks: tuple[int, ...], number: signal.Signals = signal.SIGKILL, *, count: int = 1) -> int:
    """Send a signal to the first `count` of `ranks` that run; return how many got it."""
    pids = job.pids()
    return sum(kill(pids[rank], number) for rank in [rank for rank in ranks if rank in pids][:count])


KINDS: dict[str, Callable[[Job, Strike], int]] = {
    ONE: _kill_one,
    "SIGKILL of rank 0": _kill_first,
    TWO: _kill_two,
    "SIGSTOP of one": _stop,
    "SIGKILL of a second during recovery": _kill_in_recovery,
    "SIGKILL while a replacement joins": _kill_at_joining,
    RAISED: _raise,
    SUPERVISOR: _kill_supervisor,
    SCALED: _scale,
}
