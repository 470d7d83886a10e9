"""Measure `--witness-every`: are flipped bits found, are there false alarms, and what does it cost?

    python benchmarks/witness/bench.py flips [--count 50] [--seed 1]     flipped bits, found and undone or not
    python benchmarks/witness/bench.py clean [--steps 1000000]           false alarms in steps without a flip
    python benchmarks/witness/bench.py cost [--device cuda]              the time that comparisons take

All of them start `holdfast run`, with models under DDP and sharded with FSDP2 and `--recovery replay`.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.audit.verdicts import audit_run
from holdfast.checkpoint import snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.history.log import read_history, recall
from holdfast.process import PREEMPTED

TRAIN = Path(__file__).resolve().parent / "train.py"
SMALL = {"width": 64, "layers": 3, "batch": 24}
TINY = {"width": 32, "layers": 1, "batch": 8}  # most of a step is the work of torch and holdfast for any model
AROUND = 5  # steps from a comparison on, in which it may take time
EXPONENT, MANTISSA = range(23, 31), range(23)  # bits of float32
OPTIONS = {"ddp": [], "fsdp": ["--recovery", "replay"]}


@dataclass(frozen=True)
class PlannedFlip:
    """A bit to flip: of a weight or a moment, in the exponent or the mantissa."""

    step: int
    rank: int
    what: str
    part: str
    bit: int

    @property
    def spec(self) -> str:
        return f"flip@{self.step}:{self.what}={self.bit},rank={self.rank}"


@dataclass(frozen=True)
class Outcome:
    """What became of a flip: the comparison that found it, the steps until then, and whether the rank was named."""

    flip: PlannedFlip
    kind: str
    changed: str
    steps: int | None
    named: str | None  # at once, or after the steps were repeated


def plan_flips(count: int, every: int, workers: int, draw: random.Random) -> list[PlannedFlip]:
    """Return `count` flips, each in an interval of its own, with an interval without a flip between two."""
    flips = []
    for number in range(count):
        what, part = ("weight", "moment")[number % 2], ("exponent", "mantissa")[number // 2 % 2]
        step = (2 * number + 1) * every + draw.randrange(every)
        bit = draw.choice(EXPONENT if part == "exponent" else MANTISSA)
        flips.append(PlannedFlip(step, draw.randrange(workers), what, part, bit))
    return flips


def run(
    out: Path,
    kind: str,
    workers: int,
    every: int | None,
    steps: int,
    options: Sequence[str],
    deadline: float = math.inf,
    **task: Any,
) -> str:
    """Train with `holdfast run` to the end, or until the time `deadline`; return its output."""
    arguments = [word for name, value in task.items() for word in (f"--{name}", str(value))]
    witness = ["--witness-every", str(every)] if every else []
    command = [sys.executable, "-m", "holdfast", "run", "--workers", str(workers), "--out", str(out), "--seed", "3"]
    command += [*OPTIONS[kind], *witness, *options, str(TRAIN), "--", "--kind", kind, "--steps", str(steps), *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if task["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    expected = [0]
    try:
        output, _ = process.communicate(timeout=None if deadline == math.inf else deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        process.terminate()  # the workers save and stop
        output, _ = process.communicate()
        expected.append(PREEMPTED)
    if process.returncode not in expected:
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{output}")
    return output


def events(out: Path, kind: str) -> list[Any]:
    return [event.what for event in read_history(out).events if event.kind == kind]


def outcomes(out: Path, kind: str, every: int, flips: Sequence[PlannedFlip]) -> list[Outcome]:
    """Return what became of each flip, by the history of the run and its audit."""
    because = next(finding.because for finding in audit_run(out) if finding.check == "no_corruption_remains")
    strikes = {strike.step: strike for strike in events(out, "failure")}
    corruptions = events(out, "corruption")
    results = []
    for flip in flips:
        strike = strikes[flip.step]
        found = next((c for c in corruptions if c.attempt == strike.attempt and flip.step < c.step), None)
        named = None
        if found and found.culprit == flip.rank:
            named = "at once"
        elif found and flip.rank in found.ranks:
            claim = f"before step {found.step} of attempt {found.attempt} (the shard of rank {flip.rank} was wrong"
            named = "after the repetition" if claim in because else None
        results.append(Outcome(flip, kind, strike.changed or "", found and found.step - flip.step, named))
    return results


def same_bits(one: Path, other: Path) -> bool:
    """Return True if the newest snapshots of two runs have the same bits."""
    a, b = (snapshot.newest(DirectoryStore(out / "checkpoints")).tensors for out in (one, other))
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in a)


def measure_flips(task: argparse.Namespace, folder: Path) -> None:
    draw = random.Random(task.seed)
    print(f"seed {task.seed}, {task.workers} workers, --witness-every {task.every}")
    rows: list[Outcome] = []
    same: dict[str, bool] = {}
    settings = {**SMALL, "device": task.device}
    for kind in ("ddp", "fsdp"):
        flips = plan_flips(task.count // 2, task.every, task.workers, draw)
        steps = (2 * len(flips) + 1) * task.every
        saving = ["--save-every", str(2 * task.every), "--max-restarts", "9"]
        run(folder / f"{kind}-reference", kind, task.workers, None, steps, saving, **settings)
        injected = [word for flip in flips for word in ("--inject", flip.spec)]
        output = run(folder / kind, kind, task.workers, task.every, steps, [*saving, *injected], **settings)
        if "audit: pass" not in output:
            raise SystemExit(f"the audit did not pass:\n{output}")
        rows += outcomes(folder / kind, kind, task.every, flips)
        same[kind] = same_bits(folder / kind, folder / f"{kind}-reference")
    for row in rows:
        verdict = f"found after {row.steps} steps, named {row.named}" if row.steps else "not found"
        print(f"{row.kind} {row.flip.spec} ({row.flip.part}: {row.changed}): {verdict}")
    print("\n| | flips | found | most steps | rank named at once | after the repetition | not found |")
    print("|---|---|---|---|---|---|---|")
    for kind in ("ddp", "fsdp"):
        for part in (f"{what}, {half}" for what in ("weight", "moment") for half in ("exponent", "mantissa")):
            own = [row for row in rows if row.kind == kind and part == f"{row.flip.what}, {row.flip.part}"]
            found = [row.steps for row in own if row.steps]
            by = [sum(row.named == how for row in own) for how in ("at once", "after the repetition")]
            print(
                f"| {kind}, {part} | {len(own)} | {len(found)} | {max(found, default='')} | {by[0]} | {by[1]} | "
                f"{len(own) - len(found)} |"
            )
    for kind, is_same in same.items():
        print(f"{kind}: the run ended with {'the' if is_same else 'OTHER'} bits of a run without flips")


@dataclass(frozen=True)
class CleanRun:
    """A run without a flip: the steps that it has compared, the comparisons, and the alarms, which are false."""

    kind: str
    steps: int
    comparisons: int
    alarms: int

    @classmethod
    def read(cls, out: Path, kind: str) -> "CleanRun":
        """Read the run in the folder `out`. Only steps before a comparison are counted."""
        rank_0 = list(recall(out / "history" / "rank-0.jsonl", "witnessed", "corruption"))
        compared = {event.what.step for event in rank_0 if event.kind == "witnessed"}
        return cls(kind, max(compared, default=0), len(compared), sum(event.kind == "corruption" for event in rank_0))


def measure_clean(task: argparse.Namespace, folder: Path) -> None:
    """Divide the steps of each kind among `--jobs` runs, and train that many runs at once."""
    began = time.monotonic()
    shares = [len(range(number, task.steps, task.jobs)) for number in range(task.jobs)]

    def clean(number: int, kind: str) -> CleanRun | None:
        out, options = folder / f"{kind}-{number}", ["--save-every", str(task.steps)]
        if time.monotonic() > began + task.limit:
            return None
        run(
            out,
            kind,
            task.workers,
            task.every,
            shares[number],
            options,
            began + task.limit,
            **TINY,
            device=task.device,
        )
        return CleanRun.read(out, kind)

    with ThreadPoolExecutor(task.jobs) as pool:
        planned = [pool.submit(clean, number, kind) for number in range(task.jobs) for kind in task.kinds]
        done = [clean_run for future in planned if (clean_run := future.result())]
    print(f"{time.monotonic() - began:.0f} s, {task.workers} workers, --witness-every {task.every}, {TINY}")
    print("\n| | runs | steps | comparisons | false alarms |\n|---|---:|---:|---:|---:|")
    for name in (*task.kinds, "all"):
        own = [clean_run for clean_run in done if name in (clean_run.kind, "all")]
        sums = [sum(getattr(one, count) for one in own) for count in ("steps", "comparisons", "alarms")]
        print(f"| {name} | {len(own)} | {' | '.join(f'{value:,}' for value in sums)} |")


@dataclass(frozen=True)
class Interval:
    """The relative cost of a comparison in one interval, and the same figure for other steps, as the noise."""

    cost: float
    noise: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Interval":
        """Compare the first steps of the interval, and as many in its middle, with the mean of all others."""
        middle = len(seconds) // 2
        first, control = seconds[:AROUND], seconds[middle : middle + AROUND]
        others = [*seconds[AROUND:middle], *seconds[middle + AROUND :]]
        whole, usual = sum(seconds), AROUND * statistics.mean(others)
        return cls((sum(first) - usual) / whole, (sum(control) - usual) / whole)


def resampled_mean(values: Sequence[float], draw: random.Random) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `values`, by drawing from them again."""
    means = sorted(statistics.mean(draw.choices(values, k=len(values))) for _ in range(2000))
    return means[50], means[-51]


