"""The action of every kind of strike and the condition it waits for, with signals and files only."""

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from job import Job, kill
from schedule import DAMAGED, DEADLOCK, FIRST_SAVE, FULL, LAST_SAVE, LOADER, TRIGGER, Strike

from holdfast.audit.verdicts import audit_run, worst

PREEMPTED = 75


@dataclass(slots=True)
class Tally:
    """The strikes of a run, those that hit the intended moment, the number that came too late, and the faults."""

    struck: list[str] = field(default_factory=list)
    in_time: list[str] = field(default_factory=list)
    missed: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)  # column, kind, what

    def strike(self, kind: str, *, in_time: bool = True) -> None:
        self.struck.append(kind)
        if in_time:
            self.in_time.append(kind)

    def fault(self, column: str, what: str, kind: str | None = None) -> None:
        self.wrong.append((column, kind or (self.struck[-1] if self.struck else "nothing yet"), what))


def deal(job: Job, strike: Strike, tally: Tally) -> None:
    """Wait for the condition of a strike, and strike."""
    ACTS[strike.kind](job, strike, tally)


def _kill(count: int | None) -> Callable[[Job, Strike, Tally], None]:
    def act(job: Job, strike: Strike, tally: Tally) -> None:
        job.await_step(strike.step)
        _strike_ranks(job, strike, tally, strike.ranks[:count])

    return act


def _kill_first(job: Job, strike: Strike, tally: Tally) -> None:
    job.await_step(strike.step)
    _strike_ranks(job, strike, tally, (0,))


def _strike_ranks(
    job: Job, strike: Strike, tally: Tally, ranks: tuple[int, ...], number: signal.Signals = signal.SIGKILL
) -> None:
    time.sleep(strike.delay)
    pids = [job.pid(rank) for rank in ranks]
    job.note_strike()
    hit = [pid for pid in pids if pid and kill(pid, number)]
    if hit:
        tally.strike(strike.kind)
    else:
        _miss(job, tally)


def _miss(job: Job, tally: Tally) -> None:
    """Count a strike that found no process, so that no restart follows."""
    tally.missed += 1
    job.note_strike(restarts=False)


def _stop(job: Job, strike: Strike, tally: Tally) -> None:
    job.await_step(strike.step)
    _strike_ranks(job, strike, tally, strike.ranks[:1], signal.SIGSTOP)


def _kill_loader(job: Job, strike: Strike, tally: Tally) -> None:
    job.await_step(strike.step)
    loaders = job.children(job.pid(strike.ranks[0]))
    job.note_strike()
    if loaders and kill(loaders[0], signal.SIGKILL):
        tally.strike(strike.kind)
    else:
        _miss(job, tally)


def _order(order: str) -> Callable[[Job, Strike, Tally], None]:
    def act(job: Job, strike: Strike, tally: Tally) -> None:
        job.await_step(strike.step)
        job.note_strike()
        file = job.control / f"{order}-{strike.ranks[0]}"
        file.touch()
        job.wait(lambda: not file.exists())  # until the worker has obeyed
        tally.strike(strike.kind)

    return act


def _kill_supervisor(job: Job, strike: Strike, tally: Tally) -> None:
    job.await_step(strike.step)
    time.sleep(strike.delay)
    job.note_strike()
    kill(job.supervisor, signal.SIGKILL)
    tally.strike(strike.kind)
    job.await_end()
    _go_on(job, tally)


def _term(everyone: bool) -> Callable[[Job, Strike, Tally], None]:
    def act(job: Job, strike: Strike, tally: Tally) -> None:
        job.await_step(strike.step)
        time.sleep(strike.delay)
        job.note_strike()
        _ask_to_stop(job, tally, strike.kind, everyone)
        _check_stopped_in_order(job, tally)
        _go_on(job, tally)

    return act


