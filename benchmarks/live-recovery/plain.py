"""The script that bench.py runs under torchrun: DDP, and a checkpoint that rank 0 writes and all ranks resume from.

Run: torchrun plain.py SUBJECT SAVE_EVERY FOLDER
"""

import os
import sys
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from subjects import SUBJECTS, Notes, train
from torch.nn.parallel import DistributedDataParallel


def main(name: str, save_every: str, folder: str) -> None:
    """Train until the process is killed, and note every step."""
    join()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    subject, rank, world = SUBJECTS[name], dist.get_rank(), dist.get_world_size()
    notes, checkpoint = Notes(Path(folder)), Path(folder) / "checkpoint.pt"
    model, x, y = subject.made(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(rank)
    for step in count(resume(checkpoint, model, optimizer, device)):
        notes.obey()
        index = torch.randint(len(x), (subject.share,), generator=generator).to(device)
        train(model, optimizer, x[index], y[index])
        notes.trained(step, rank, world)
        if rank == 0 and (step + 1) % int(save_every) == 0:
            save(checkpoint, step + 1, model, optimizer)


def join() -> None:
    """Create the process group on the launcher's store, under a prefix for this attempt.

    Without the prefix, ranks restarted by torchrun find the addresses of dead ranks in its store, and time out.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    attempt = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world)


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint."""
    torch.save(
        {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.with_suffix(".tmp")
    )
    os.replace(path.with_suffix(".tmp"), path)


def resume(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Load the checkpoint if there is one, and return the next step."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main(*sys.argv[1:])
