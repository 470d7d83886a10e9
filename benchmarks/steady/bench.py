"""Measure the speed of a protected loop while nothing fails, relative to plain DDP. Run: python benchmarks/steady/bench.py

`train.py` runs under holdfast's supervisor and trains the same model in three ways, alternately, in the same processes:
with plain DDP, protected by holdfast, and with plain DDP again, which shows the noise. The figures are steps per second
relative to plain DDP, within each repeat. With --sharded, both are sharded with FSDP2.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from models import CASES

AT_LEAST = 0.98
AT_LEAST_REPLAY = 0.95  # of sharded models: each rank makes the optimizer steps of another rank's shard, too
WORKERS = {"cpu": 4, "cuda": 1}
WITHIN = 900.0  # seconds allowed for one case
WALL, USED = 0, 1  # kinds of seconds: wall clock, and processor time
Found = dict[str, Any]


def main() -> int:
    """Measure every case, print the table and say whether the claim holds."""
    options = parse()
    found: dict[str, Found] = {}
    for case in options.case or CASES[options.device]:
        found[case] = measured(options, case)
        print(f"{case}: {ratios(found[case], 'protected')}", file=sys.stderr, flush=True)
    where = about(options)
    print(where, end="\n\n")
    print(table(found))
    if options.json:
        Path(options.json).write_text(json.dumps({"about": where, "found": found}))
    least = AT_LEAST_REPLAY if options.sharded and options.recovery == "replay" else AT_LEAST
    slow = [case for case, result in found.items() if statistics.median(ratios(result, "protected")) < least]
    print(
        f"\nat least {least:g}x of plain {'FSDP2' if options.sharded else 'DDP'}: {'FAILS for ' + ', '.join(slow) if slow else 'holds'}"
    )
    return 1 if slow else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Steps per second of a protected loop, relative to plain DDP.")
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 15")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--case", action="append", help="measure only this case; may be repeated")
    parser.add_argument(
        "--recovery", default="restart", help="recovery of the protected run; live recovery needs at least 2 workers"
    )
    parser.add_argument("--sharded", action="store_true", help="shard the models with FSDP2, instead of DDP")
    parser.add_argument("--workers", type=int)
    parser.add_argument(
        "--steps", type=int, default=0, help="steps in a block, if the default of the case takes too long"
    )
    parser.add_argument("--json", help="write every figure to this file")
    options = parser.parse_args()
    options.repeats = options.repeats or (5 if options.quick else 15)
    least = 1 if options.recovery == "restart" else 2
    options.workers = options.workers or max(least, WORKERS[options.device])
    return options


def measured(options: argparse.Namespace, case: str) -> Found:
    """Return the figures of rank 0, measured under a supervisor in its own process, as with `holdfast run`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        how = [folder, options.recovery, str(options.workers), options.device]
        what = [
            "sharded" if options.sharded else "replicated",
            case,
            str(options.repeats),
            str(options.steps),
            str(result),
        ]
        command = [sys.executable, __file__, "supervise", *how, *what]
        done = subprocess.run(command, timeout=WITHIN, capture_output=True, text=True)
        if not result.exists():
            sys.exit(f"{case} could not be measured:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found: Found = json.loads(result.read_text())
        return found


def supervise(folder: str, recovery: str, workers: str, device: str, *args: str) -> int:
    """Do what `holdfast run` does, with `save_every` so large that no save is due during the measurement."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from holdfast.runs.config import RunConfig
    from holdfast.supervise.supervisor import supervise

    config = RunConfig(
        script=str(Path(__file__).with_name("train.py")),
        args=(device, *args),
        workers=int(workers),
        recovery=recovery,
        save_every=1 << 30,
        max_restarts=0,
        hang_timeout=WITHIN,  # the protected loop pauses while the other arms are measured
    )
    return supervise(config, Path(folder) / "run").exit_code


def ratios(found: Found, arm: str, kind: int = WALL) -> list[float]:
    """Return the steps per second of `arm` relative to plain DDP, for every repeat."""
    return [round(times["plain"][kind] / times[arm][kind], 3) for times in found["times"]]


def table(found: dict[str, Found]) -> str:
    """Return a table with two lines for every case: the protected loop, and plain DDP again (the noise)."""
    lines = [
        "| | MB of gradients | plain, ms a step | | steps/s, x of plain | by processor time, x of plain | n |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    for case, result in found.items():
        step = statistics.median(times["plain"][WALL] for times in result["times"]) * 1000
        about = f"{case} | {result['megabytes']:.1f} | {step:.2f}"
        for arm in ("protected", "plain again"):
            kinds = " | ".join(spread(ratios(result, arm, kind)) for kind in (WALL, USED))
            lines.append(f"| {about} | {arm} | {kinds} | {len(result['times'])} |")
            about = " | | "
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Format the median and the range."""
    return f"**{statistics.median(values):.3f}** ({min(values):.3f} to {max(values):.3f})"


def about(options: argparse.Namespace) -> str:
    """Describe the machine, the versions and the options."""
    import torch

    where = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    return (
        f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, {where}, "
        f"{options.workers} workers, {'FSDP2' if options.sharded else 'DDP'}, recovery by {options.recovery}; load {os.getloadavg()[0]:.1f}"
    )


def processor() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(supervise(*sys.argv[2:]) if sys.argv[1:2] == ["supervise"] else main())
