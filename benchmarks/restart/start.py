"""Measure the start of `holdfast run` by part, in seconds of processor time, as it is now and as it was before.

    python benchmarks/restart/start.py [REPEATS]

Before, the garbage collector ran during the imports, and `torch.distributed.optim` was among them. Processor time is
compared, so that other work on the machine does not count.
"""

import json
import subprocess
import sys
from statistics import median

CHILD = """
import gc, json, sys, time
before = sys.argv[1] == "before"
if not before:
    gc.disable()
last = time.process_time()
parts = {"python": last}
def part(name):
    global last
    now = time.process_time()
    parts[name], last = now - last, now
import holdfast.cli
part("command")
import torch
part("torch")
import holdfast.supervise.supervisor
part("supervisor")
from importlib import import_module
from holdfast.supervise.preload import MODULES
for name in (*(["torch.distributed.optim"] if before else []), *MODULES):
    import_module(name)
part("compiler")
print(json.dumps(parts))
"""


def measured(arm: str) -> dict[str, float]:
    """Return the seconds of each part of a start, in a process of its own."""
    child = subprocess.run([sys.executable, "-c", CHILD, arm], capture_output=True, text=True, timeout=300, check=True)
    parts: dict[str, float] = json.loads(child.stdout)
    return {**parts, "all": sum(parts.values())}


def main() -> None:
    """Print a table of the medians over the repeats; the two versions take turns."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    for _ in range(repeats):
        for arm, starts in rows.items():
            starts.append(measured(arm))
    names = list(rows["now"][0])
    print(f"| seconds | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
    for arm, starts in rows.items():
        values = [f"{median(start[name] for start in starts):.2f}" for name in names]
        print(f"| {arm} ({repeats}) | {' | '.join(values)} |")


if __name__ == "__main__":
    main()
