"""Compare two ways to change the number of workers: sleep and restart. Run: python benchmarks/live-recovery/sleeping.py

`holdfast scale` asks a run under `forward` for fewer workers and then for all, again and again. Alternating with it, a
run under `restart` is stopped by SIGTERM, saves, and is started with the other number of workers. The time goes from
the request to the first step trained by the requested number of workers.
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench import Training, about, command
from job import Ended, Hung, Job, kill

from holdfast.supervise.scale_request import scale


def main() -> None:
    """Measure both ways alternately, and print the table."""
    given = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[str, list[float]] = {"to sleep": [], "woken": [], "restart with fewer": [], "restart with all": []}
    with tempfile.TemporaryDirectory(prefix="sleeping-") as place:
        sleeper = _begin(Path(place) / "forward", "forward", given)
        other = _begin(Path(place) / "restart", "restart", given)
        try:
            for _ in range(given.times):
                for workers, asleep, restarted in (
                    (given.fewer, "to sleep", "restart with fewer"),
                    (given.workers, "woken", "restart with all"),
                ):
                    _rest(other)
                    found[asleep].append(_slept(sleeper, workers))
                    _wake(other)
                    _rest(sleeper)
                    found[restarted].append(_restarted(other, workers, given))
                    _wake(sleeper)
                    print({name: [round(x, 2) for x in seconds] for name, seconds in found.items()}, file=sys.stderr)
        except (Ended, Hung) as error:
            sys.exit(f"{error!r}: {sleeper.job.last_lines()} | {other.job.last_lines()}")
        finally:
            for training in (sleeper, other):
                _wake(training)
                training.job.dump_and_kill(stacks=False)
    print(f"{about(given)}\n\n| from the request to the first step, s | median | worst | n |\n|---|---:|---:|---:|")
    for name, seconds in found.items():
        print(f"| {name} | {statistics.median(seconds):.2f} | {max(seconds):.2f} | {len(seconds)} |")


def _begin(folder: Path, arm: str, given: argparse.Namespace) -> Training:
    job = Job(folder, given.workers, command(arm, given, folder), limit=60 * given.minutes)
    training = Training(job, arm, 3)
    job.start()
    job.wait(lambda: training.is_whole(0.0))
    return training


def _slept(training: Training, workers: int) -> float:
    since = time.time()
    scale(training.job.out, workers)
    return _first_step(training, workers, since)


def _restarted(training: Training, workers: int, given: argparse.Namespace) -> float:
    since = time.time()
    kill(training.job.supervisor, signal.SIGTERM)
    training.job.await_end()
    at = training.job.command.index("--workers") + 1
    training.job.command[at] = str(workers)
    training.job.start()
    return _first_step(training, workers, since)


def _first_step(training: Training, workers: int, since: float) -> float:
    """Wait until `workers` workers have trained a step together, and return the seconds after `since`."""
    found: list[float] = []

    def trained() -> bool:
        steps = [note for notes in training.notes().values() for note in notes if note.time > since]
        found[:] = [note.time for note in steps if note.world == workers]
        return len(found) >= workers

    training.job.wait(trained)
    return sorted(found)[workers - 1] - since


def _rest(training: Training) -> None:
    """Suspend all processes of a run, so that it does not disturb the measurement of the other."""
    for pid in training.job.processes():
        kill(pid, signal.SIGSTOP)


def _wake(training: Training) -> None:
    for pid in training.job.processes():
        kill(pid, signal.SIGCONT)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("small", "state60"), default="small")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--fewer", type=int, default=2)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10.0, help="a run that takes longer counts as a hang")
    given = parser.parse_args()
    return argparse.Namespace(**vars(given), device="cpu", spares=0, seed=0)


if __name__ == "__main__":
    main()
