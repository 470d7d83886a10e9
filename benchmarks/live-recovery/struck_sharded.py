"""The sharded training script that strikes.py runs with --sharded, in one of several forms.

Run: holdfast run struck_sharded.py -- FORM EPOCHS CONTROL. The forms:

- `fsdp`: FSDP2 with AdamW, dropout, clipping and a schedule; `hsdp`: the same on two replicas;
- `fsdp-bf16`: computes in bfloat16, and computes activations again in backward;
- `fsdp-accumulated`, `hsdp-accumulated`: two micro-batches in each step.

Before each step and at the end, every rank notes digests of its shards in a file next to CONTROL (see whole_states.py).
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from struck import BATCH, CLASSES, PAUSE, SAMPLES, raise_on_signal
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import holdfast as hf

FORMS = ("fsdp", "hsdp", "fsdp-bf16", "fsdp-accumulated", "hsdp-accumulated")
INPUTS, WIDTH = 32, 45  # 4 and 6 ranks get shards of different sizes; of the last layer, two of 6 ranks get nothing


class Block(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.residual, x, use_reentrant=False) if self.recompute else self.residual(x)

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(gelu(self.linear(self.norm(x))))


def sharded_model(run: hf.Run, form: str) -> nn.Module:
    """Return a network of four layers, each sharded on its own."""
    reduced = form.endswith("bf16")
    blocks = [Block(recompute=reduced) for _ in range(2)]
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))
    how: dict[str, Any] = {"mesh": run.device_mesh(replicas=2 if form.startswith("hsdp") else 1)}
    if reduced:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    return model


class Notes:
    """The digests that one rank notes of the parameters and moments that it holds."""

    def __init__(self, run: hf.Run, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._run, self._model, self._optimizer = run, model, optimizer
        self._file = (folder / f"rank-{run.rank}.jsonl").open("a", buffering=1)  # a write for each line

    def note(self, step: int) -> None:
        """Note the state before `step`."""
        rows, shared = 0, []
        for name, parameter in self._model.named_parameters():
            rows += _digest_of_rows(name, parameter)
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if hasattr(value, "to_local"):
                    rows += _digest_of_rows(f"{name} {key}", value)
                else:
                    shared.append(f"{name} {key} {value}")
        shared += [str(group["lr"]) for group in self._optimizer.param_groups]
        where = {"attempt": self._run.attempt, "step": step, "world": self._run.world_size, "rank": self._run.rank}
        line = {
            **where,
            "replica": self._replica(),
            "rows": rows % 2**64,
            "shared": _digest("\n".join(shared).encode()),
        }
        self._file.write(json.dumps(line) + "\n")

    def _replica(self) -> int:
        mesh = next(self._model.parameters()).device_mesh  # type: ignore[attr-defined]
        return mesh.get_coordinate()[0] if mesh.ndim > 1 else 0


def _digest_of_rows(name: str, tensor: Any) -> int:
    """Return the sum of the digests of the rows that this rank holds: over all ranks, it depends on no division."""
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    share = -(-tensor.shape[0] // mesh.shape[-1])  # rows per rank, as FSDP divides them
    first = share * mesh.get_coordinate()[-1]
    rows = local.reshape(len(local), -1).numpy() if local.numel() else ()
    return sum(
        int(_digest(f"{name} {first + row} ".encode() + values.tobytes()), 16) for row, values in enumerate(rows)
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def main(form: str, epochs: str, control: str) -> None:
    """Train; all random numbers of the network come from the seed of the run."""
    torch.set_num_threads(1)
    raise_on_signal()
    run = hf.attach()
    model = sharded_model(run, form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.7)
    run.protect(model=model, optimizer=optimizer, schedule=schedule)
    notes, hurry = Notes(run, Path(control).with_name("notes"), model, optimizer), Path(control) / "hurry"
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, INPUTS, generator=generator)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    micro_batches, step = 2 if form.endswith("accumulated") else 1, -1
    batches = run.batches(TensorDataset(x, y), global_batch=BATCH, num_epochs=int(epochs), micro_batches=micro_batches)
    for batch in batches:
        if batch.step != step:
            step = batch.step
            notes.note(step)
        if not hurry.exists():
            time.sleep(PAUSE / micro_batches)
        x, y = batch
        loss = cross_entropy(model(x).float(), y)
        (loss * batch.weight).backward()
        if batch.is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        run.log(loss=loss.item())
    notes.note(len(batches) // micro_batches)


if __name__ == "__main__":
    main(*sys.argv[1:])