def _term_at_start(job: Job, strike: Strike, tally: Tally) -> None:
    job.await_step(strike.step)
    job.note_strike()
    _ask_to_stop(job, tally, "SIGTERM to the supervisor", everyone=False)
    _check_stopped_in_order(job, tally)
    _go_on(job, tally)
    job.await_start(set())
    time.sleep(strike.delay)
    _ask_to_stop(job, tally, strike.kind, everyone=True)
    _go_on(job, tally)


def _ask_to_stop(job: Job, tally: Tally, kind: str, everyone: bool) -> None:
    # The supervisor first, as init systems do; workers that do not get the signal hear of it from the others.
    for pid in [job.supervisor, *(set(job.members()) - {job.supervisor})] if everyone else [job.supervisor]:
        kill(pid, signal.SIGTERM)
    tally.strike(kind)
    if (status := job.await_end()) != PREEMPTED:
        tally.fault("stopped", f"asked to stop, the command ended with {status}, not {PREEMPTED}")


def _check_stopped_in_order(job: Job, tally: Tally) -> None:
    """Check that all ranks recorded a stop before the same step, and that this step is saved."""
    steps = [_last_event(job.out / "history" / f"rank-{rank}.jsonl") for rank in range(job.plan.workers)]
    if len(set(steps)) > 1 or steps[0] != ("preempted", job.newest()):
        tally.fault("stopped", f"did not stop in order: last events {steps}, newest snapshot {job.newest()}")


def _last_event(path: Path) -> tuple[str, int | None]:
    last = json.loads(path.read_bytes().splitlines()[-1])
    return last["event"], last.get("step")


def _go_on(job: Job, tally: Tally) -> None:
    """Check that no process is left and that the audit says `unknown`; then start the same command again."""
    for what in job.gone():
        tally.fault("left behind", what)
    findings = audit_run(job.out)
    if worst(findings) != "unknown":
        bad = [f"{finding.check}: {finding.because}" for finding in findings if finding.verdict == "fail"]
        tally.fault("wrong audits", f"a run that is not over is judged {worst(findings)}: {'; '.join(bad)}")
    job.start()


def _near_restart(job: Job, strike: Strike, tally: Tally) -> None:
    job.await_step(strike.step)
    old = set(job.children())
    _strike_ranks(job, _trigger(strike), tally, strike.ranks[:1])
    job.await_start(old, 1 + strike.ranks[0])
    time.sleep(strike.delay)
    fresh = sorted(set(job.children()) - old)
    job.note_strike()
    if fresh and kill(fresh[strike.ranks[1] % len(fresh)], signal.SIGKILL):
        tally.strike(strike.kind)
    else:
        _miss(job, tally)


def _during_restore(job: Job, strike: Strike, tally: Tally) -> None:
    job.await_step(strike.step)
    before, victim = job.attempt(), strike.ranks[1]
    _strike_ranks(job, _trigger(strike), tally, strike.ranks[:1])
    job.wait(lambda: job.attempt(victim) > before)
    time.sleep(strike.delay / 4)
    job.note_strike()
    pid = job.pid(victim)
    if pid and kill(pid, signal.SIGKILL):
        tally.strike(strike.kind, in_time=job.recovered(victim) < job.attempt(victim))
    else:
        _miss(job, tally)


def _trigger(strike: Strike) -> Strike:
    return Strike(kind=TRIGGER, step=strike.step, ranks=strike.ranks, delay=0.0)


def _during_save(job: Job, strike: Strike, tally: Tally) -> None:
    job.await_step(strike.step)
    job.wait(job.is_saving)
    _kill_saving(job, strike, tally)


def _first_save(job: Job, strike: Strike, tally: Tally) -> None:
    job.wait(lambda: 0 in job.saves() and job.pid(strike.ranks[0]) > 0)
    _kill_saving(job, strike, tally)


def _last_save(job: Job, strike: Strike, tally: Tally) -> None:
    job.wait(lambda: strike.step in job.saves())
    _kill_saving(job, strike, tally)


