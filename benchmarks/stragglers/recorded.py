"""Record the own times of a run, and count how soon the detector names the slow rank in them.

python benchmarks/stragglers/recorded.py record FILE [--workers 4] [--factor 1.5] [--steps 1000]
python benchmarks/stragglers/recorded.py judge FILE [FILE ...]

`record` trains `train.py` and writes the own times of all ranks in each step to FILE. Rank 1 is slow from step 500 on
(with `--factor 1`, no rank is). `judge` gives the recorded times to `StragglerDetector` and prints which ranks it names.
Then it repeats this for many beginnings: it leaves out the first 0, 2, 4 and so on of the slow steps. One run thus tells
about hundreds of beginnings, with the noise of a real machine.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import SINCE, TRAIN

from holdfast.runs.config import RunConfig
from holdfast.supervise.stragglers import OwnTime, SlowSteps, StragglerDetector
from holdfast.supervise.supervisor import supervise

SLOW_RANK = 1
BEFORE, LEAST = 100, 100  # steps before a beginning, and the fewest after it
OwnTimes = list[float]  # of one step, by rank


def main() -> int:
    parser = argparse.ArgumentParser(description="Record own times, or count in them how soon a slow rank is named.")
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--workers", type=int, default=4)
    recording.add_argument("--factor", type=float, default=1.5)
    recording.add_argument("--steps", type=int, default=1000)
    recording.set_defaults(act=record)
    judging = commands.add_parser("judge")
    judging.add_argument("files", type=Path, nargs="+")
    judging.set_defaults(act=judge)
    options = parser.parse_args()
    try:
        return int(options.act(options))
    except OSError as error:
        sys.exit(f"{error.filename or options.act.__name__}: {error.strerror}")


def record(options: argparse.Namespace) -> int:
    """Train, and write the factor, and then one line for each step that the supervisor compares."""
    compare = StragglerDetector._compare
    with options.file.open("w") as file, TemporaryDirectory() as folder:
        file.write(f"{options.factor}\n")

        def recorded(self: StragglerDetector, step: int, own_times: Mapping[int, OwnTime], reached: int) -> bool:
            is_done = compare(self, step, own_times, reached)
            if is_done:
                file.write(json.dumps([step, [own_times[rank](step) for rank in sorted(own_times)]]) + "\n")
            return is_done

        StragglerDetector._compare = recorded  # type: ignore[method-assign]
        args = (str(options.steps), str(SLOW_RANK), str(SINCE), str(options.factor))
        config = RunConfig(script=str(TRAIN), args=args, workers=options.workers)
        return supervise(config, Path(folder) / "run").exit_code


def judge(options: argparse.Namespace) -> int:
    """Print the named ranks of each file, and how soon the slow rank is named in all of them."""
    delays: list[float] = []
    for path in options.files:
        factor, steps = read(path)
        named = sorted({report.seat for report in reports_of([steps[step] for step in sorted(steps)])})
        ranks = len(steps[min(steps)])
        print(f"{path.stem}: factor {factor}, {len(steps)} steps of {ranks} ranks, named: {named or 'no rank'}")
        if factor > 1:
            delays += delays_of(steps)
    if delays:
        print(summary(delays))
    return 0


def read(path: Path) -> tuple[float, dict[int, OwnTimes]]:
    """Return the factor, and the own times of all ranks by step. Steps that are not known of all ranks are left out."""
    try:
        factor, *lines = map(json.loads, path.read_text().splitlines())
        steps = {step: times for step, times in lines if None not in times}
    except (ValueError, TypeError) as error:
        sys.exit(f"{path} was not written by `recorded.py record`, or is cut off ({error}): record it again.")
    if not steps:
        sys.exit(f"{path} has no step: record it again.")
    return factor, steps


def reports_of(steps: Sequence[OwnTimes]) -> list[SlowSteps]:
    """Return the reports of a detector that looks after every step."""
    detector = StragglerDetector()
    reports: list[SlowSteps] = []
    for reached in range(len(steps) + 1):
        own_times = {rank: lambda step, rank=rank: steps[step][rank] for rank in range(len(steps[0]))}
        reports += detector.look(own_times, reached)
    return reports


def delays_of(steps: Mapping[int, OwnTimes]) -> list[float]:
    """Return how many slow steps it takes to name the slow rank, for many beginnings; infinity if it is not named."""
    before = [steps[step] for step in sorted(steps) if SINCE - BEFORE <= step < SINCE]
    slow = [steps[step] for step in sorted(steps) if step >= SINCE]
    return [delay(before + slow[begin:], len(before)) for begin in range(0, len(slow) - LEAST, 2)]


def delay(steps: Sequence[OwnTimes], begin: int) -> float:
    right = (report.until for report in reports_of(steps) if report.seat == SLOW_RANK and report.until > begin)
    return min(right, default=math.inf) - begin


def summary(delays: Sequence[float]) -> str:
    ordered = sorted(delays)
    late = sum(delay > 50 for delay in delays) / len(delays)
    return (
        f"{len(delays)} beginnings: named after {ordered[len(ordered) // 2]:g} steps in the median, "
        f"{ordered[len(ordered) * 9 // 10]:g} in 9 of 10, at most {ordered[-1]:g}; after more than 50 steps, or never: {late:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