def measure_cost(task: argparse.Namespace, folder: Path) -> None:
    """Measure the cost of a comparison in one run: the steps around it, against the other steps of its interval."""
    size = {"width": task.width, "layers": task.layers, "batch": task.batch}
    draw = random.Random(task.seed)
    print(f"{task.workers} workers, {size}, seed {task.seed}, load {os.getloadavg()[0]:.1f}")
    print(f"\n| | parameters | step, median | cost of --witness-every {task.every}, mean | quartiles | ", end="")
    print("other steps, mean | intervals |\n|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for kind in task.kinds:
        times = folder / f"{kind}.json"
        steps = task.every * (task.intervals + 1)
        options = ["--save-every", "1000000000"]
        run(folder / kind, kind, task.workers, task.every, steps, options, **size, device=task.device, times=str(times))
        noted = json.loads(times.read_text())
        seconds = noted["seconds"]
        starts = range(task.every, steps, task.every)  # the first interval warms up
        intervals = [Interval.of(seconds[start : start + task.every]) for start in starts]
        costs, noise = [one.cost for one in intervals], [one.noise for one in intervals]
        low, _, high = statistics.quantiles(costs, n=4)
        cells = [kind, f"{noted['parameters'] / 1e6:.1f} M", f"{1e3 * statistics.median(seconds[task.every :]):.1f} ms"]
        cells += [_mean(costs, draw), f"{low:.2%} to {high:.2%}", _mean(noise, draw), str(len(costs))]
        print(f"| {' | '.join(cells)} |", flush=True)


def _mean(values: Sequence[float], draw: random.Random) -> str:
    low, high = resampled_mean(values, draw)
    return f"{statistics.mean(values):.2%} ({low:.2%} to {high:.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("flips", "clean", "cost"))
    parser.add_argument("--count", type=int, default=50, help="flips")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, help="3 with flips, otherwise 2")
    parser.add_argument("--every", type=int, help="20 with flips, otherwise 50")
    parser.add_argument("--steps", type=int, default=1_000_000, help="clean steps of each kind")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2 - 1), help="clean runs at once")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds until clean runs are stopped")
    parser.add_argument("--kinds", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"])
    parser.add_argument("--intervals", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    task = parser.parse_args()
    task.every = task.every or (20 if task.mode == "flips" else 50)
    task.workers = task.workers or (3 if task.mode == "flips" else 2)
    device = torch.cuda.get_device_name() if task.device == "cuda" else f"{os.cpu_count()} cores"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {device}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = task.keep or Path(temporary)
        {"flips": measure_flips, "clean": measure_clean, "cost": measure_cost}[task.mode](task, folder)


if __name__ == "__main__":
    main()
