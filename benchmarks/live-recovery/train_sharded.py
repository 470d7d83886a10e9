"""The script that bench.py --sharded runs under holdfast: FSDP2, or HSDP if there are several replicas.

Run: holdfast run train_sharded.py -- SUBJECT WORKERS FOLDER REPLICAS
"""

import sys
from pathlib import Path

import torch
from subjects import SUBJECTS, Notes, Numbered, shard, train, warm_up

import holdfast as hf


def main(name: str, workers: str, folder: str, replicas: str) -> None:
    """Train until the process is killed, and note every step."""
    run, subject = hf.attach(), SUBJECTS[name]
    notes = Notes(Path(folder))
    model, x, y = subject.made(run.device)
    if run.device.type == "cuda":
        warm_up(model, x[: subject.share], y[: subject.share])
    shard(model, run.device_mesh(replicas=int(replicas)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=run.device.type == "cuda")
    run.protect(model=model, optimizer=optimizer)

    def take(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.tensor(ids, device=x.device)
        return x[index], y[index]

    batch = subject.share * int(workers)
    for window in run.batches(Numbered(len(x)), global_batch=batch, num_epochs=1 << 20, collate_fn=take):
        notes.obey()
        train(model, optimizer, *window.data)
        notes.trained(window.step, run.rank, run.world_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
