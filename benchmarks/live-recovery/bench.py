"""Measure the time from the loss of a worker to the next committed step. Run: python benchmarks/live-recovery/bench.py

With --sharded, the model is sharded with FSDP2 on 4 ranks, under `replay`, `restart`, and torchrun with DCP.

Runs under `forward`, `replay`, `skip`, `restart` and torchrun take turns. In each, a random worker is killed by SIGKILL
from outside (or suspended, or deadlocked) at a random moment, again and again, each time after all workers are back and
have trained some steps. The time ends when all remaining workers have finished the next step that counts.
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from job import COMMAND, Ended, Hung, Job, kill
from judging import of_kind

HERE = Path(__file__).resolve().parent
ARMS = ("forward", "replay", "skip", "restart", "torchrun")
LIVE = ("forward", "replay", "skip")
SHARDED_ARMS = ("replay", "restart", "torchrun")
SOON = 0.3  # seconds: the next strike comes at a random moment within them, or within a step if that is longer
HANG_MOST = 3.0
MOST = {  # seconds: median and worst after a kill, on CPUs
    "forward": (0.2, 0.5),
    "skip": (0.2, 0.5),
    "replay": (0.6, 0.6),
}
GPU_MOST = {"forward": 0.5}
SHARDED_MOST = 0.6  # median under replay, on CPUs


@dataclass(frozen=True)
class Note:
    """A step that a process has finished."""

    pid: int
    step: int
    rank: int
    world: int
    time: float


@dataclass(frozen=True)
class Loss:
    """The cost of losing one worker, in seconds, steps and samples; `met` is the time until the survivors had regrouped."""

    met: float
    committed: float
    replaced: float
    rolled_back: int
    missing: int
    fell_back: bool


class Training:
    """A job whose processes note their steps."""

    def __init__(self, job: Job, arm: str, calm: int) -> None:
        self.job, self.arm, self._calm = job, arm, calm
        self._read: dict[Path, int] = {}
        self._notes: dict[int, list[Note]] = {}

    def notes(self) -> dict[int, list[Note]]:
        """Return the steps of every process so far."""
        for path in self.job.notes.iterdir():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[path] = self._read.get(path, 0) + len(whole) + 1
                pid = int(path.name)
                self._notes.setdefault(pid, []).extend(_note(pid, line) for line in whole.splitlines())
        return self._notes

    def here(self) -> list[int]:
        """Return the running processes that have trained a step."""
        children = self.job.children()
        return [pid for pid in self.notes() if pid in children]

    def is_whole(self, since: float) -> bool:
        """Return True if all workers have trained some steps together after the time `since`."""
        notes, size = self.notes(), self.job.workers
        calm = [pid for pid in self.here() if _is_calm(notes[pid][-self._calm :], self._calm, size, since)]
        return len(calm) == size

    def lost(self, pid: int, at: float, old: set[int]) -> Loss:
        """Return the cost of losing process `pid` at the time `at`; the run must be whole again."""
        after = {who: [note for note in notes if note.time > at] for who, notes in self.notes().items() if who != pid}
        new = {who: notes for who, notes in after.items() if who not in old and notes}
        replaced = min(notes[0].time for notes in new.values()) - at
        regroup = self._regroup(at) if self.arm in LIVE else None
        if regroup is None:
            first = min(notes[0].step for notes in new.values())
            reached = max(note.step for who in old for note in self._notes[who])
            committed = max(notes[0].time for notes in new.values()) - at
            return Loss(committed, committed, replaced, reached + 1 - first, 0, self.arm in LIVE)
        missing = len(regroup.get("missing", ()))
        step = regroup["step"] + (self.arm == "skip" and missing > 0)  # `skip` commits nothing for a dropped step
        done = [note.time for notes in after.values() for note in notes if note.step == step]
        return Loss(regroup["time"] - at, max(done) - at, replaced, 0, missing, False)

    def _regroup(self, at: float) -> dict | None:
        """Return the first regroup of the survivors after the time `at`, or None if all workers were restarted."""
        if any(event["time"] > at for event in of_supervisor(self.job) if event["event"] == "restart"):
            return None
        regroups = [event for event in of_kind(self.job, "regroup") if event["time"] > at and event.get("lost")]
        return min(regroups, key=lambda event: event["number"], default=None)

    def pace(self) -> list[float]:
        """Return the seconds of every step, of the process with the most steps."""
        notes = max(self._notes.values(), key=len)
        return [b.time - a.time for a, b in pairwise(notes)]


def _note(pid: int, line: bytes) -> Note:
    step, rank, world, when = line.split()
    return Note(pid, int(step), int(rank), int(world), float(when))


def _is_calm(last: list[Note], count: int, size: int, since: float) -> bool:
    return len(last) == count and last[0].time > since and all(note.world == size for note in last)


def of_supervisor(job: Job) -> list[dict]:
    """Return the events that the supervisor has recorded."""
    with suppress(OSError):
        lines = (job.out / "history" / "supervisor.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]
    return []


def strike(training: Training, how: str, rng: random.Random) -> tuple[int, float]:
    """Strike a random worker; return its process id and the time."""
    pid = rng.choice(sorted(training.here()))
    if how == "deadlock":
        order = training.job.control / f"deadlock-{pid}"
        order.touch()
        obeyed = order.with_suffix(".obeyed")
        training.job.wait(lambda: obeyed.exists() and bool(obeyed.read_text()))
        return pid, float(obeyed.read_text())
    at = time.time()
    kill(pid, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    return pid, at


def strike_repeatedly(
    training: Training, given: argparse.Namespace, rng: random.Random, record: Callable[[Loss], bool]
) -> None:
    """Strike until `record`, which gets the cost of every loss, returns False."""
    more, since = True, 0.0
    while more:
        training.job.wait(lambda since=since: training.is_whole(since))
        time.sleep(given.rest + rng.random() * max(SOON, training.pace()[-1]))
        old = set(training.here())
        pid, since = strike(training, given.hang or "kill", rng)
        training.job.wait(lambda since=since: training.is_whole(since))
        more = record(training.lost(pid, since, old))


def command(arm: str, given: argparse.Namespace, folder: Path) -> list[str]:
    """Return the command that starts a job of `arm`."""
    if arm == "torchrun":
        options = ["--standalone", f"--nproc-per-node={given.workers}", "--max-restarts=1000"]
        script = [HERE / ("plain_sharded.py" if given.sharded else "plain.py"), given.model, given.save_every, folder]
        return [sys.executable, "-m", "torch.distributed.run", *options, *map(str, script)]
    options = ["--workers", given.workers, "--recovery", arm, "--save-every", given.save_every, "--max-restarts", 1000]
    options += ["--spares", given.spares if arm in LIVE else min(1, given.spares)]
    script = [HERE / ("train_sharded.py" if given.sharded else "train.py"), "--", given.model, given.workers, folder]
    script += [given.replicas] if given.sharded else []
    return [*COMMAND, "run", *map(str, options), "--out", str(folder / "run"), *map(str, script)]


def main() -> None:
    """Measure the arms alternately, print the table and say whether the claims hold."""
    given = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that running jobs are ended
    ends = time.monotonic() + 60 * given.minutes
    rng = random.Random(given.seed)
    found: dict[str, list[Loss]] = {arm: [] for arm in given.arms}
    pace: dict[str, list[float]] = {arm: [] for arm in given.arms}
    wrong: list[str] = []
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="live-recovery-") as place:
        for turn in range(given.rounds):
            wanted = given.kills * (turn + 1) // given.rounds
            for arm in given.arms if turn % 2 == 0 else reversed(given.arms):
                if time.monotonic() < ends and len(found[arm]) < wanted:
                    folder = Path(place) / f"{arm}-{turn}"
                    job = Job(folder, given.workers, command(arm, given, folder), limit=ends + 120 - time.monotonic())
                    training = Training(job, arm, given.calm)

                    def record(loss: Loss, arm: str = arm, wanted: int = wanted) -> bool:
                        found[arm].append(loss)
                        _tell(arm, loss, len(found[arm]), given)
                        return len(found[arm]) < wanted and time.monotonic() < ends

                    if why := _one(training, given, rng, record):
                        wrong.append(f"{arm}: {why}")
                        print(f"{arm}: {why}", file=sys.stderr, flush=True)
                    if training.notes():
                        pace[arm] += training.pace()
    _report(found, pace, given)
    if given.json:
        result = {"given": vars(given), "about": about(given), "wrong": wrong}
        result |= {"losses": {arm: [asdict(loss) for loss in losses] for arm, losses in found.items()}}
        Path(given.json).write_text(json.dumps(result))
    holds = claims(found, given)
    sys.exit(0 if holds and not wrong else 1)


def _one(training: Training, given: argparse.Namespace, rng: random.Random, record: Callable[[Loss], bool]) -> str:
    """Strike one run again and again; return what went wrong, or an empty string."""
    job = training.job
    job.start(device=given.device)
    try:
        strike_repeatedly(training, given, rng, record)
    except Ended:
        return f"the command ended with {job.status}: {job.last_lines(12)}"
    except Hung as hung:
        return f"{hung}: {job.last_lines()}"
    finally:
        job.dump_and_kill(stacks=False)
    states: dict[tuple[int, int], set[str]] = {}
    for step in of_kind(job, "step"):
        states.setdefault((step["attempt"], step["step"]), set()).add(step["state"][:16])
    different = [where for where, digests in states.items() if len(digests) > 1]
    return f"ranks differ after (attempt, step) {different[0]}" if different else ""


def _tell(arm: str, loss: Loss, number: int, given: argparse.Namespace) -> None:
    print(
        f"{arm} {number}/{given.kills}: met after {loss.met:.3f} s, committed after {loss.committed:.3f} s, replaced after {loss.replaced:.3f} s, "
        f"{loss.rolled_back} steps rolled back, {loss.missing} samples missing{', FELL BACK' if loss.fell_back else ''}",
        file=sys.stderr,
        flush=True,
    )


def _report(found: dict[str, list[Loss]], pace: dict[str, list[float]], given: argparse.Namespace) -> None:
    """Print the table of the README."""
    what = {"stop": "SIGSTOP", "deadlock": "a deadlock"}.get(given.hang, "SIGKILL")
    print(f"{about(given)}\n\n| from {what}, s | the next committed step, median | worst | ", end="")
    print("the replacement contributes, median | worst | steps rolled back | samples lost | step, ms | n |")
    print(f"|---|{'---:|' * 8}")
    for arm, losses in found.items():
        if losses:
            cells = [_middle(losses, "committed"), _middle(losses, "replaced")]
            cells += [_mean(losses, "rolled_back"), _mean(losses, "missing")]
            cells += [f"{1000 * statistics.median(pace[arm]):.1f}", str(len(losses))]
            print(f"| {arm} | {' | '.join(cells)} |")
    if back := {arm: sum(loss.fell_back for loss in losses) for arm, losses in found.items()}:
        print("".join(f"\n{arm}: {times} fell back to a restart" for arm, times in back.items() if times))


def _middle(losses: list[Loss], name: str) -> str:
    values = [getattr(loss, name) for loss in losses]
    return f"{statistics.median(values):.3f} | {max(values):.3f}"


def _mean(losses: list[Loss], name: str) -> str:
    return f"{statistics.mean(getattr(loss, name) for loss in losses):.1f}"


def claims(found: dict[str, list[Loss]], given: argparse.Namespace) -> bool:
    """Print each claim that was measured, and return True if all of them hold."""
    lines = []
    for arm, losses in found.items():
        seconds = [loss.committed for loss in losses]
        if not seconds or arm not in LIVE:
            continue
        if given.hang:
            lines.append((f"{arm}: worst at most {HANG_MOST:g} s", max(seconds) <= HANG_MOST))
        elif given.sharded:
            if given.device == "cpu":
                holds = statistics.median(seconds) <= SHARDED_MOST
                lines.append((f"{arm}: median at most {SHARDED_MOST:g} s", holds))
            exact = all(not loss.rolled_back and not loss.missing for loss in losses)
            lines.append((f"{arm}: no step undone, no sample lost", exact))
        elif given.device == "cuda":
            if arm in GPU_MOST:
                lines.append(
                    (f"{arm}: median at most {GPU_MOST[arm]:g} s", statistics.median(seconds) <= GPU_MOST[arm])
                )
        else:
            median, worst = MOST[arm]
            lines.append((f"{arm}: median at most {median:g} s", statistics.median(seconds) <= median))
            lines.append((f"{arm}: worst at most {worst:g} s", max(seconds) <= worst))
            if given.model == "state60":
                late = statistics.median(loss.replaced for loss in losses)
                lines.append((f"{arm}: the replacement contributes within 0.5 s (median)", late <= 0.5))
    print()
    for line, holds in lines:
        print(f"{line}: {'holds' if holds else 'FAILS'}")
    return all(holds for _, holds in lines)


def about(given: argparse.Namespace) -> str:
    """Describe the machine, the versions and the options."""
    import torch

    where = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    return (
        f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, {where}; "
        f"{given.workers} workers{_sharding(given)}, {given.spares} spares, {given.rest:g} s of rest, {given.model}, a save every {given.save_every} steps, seed {given.seed}; "
        f"load {os.getloadavg()[0]:.1f}"
    )


def _sharding(given: argparse.Namespace) -> str:
    if not given.sharded:
        return ""
    return " (FSDP2)" if given.replicas == 1 else f" (HSDP with {given.replicas} replicas)"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--arms",
        nargs="*",
        choices=ARMS,
        default=None,
        help="default: all, without torchrun for --hang, since it waits forever",
    )
    parser.add_argument("--model", choices=("small", "state60", "gpt2", "gpt2-bf16"), default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="all workers on one GPU, over gloo")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--sharded", action="store_true", help="shard the model; default: 1 spare, 8 kills, 1 round, 2 minutes"
    )
    parser.add_argument("--replicas", type=int, default=1, help="replicas of a sharded model under holdfast (HSDP)")
    parser.add_argument(
        "--spares", type=int, default=0, help="spare workers; with any, restart has a standby set of all workers"
    )
    parser.add_argument(
        "--rest", type=float, default=0.0, help="seconds before each strike, in which a new spare gets ready"
    )
    parser.add_argument("--kills", type=int, default=20, help="strikes per arm")
    parser.add_argument("--calm", type=int, default=10, help="steps of all workers before the next strike, at least 2")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in which each arm runs once")
    parser.add_argument(
        "--hang", choices=("stop", "deadlock"), help="suspend or deadlock a worker instead of killing it"
    )
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=8.0, help="no strike after this time")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--json", help="write every figure to this file")
    if "--sharded" in sys.argv:
        parser.set_defaults(spares=1, kills=8, rounds=1, minutes=2.0)
    given = parser.parse_args()
    arms = SHARDED_ARMS if given.sharded else ARMS
    given.arms = given.arms or [arm for arm in arms if not (given.hang and arm == "torchrun")]
    if refused := {*given.arms} - {*arms}:
        parser.error(f"a sharded model cannot train under {', '.join(sorted(refused))}")
    return given


if __name__ == "__main__":
    main()
