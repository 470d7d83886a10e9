"""Compare the effect of storage faults on ways to save. Run: python benchmarks/storage-faults/bench.py

For every way to save, every point of a save and every kind of fault: steps 10 and 20 are saved without a fault, step 30
with the fault, and then the newest state is loaded, as in a restarted run. A cell gives the result of the save, and the
loaded step. Exits with 1 if holdfast loads wrong values, or none.
"""

import logging
import os
import platform
import socket
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from savers import SAVERS, Fault, Loaded, Saver, state_of

import holdfast
from holdfast.faults.storage import KINDS

GOOD, STRUCK = (10, 20), 30
WRONG, NOTHING = "**WRONG VALUES, no word**", "**nothing loads**"


def main() -> None:
    """Try every combination and print the table."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"holdfast {holdfast.__version__}, python {platform.python_version()}, torch {torch.__version__}\n")
    print(f"| | at | {' | '.join(KINDS)} |\n|---|---|{'---|' * len(KINDS)}")
    failed = False
    for name, make in SAVERS.items():
        for point in make.points:  # type: ignore[attr-defined]
            with tempfile.TemporaryDirectory() as folder:
                cells = [tried(make(Path(folder) / kind), Fault(kind, point)) for kind in KINDS]
            print(f"| {name} | {point} | {' | '.join(cells)} |", flush=True)
            failed |= name == "holdfast" and any(WRONG in cell or NOTHING in cell for cell in cells)
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


def tried(saver: Saver, fault: Fault) -> str:
    """Return the result of one save with a fault, and of the load after it."""
    if fault.kind == "lost-rename" and fault.point not in saver.renamed:
        return "(no rename)"
    for step in GOOD:
        saver.save(step, state_of(step), None)
    try:
        saved = saver.save(STRUCK, state_of(STRUCK), fault)
    except BaseException as error:  # DCP's errors do not derive from Exception
        saved = f"raises {type(error).__name__}"
    return "; ".join(word for word in (saved, came_back(saver, saved)) if word)


def came_back(saver: Saver, saved: str) -> str:
    """Describe the state that a restarted run loads."""
    try:
        loaded = saver.load()
    except BaseException as error:
        return f"{NOTHING}: {type(error).__name__}"
    if not right(loaded):
        return WRONG
    if loaded.step == STRUCK:
        which = "newest"
    elif loaded.message or saved.startswith("raises"):
        which = f"step {loaded.step}"
    else:
        which = f"step {loaded.step}, **no word**"
    return f"{which}, {loaded.message}" if loaded.message else which


def right(loaded: Loaded) -> bool:
    """Return True if the loaded state is the one saved for its step."""
    expected = state_of(loaded.step)
    return loaded.state["lr"] == expected["lr"] and torch.equal(
        torch.as_tensor(loaded.state["weight"]), expected["weight"]
    )


if __name__ == "__main__":
    main()