def _kill_saving(job: Job, strike: Strike, tally: Tally) -> None:
    """Kill rank 0, which saves, or another rank, in the middle of a save."""
    rank = strike.ranks[0] if strike.delay > 0.025 else 0
    time.sleep(strike.delay / 25)
    job.note_strike()
    pid = job.pid(rank)
    if pid and kill(pid, signal.SIGKILL):
        tally.strike(strike.kind, in_time=job.is_saving())
    else:
        _miss(job, tally)


def _damage(job: Job, strike: Strike, tally: Tally) -> None:
    """Damage the newest snapshot while all processes are suspended, and kill the workers before they save another."""
    job.await_step(strike.step)
    job.note_strike()
    with _suspended(job):
        folder = job.checkpoints / f"step-{job.newest():08d}"
        DAMAGES[strike.kind](folder)
        for pid in job.children():
            kill(pid, signal.SIGKILL)
        tally.strike(strike.kind)


@contextmanager
def _suspended(job: Job) -> Iterator[None]:
    everyone = [job.supervisor, *(set(job.members()) - {job.supervisor})]
    for pid in everyone:
        kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in everyone:
            kill(pid, signal.SIGCONT)


def _shard(folder: Path) -> Path:
    """Return the file of the last rank."""
    return max(folder.glob("shard-*.safetensors"))


def _cut_short(folder: Path) -> None:
    payload = _shard(folder)
    os.truncate(payload, payload.stat().st_size * 2 // 3)


def _flip(folder: Path) -> None:
    payload = _shard(folder)
    with payload.open("r+b") as file:
        file.seek(payload.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _remove(folder: Path) -> None:
    (folder / "extra.json").unlink()


def _be_a_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def _be_a_fifo(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


DAMAGES = dict(zip(DAMAGED, (_cut_short, _flip, _remove, _be_a_folder, _be_a_fifo), strict=True))


def _fill_disk(job: Job, strike: Strike, tally: Tally) -> None:
    """Fill the file system of the checkpoints for up to a second."""
    job.await_step(strike.step)
    job.note_strike(restarts=False)
    filler = job.small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    tally.strike(strike.kind)
    time.sleep(strike.delay * 20)
    filler.unlink()


def _away(job: Job, strike: Strike, tally: Tally) -> None:
    """Replace the checkpoints by a dangling link for up to a second, like a disk that is not mounted."""
    job.await_step(strike.step)
    job.note_strike(restarts=False)
    stand_in = job.checkpoints.with_name("elsewhere")
    stand_in.symlink_to("nowhere")
    _exchange(stand_in, job.checkpoints)
    try:
        tally.strike(strike.kind)
        time.sleep(strike.delay * 20)
    finally:
        _exchange(stand_in, job.checkpoints)
        stand_in.unlink()


def _exchange(one: Path, other: Path) -> None:
    """Exchange two names atomically."""
    here, exchange = -100, 2
    if ctypes.CDLL(None, use_errno=True).renameat2(here, bytes(one), here, bytes(other), exchange):
        raise OSError(ctypes.get_errno(), f"cannot exchange {one} and {other}")


ACTS: dict[str, Callable[[Job, Strike, Tally], None]] = {
    TRIGGER: _kill(1),
    "SIGKILL of two workers at once": _kill(2),
    "SIGKILL of rank 0": _kill_first,
    "SIGKILL of all workers": _kill(None),
    LOADER: _kill_loader,
    "SIGKILL of the supervisor": _kill_supervisor,
    "SIGSTOP of a worker": _stop,
    DEADLOCK: _order("deadlock"),
    "exception in a worker": _order("exception"),
    "SIGTERM to the supervisor": _term(everyone=False),
    "SIGTERM to all processes": _term(everyone=True),
    "SIGTERM to all while workers start": _term_at_start,
    "SIGKILL within 50 ms of a restart": _near_restart,
    "SIGKILL during a save": _during_save,
    "SIGKILL during a restore": _during_restore,
    **dict.fromkeys(DAMAGED, _damage),
    FULL: _fill_disk,
    "checkpoints away for a while": _away,
    FIRST_SAVE: _first_save,
    LAST_SAVE: _last_save,
}
