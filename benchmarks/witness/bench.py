"""Measure `--witness-every`: are flipped bits found, are there false alarms, and what does it cost?

    python benchmarks/witness/bench.py flips [--count 50] [--seed 1]     flipped bits, found and undone or not
    python benchmarks/witness/bench.py clean [--steps 1000000]           false alarms in steps without a flip
    python benchmarks/witness/bench.py cost [--device cuda]              the time that comparisons take

All of them start `holdfast run`, with models under DDP and sharded with FSDP2 and `--recovery replay`.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from flips import measure_flips
from runs import claim_holds, run

from holdfast.history.log import recall

TINY = {"width": 32, "layers": 1, "batch": 8}  # most of a step is the work of torch and holdfast for any model
MOST = 0.01  # of the time, for comparisons
AROUND = 5  # steps from a comparison on, in which it may take time


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


def measure_clean(task: argparse.Namespace, folder: Path) -> bool:
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
    print()
    return claim_holds("no false alarm in the steps above", bool(done) and not any(one.alarms for one in done))


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


def measure_cost(task: argparse.Namespace, folder: Path) -> bool:
    """Measure the cost of a comparison in one run: the steps around it, against the other steps of its interval."""
    size = {"width": task.width, "layers": task.layers, "batch": task.batch}
    draw, ranges = random.Random(task.seed), {}
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
        ranges[kind] = resampled_mean(costs, draw)
        cells += [_mean(costs, ranges[kind]), f"{low:.2%} to {high:.2%}"]
        cells += [_mean(noise, resampled_mean(noise, draw)), str(len(costs))]
        print(f"| {' | '.join(cells)} |", flush=True)
    print()
    verdicts = {kind: _verdict(*ends) for kind, ends in ranges.items()}
    for kind, verdict in verdicts.items():
        print(f"{kind}: --witness-every {task.every} costs at most {MOST:.0%}: {verdict}")
    return all(verdict == "holds" for verdict in verdicts.values())


def _verdict(low: float, high: float) -> str:
    return "holds" if high <= MOST else "FAILS" if low > MOST else "not resolved: the interval of the mean includes it"


def _mean(values: Sequence[float], ends: tuple[float, float]) -> str:
    return f"{statistics.mean(values):.2%} ({ends[0]:.2%} to {ends[1]:.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("flips", "clean", "cost"))
    parser.add_argument("--count", type=int, default=50, help="flips of all kinds")
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
        holds = {"flips": measure_flips, "clean": measure_clean, "cost": measure_cost}[task.mode](task, folder)
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
