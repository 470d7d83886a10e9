"""Writes checkpoints of a sharded model as torchtitan and accelerate write them, and its weights to expected.pt.

Run as a script with a folder. Three ranks train the model of `fsdp_script` for a step and save it with DCP.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp_script import sharded_network

RANKS = 3


def train_and_save(folder: Path, rank: int) -> None:
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(7)
    model = sharded_network(init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 5)).sum().backward()
    optimizer.step()
    weights = get_model_state_dict(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    step = {"step": torch.tensor(1, dtype=torch.int32)}
    dcp.save({**weights, "optimizer": moments, "train_state": step}, checkpoint_id=folder / "torchtitan" / "step-1")
    dcp.save({"model": weights}, checkpoint_id=folder / "accelerate" / "pytorch_model_fsdp_0")
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "accelerate" / "optimizer_0"
    )
    whole: dict[str, Any] = {key: value.full_tensor() for key, value in weights.items()}
    if rank == 0:
        torch.save(whole, folder / "expected.pt")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    children = []
    for rank in range(RANKS):
        if not (child := os.fork()):
            train_and_save(folder, rank)
            os._exit(0)
        children.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
