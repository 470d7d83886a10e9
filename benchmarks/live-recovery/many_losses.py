"""Kill a random worker of one run hundreds of times, and show that nothing grows.

Run: python benchmarks/live-recovery/many_losses.py --losses 300 --open-files 256. The command exits with 1 if the run
does not end with status 0, or if its processes use more threads, files or memory in the second half than in the first.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from job import COMMAND, Job, kill
from judging import Use

SCRIPT = Path(__file__).with_name("struck.py")
STEPS_BETWEEN, STEPS_PER_EPOCH = 8, 64
MORE_MEMORY = 1.05  # allocators do not return all memory


def measure(job: Job) -> Use:
    """Return the largest use of each resource by the supervisor or a worker."""
    uses = [Use.of(pid) for pid in (job.supervisor, *job.pids().values())]
    return Use(*(max(getattr(use, name) for use in uses) for name in ("threads", "files", "memory")))


def strike(job: Job, losses: int, rng: random.Random) -> list[Use]:
    """Kill one worker after another; return the use of resources before every loss."""
    uses, since = [], -1
    for number in range(losses):
        job.wait(lambda since=since: job.is_whole(STEPS_BETWEEN, since))
        time.sleep(rng.random() * 0.05)
        since = job.reached()
        uses.append(measure(job))
        kill(job.pids()[rng.randrange(job.workers)])
        if number % 25 == 0:
            print(f"{number} losses: {uses[-1]}", file=sys.stderr, flush=True)
    return uses


def main() -> None:
    """Strike one run, let it end, and compare both halves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--losses", type=int, default=300)
    parser.add_argument("--open-files", type=int, default=256, help="limit of open files per process (ulimit -n)")
    parser.add_argument("--recovery", choices=("forward", "replay", "skip"), default="forward")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "job"
        epochs = given.losses * 3 * STEPS_BETWEEN // STEPS_PER_EPOCH + 10
        limit = ["bash", "-c", f'ulimit -n {given.open_files}; exec "$@"', "bash"]
        options = ["--workers", "3", "--recovery", given.recovery, "--save-every", "200", "--out", str(folder / "run")]
        script = [str(SCRIPT), "--", "plain", str(epochs), str(folder / "control")]
        job = Job(folder, 3, [*limit, *COMMAND, "run", *options, *script], limit=60 + 10.0 * given.losses)
        try:
            job.start()
            uses = strike(job, given.losses, random.Random(given.seed))
            (job.control / "hurry").touch()
            status = job.await_end()
        finally:
            job.dump_and_kill(stacks=False)
        sys.exit(report(uses, status, job.last_lines()))


def report(uses: list[Use], status: int, last_lines: str) -> int:
    """Print both halves as a table; return the exit status of this command."""
    halves = uses[: len(uses) // 2], uses[len(uses) // 2 :]
    largest = {name: [max(getattr(use, name) for use in half) for half in halves] for name in Use.__annotations__}
    print(f"{len(uses)} losses, exit status {status}\n")
    print("| most in one process | first half | second half |\n|---|---:|---:|")
    for name, (first, second) in largest.items():
        print(f"| {name} | {first:.0f} | {second:.0f} |")
    grows = [name for name, (first, second) in largest.items() if second > first * MORE_MEMORY + (name != "memory") * 8]
    if status or grows:
        print(f"WRONG: {', '.join(grows) or last_lines}")
    return 1 if status or grows else 0


if __name__ == "__main__":
    main()
