"""Train a small network with DDP on gloo, resuming from a checkpoint, and note the time of every stage.

The script is plain torch: torchrun and holdfast run the same file. Run: torchrun train.py FOLDER
"""

import json
import os
import sys
import time
from pathlib import Path

STARTED = time.time()

import torch  # noqa: E402 - the import is part of the measurement
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

STEPS, SAVE_EVERY, WIDTH, BATCH = 10_000, 5, 256, 32


def main() -> None:
    """Train: the first attempt until it is killed, the resumed one for a few steps."""
    folder = Path(sys.argv[1])
    note(folder, "script", at=STARTED)
    join()
    note(folder, "group")
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    note(folder, "model")
    first = resume(folder, model, optimizer)
    note(folder, "resumed", step=first)
    for step in range(first, first + 5 if first else STEPS):
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(folder, "step" if step > first else "first", step=step)
        if dist.get_rank() == 0 and (step + 1) % SAVE_EVERY == 0:
            save(folder, step + 1, model, optimizer)
    # Otherwise DDP drops the last reference to the group when main ends, and may wait for a thread that waits for the GIL.
    globals()["kept"] = dist.group.WORLD
    dist.destroy_process_group()


def join() -> None:
    """Create the process group on the launcher's store, under a prefix for this attempt.

    Without the prefix, ranks restarted by torchrun find the addresses of dead ranks in its store, and time out.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    attempt = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world)


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "checkpoint.tmp")
    os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")


def resume(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if there is one, and return the next step."""
    if not (folder / "checkpoint.pt").exists():
        return 0
    state = torch.load(folder / "checkpoint.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def note(folder: Path, what: str, at: float | None = None, **more: object) -> None:
    """Append one line to the moments in `folder`, in a single write."""
    line = {"what": what, "time": at or time.time(), "rank": int(os.environ["RANK"]), "pid": os.getpid(), **more}
    with (folder / "moments.jsonl").open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
