"""Kill the workers of the sharded examples at random moments. Run: python benchmarks/live-recovery/killed_examples.py

Each of PyTorch's FSDP2 example, examples/fsdp2.py and a model under HSDP (2 replicas of 2 shards) trains with 4 ranks.
Each is struck with SIGKILL, one random worker at a time, until the wanted number of kills is reached. Then the run must
end with the bits of the same run without a kill, after every step and in its last snapshot, and its audit must pass.
The command exits with 1 if one does not.
"""

import argparse
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import struck_sharded
from job import COMMAND, Ended, Hung, Job, kill
from judging import Reference, of_kind, wrong_audit, wrong_bits
from whole_states import whole_states, wrong_states

WORKERS, SAVE_EVERY = 4, 5
CALM = 6  # the most steps between two kills
EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Subject:
    """A script and its arguments; `{control}` stands for the folder that the script of strikes.py asks for."""

    script: Path
    arguments: tuple[str, ...]


SUBJECTS = {
    "pytorch_fsdp2": Subject(
        EXAMPLES / "pytorch_fsdp2" / "example.py", ("--explicit-prefetching", "--layers", "2", "--steps", "200")
    ),
    "fsdp2": Subject(EXAMPLES / "fsdp2.py", ("--epochs", "4")),
    "hsdp": Subject(Path(struck_sharded.__file__), ("hsdp", "3", "{control}")),
}


@dataclass(frozen=True)
class Outcome:
    """The result of one run that was killed, and everything that was wrong with it."""

    kills: int
    attempts: int
    steps: int
    repeated: int
    wrong: tuple[str, ...]


def start(subject: Subject, folder: Path, limit: float) -> Job:
    """Start the run in a folder of its own, where the script may write files."""
    script = [argument.format(control=folder / "control") for argument in subject.arguments]
    options = ["--workers", WORKERS, "--save-every", SAVE_EVERY, "--max-restarts", 20, "--out", folder / "run"]
    inside = ["bash", "-c", 'cd "$0" && exec "$@"', folder]
    command = [*inside, *COMMAND, "run", *options, subject.script, "--", *script]
    job = Job(folder, WORKERS, [*map(str, command)], limit=limit)
    job.start()
    return job


def reference_of(subject: Subject, folder: Path, limit: float) -> Reference:
    """Return the result of the run without a kill."""
    job = start(subject, folder, limit)
    try:
        if status := job.await_end():
            raise SystemExit(f"the run without a kill ended with {status}: {job.last_lines()}")
        return Reference.of(job)
    finally:
        job.dump_and_kill(stacks=False)


def killed(
    subject: Subject, folder: Path, reference: Reference, kills: int, rng: random.Random, limit: float
) -> Outcome:
    """Kill workers of the run, let it end, and check it."""
    job, struck, wrong = start(subject, folder, limit), 0, list[str]()
    try:
        struck = _strike(job, kills, rng)
        if status := job.await_end():
            wrong.append(f"the command ended with {status}: {job.last_lines()}")
        wrong += job.gone()
        wrong += wrong_bits(job, reference, is_exact=True)
        if reference.whole:
            wrong += wrong_states(whole_states(job.notes), reference.whole, is_exact=True)
        wrong += wrong_audit(job)
    except Hung as hung:
        wrong.append(str(hung))
    finally:
        job.dump_and_kill(stacks=bool(wrong))
    if struck < kills:
        wrong.append(f"the run ended after {struck} of {kills} kills")
    trained = [(step["attempt"], step["step"]) for step in of_kind(job, "step") if step["rank"] == 0]
    steps = len({step for _, step in trained})
    return Outcome(struck, max(tail.attempt for tail in job.tails), steps, len(trained) - steps, tuple(wrong))


def _strike(job: Job, kills: int, rng: random.Random) -> int:
    since = -1
    for number in range(kills):
        steps, victim, delay = rng.randint(1, CALM), rng.randrange(WORKERS), rng.random() * 0.05
        try:
            job.wait(lambda since=since, steps=steps: job.is_whole(steps, since))
        except Ended:
            return number
        time.sleep(delay)  # training goes on meanwhile
        since = job.reached()
        if victim not in (pids := job.pids()) or not kill(pids[victim]):
            return number
    return kills


def rows(given: argparse.Namespace, place: Path) -> Iterator[tuple[str, Outcome]]:
    """Run each subject without a kill and with kills; yield its name and its outcome."""
    for name in given.only or SUBJECTS:
        subject = SUBJECTS[name]
        reference = reference_of(subject, place / f"{name}-reference", given.limit)
        rng = random.Random(f"{given.seed} {name}")
        outcome = killed(subject, place / name, reference, given.kills, rng, given.limit)
        print(f"{name}: {outcome.kills} kills, {'; '.join(outcome.wrong) or 'fine'}", file=sys.stderr, flush=True)
        yield name, outcome


def main() -> None:
    """Kill every example, and print the table of the README."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each example")
    parser.add_argument("--only", nargs="*", choices=SUBJECTS, help="only these (default: all)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="determines which workers are killed")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one run may take")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a running job is ended
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="killed-") as place:
        outcomes = dict(rows(given, Path(place)))
    print(f"python {platform.python_version()}, torch {torch.__version__}; seed {given.seed}\n")
    print("| | kills | attempts | steps | repeated | wrong |\n|---|---:|---:|---:|---:|---|")
    for name, outcome in outcomes.items():
        counts = f"{outcome.kills} | {outcome.attempts} | {outcome.steps} | {outcome.repeated}"
        print(f"| {name} | {counts} | {'; '.join(outcome.wrong) or 'nothing'} |")
    sys.exit(any(outcome.wrong for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
