"""The script that bench.py --sharded runs under torchrun: FSDP2, and checkpoints by torch.distributed.checkpoint (DCP).

Run: torchrun plain_sharded.py SUBJECT SAVE_EVERY FOLDER. All ranks write a checkpoint, and resume from the newest.
"""

import shutil
import sys
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from plain import join
from subjects import SUBJECTS, Notes, shard, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh


def main(name: str, save_every: str, folder: str) -> None:
    """Train until the process is killed, and note every step."""
    join()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    subject, rank, world = SUBJECTS[name], dist.get_rank(), dist.get_world_size()
    notes, checkpoints = Notes(Path(folder)), Path(folder) / "checkpoints"
    model, x, y = subject.made(device)
    shard(model, DeviceMesh.from_group(dist.group.WORLD, device.type))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(rank)
    for step in count(resume(checkpoints, model, optimizer)):
        notes.obey()
        index = torch.randint(len(x), (subject.share,), generator=generator).to(device)
        train(model, optimizer, x[index], y[index])
        notes.trained(step, rank, world)
        if (step + 1) % int(save_every) == 0:
            save(checkpoints, step + 1, model, optimizer)


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, and delete the one before the last. It is complete once it has the file `.metadata`."""
    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
        checkpoint_id=folder / str(step),
    )
    if dist.get_rank() == 0:
        for old in _steps(folder)[:-2]:
            shutil.rmtree(folder / str(old))


def resume(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint if there is one, and return the next step."""
    if not (steps := _steps(folder)):
        return 0
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder / str(steps[-1]))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return steps[-1]


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))


if __name__ == "__main__":
    main(*sys.argv[1:])
