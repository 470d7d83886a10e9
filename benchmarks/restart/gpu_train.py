"""The script that gpu.py restarts: a GPT-like model with AdamW, under holdfast or under torchrun with torch.save.

It notes the time at which each part of its start is done, in files of the folder NOTES.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH, SAVE_EVERY = 50257, 768, 12, 64, 4, 20
if "SMALL" in os.environ:
    VOCABULARY, WIDTH, LAYERS, LENGTH = 2000, 96, 12, 8
began, parts = time.time(), {}


def done(part: str) -> None:
    """Note that a part of the start is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    parts[part] = time.time()


class Model(nn.Module):
    """A transformer, with 124 million parameters unless it is SMALL."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.tokens(x)) @ self.tokens.weight.T


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def with_holdfast(notes: Path) -> None:
    import holdfast as hf

    run = hf.attach()
    done("attach")
    model = Model()
    done("model on the CPU")
    model = model.to(run.device)
    done("to the GPU")
    model = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    done("replicate")
    run.protect(model=model, optimizer=optimizer)
    done("restore")
    for batch in run.batches(data(), global_batch=BATCH, num_epochs=1000):
        (x,) = batch.to(run.device)
        if "first batch" not in parts:
            done("first batch")
        run.log(loss=step(model, optimizer, x))
        note(notes, batch.step)


def with_torchrun(notes: Path) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    done("attach")
    model = Model()
    done("model on the CPU")
    model = model.to(device)
    done("to the GPU")
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    done("replicate")
    path, start = notes / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    done("restore")
    samples = data()
    for number in range(start, 100_000):
        (x,) = samples[number * BATCH % 4096 : number * BATCH % 4096 + BATCH]
        x = x.to(device)
        if "first batch" not in parts:
            done("first batch")
        step(ddp, optimizer, x)
        note(notes, number)
        if number % SAVE_EVERY == SAVE_EVERY - 1:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number + 1}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)


def data() -> TensorDataset:
    return TensorDataset(torch.randint(VOCABULARY, (4096, LENGTH), generator=torch.Generator().manual_seed(1)))


def note(notes: Path, number: int) -> None:
    """Write the parts of the start after the first step, and the number of every step."""
    if "first step" not in parts:
        done("first step")
        text = json.dumps({"pid": os.getpid(), "began": began, "parts": parts})
        write(notes / f"start-{time.time_ns()}.json", text)
    write(notes / "step", str(number))


def write(path: Path, text: str) -> None:
    """Write a file that a reader never sees half written."""
    path.with_name(f".{path.name}").write_text(text)
    path.with_name(f".{path.name}").replace(path)


if __name__ == "__main__":
    {"holdfast": with_holdfast, "torchrun": with_torchrun}[sys.argv[1]](Path(sys.argv[2]))
