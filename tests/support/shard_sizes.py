"""Trains a sharded model on four ranks, each of which keeps a copy of another rank's shards, and measures their bytes.

Run as a script with a folder. Rank 0 writes `sizes.json`: the parameters, and for each rank the size of its copy and the
bytes that it sends to the next rank in a step.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # FSDP imports it, which takes seconds: here once for all ranks
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # they are public
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from holdfast.distributed.gloo_link import Link
from holdfast.live.sharded.operations import Ring
from holdfast.live.sharded.shadow import OwnShards, exchange_copies
from holdfast.live.sharded.spare_work import SpareWork
from holdfast.train.state.protected import Protected

SIZE = 4


class CountingLink(Link):
    """A link that counts the bytes that it sends to other ranks."""

    sent = 0

    def post(self, name: str, tensors: list[torch.Tensor], *arguments: Any) -> Any:
        self.sent += sum(tensor.nbytes for tensor in tensors) if name == "send" else 0
        return super().post(name, tensors, *arguments)


def measured(rank: int, link: CountingLink) -> dict[str, Any]:
    """Train two steps; return the parameters of the model, and of each rank the bytes of its copy and of the last step."""
    mesh = init_device_mesh("cpu", (SIZE,))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = AdamW(model.parameters())
    own = OwnShards(Protected({"model": model, "optimizer": optimizer}))
    shadow = exchange_copies(own, link, Ring(rank, SIZE), SpareWork())

    def before_step(*_: Any) -> None:
        link.sent = 0
        shadow.exchange_gradients("optimizer", []).run(link, Ring(rank, SIZE), lambda _: None)
        shadow.step("optimizer")

    optimizer.register_step_pre_hook(before_step)
    for _ in range(2):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sizes: list[Any] = [None] * SIZE
    dist.all_gather_object(sizes, (shadow.nbytes, link.sent))
    return {"parameters": parameters, "copied": [copied for copied, _ in sizes], "sent": [sent for _, sent in sizes]}


def main(folder: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    children = [pid for rank in range(SIZE) if (pid := start_rank(rank, store.port, folder))]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


def start_rank(rank: int, port: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    torch.set_num_threads(1)

    def store(name: str) -> PrefixStore:
        return PrefixStore(name, TCPStore("127.0.0.1", port, is_master=False))

    dist.init_process_group("gloo", store=store("torch"), rank=rank, world_size=SIZE)
    link = CountingLink()
    link.connect(lambda: store("ranks"), rank, SIZE, lambda: False)
    try:
        sizes = measured(rank, link)
        if rank == 0:
            (folder / "sizes.json").write_text(json.dumps(sizes))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    HashStore()  # torch.distributed is imported before the fork
    main(Path(sys.argv[1]))
