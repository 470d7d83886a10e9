"""The state of one member, handed to others over the link of the group, tensor by tensor; nothing is pickled."""

import json
from typing import Any

import torch
from torch.distributed import BroadcastOptions

from holdfast import progress
from holdfast.ddp.link import Link
from holdfast.state import Flat, flatten, unflatten


def give(link: Link, rank: int, state: Any) -> None:
    """Hand this state to all members; `rank` is ours among them."""
    flat = flatten(state)
    tensors = {name: torch.as_tensor(value).detach() for name, value in flat.tensors.items()}
    about = [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors.items()]
    text = torch.frombuffer(bytearray(json.dumps([flat.extra, about]).encode()), dtype=torch.uint8)
    broadcast(link, rank, torch.tensor([text.numel()]))
    broadcast(link, rank, text)
    for value in tensors.values():
        if value.numel():
            broadcast(link, rank, _bytes(value.cpu().contiguous()))


def take(link: Link, giver: int) -> Any:
    """The state that the member with this rank hands over."""
    size = torch.zeros(1, dtype=torch.int64)
    broadcast(link, giver, size)
    text = torch.empty(int(size), dtype=torch.uint8)
    broadcast(link, giver, text)
    extra, about = json.loads(text.numpy().tobytes())
    tensors = {}
    for name, kind, shape in about:
        tensors[name] = torch.empty(shape, dtype=getattr(torch, kind))
        if tensors[name].numel():
            broadcast(link, giver, _bytes(tensors[name]))
    flat = Flat(dict(tensors), extra)
    return unflatten(flat.tensors, flat.extra)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """The same memory, as what every kind of number is sent as."""
    return values.reshape(-1).view(torch.uint8)


def broadcast(link: Link, root: int, values: torch.Tensor) -> None:
    """Everybody has what the member with this rank has."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    link.do(lambda group: group.broadcast([values], options))
    progress.here.moves(values.nbytes)
