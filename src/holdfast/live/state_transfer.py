"""Transfer of one member's state to other members over their connections, tensor by tensor and without pickle.

Tensors on a GPU are copied through pinned memory, one piece while the previous piece is being sent. `Buffers` keeps the
model buffers (such as batch-norm statistics) that every forward pass copies from rank 0. The first forward of a step
changes them, and a worker that replaces a lost member must begin that forward with the values before the change.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.distributed import BroadcastOptions

from holdfast import progress
from holdfast.checkpoint.payload import flatten, unflatten
from holdfast.distributed.gloo_link import Link
from holdfast.distributed.membership import Coordination

PIECE = 1 << 24  # bytes that are sent at once
MAX_TRIES = 9  # losses in one forward, and one more
_TAG = 0


def transfer(link: Link, rank: int, giver: int, takers: Collection[int], state: Callable[[], Any]) -> Any:
    """Send an object, the result of `state()`, from rank `giver` to the ranks `takers` over `link`.

    Return the object on the ranks `takers`, and None on all other ranks. `rank` is the rank of this process."""
    if rank == giver:
        _give(link, takers, state())
    return _take(link, giver) if rank in takers else None


def transfer_by_member(
    link: Link, coordination: Coordination, giver: int, takers: Collection[int], state: Callable[[], Any]
) -> Any:
    """Do the same as `transfer` with `giver` and `takers` as member numbers of `coordination`, instead of ranks."""
    members = coordination.members
    ranks = [members.index(taker) for taker in takers]
    return transfer(link, coordination.rank, members.index(giver), ranks, state)


def meet(link: Link) -> None:
    """Wait until every worker has called this function."""
    link.do("allreduce", [torch.zeros(1)])


def broadcast(link: Link, root: int, values: torch.Tensor) -> None:
    """Overwrite `values` on every worker with the values of rank `root`."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    link.do("broadcast", [values], options)
    progress.here.add_moved(values.nbytes)


def _give(link: Link, takers: Collection[int], state: Any) -> None:
    flat = flatten(state)
    tensors = {name: torch.as_tensor(value).detach() for name, value in flat.tensors.items()}
    about = [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors.items()]
    text = torch.frombuffer(bytearray(json.dumps([flat.extra, about]).encode()), dtype=torch.uint8)
    sending: list[Any] = []
    for piece in chain((torch.tensor([text.numel()]), text), _on_host(tensors)):
        progress.here.add_moved(piece.nbytes)
        before, sending = sending, [link.post("send", [piece], taker, _TAG) for taker in takers]
        for work in before:
            link.wait(work)
    for work in sending:
        link.wait(work)


def _take(link: Link, giver: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    _receive(link, giver, size)
    text = torch.empty(int(size), dtype=torch.uint8)
    _receive(link, giver, text)
    extra, about = json.loads(text.numpy().tobytes())
    tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, kind, shape in about}
    for piece in _pieces(tensors):
        _receive(link, giver, piece)
    return unflatten(dict(tensors), extra)


def _receive(link: Link, giver: int, values: torch.Tensor) -> None:
    link.do("recv", [values], giver, _TAG)
    progress.here.add_moved(values.nbytes)


def _on_host(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of `tensors` in pieces, as tensors in host memory, which gloo can send.

    Pieces from a GPU alternate between two buffers, so the third piece overwrites the first, and so on."""
    pinned: list[torch.Tensor] = []
    for number, piece in enumerate(_pieces(tensors)):
        if not piece.is_cuda:
            yield piece
            continue
        if not pinned:
            pinned = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        yield pinned[number % 2][: piece.numel()].copy_(piece)


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    for value in tensors.values():
        if value.numel():
            yield from value.contiguous().reshape(-1).view(torch.uint8).split(PIECE)


@dataclass(slots=True, eq=False)
class Buffers:
    """The model buffers that this rank last received from rank 0. `synced` is the number of broadcasts in this step."""

    synced: int = 0
    values: list[torch.Tensor] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)  # of the script's buffer tensors
    _given: bool = False  # the values arrived in a recovery, and the next forward uses them

    def sync(self, broadcast: Callable[[], None], buffers: list[torch.Tensor], recover: Callable[[], None]) -> None:
        """Set `buffers` to rank 0's values: call `broadcast`. If a worker is lost meanwhile, `recover` and try again."""
        for number in range(1, MAX_TRIES + 1):
            if self._given:
                break
            try:
                broadcast()
                break
            except RuntimeError:  # gloo has no error type for a lost peer
                if number == MAX_TRIES:
                    raise
                recover()
        if self._given:
            torch._foreach_copy_(buffers, self.values)
            self._given = False
        elif len(self.values) == len(buffers):
            torch._foreach_copy_(self.values, buffers)
        else:
            self.values = [buffer.clone() for buffer in buffers]
            self.ids.update(map(id, buffers))
        self.synced += 1

    def use(self, values: list[torch.Tensor]) -> None:
        """Make the next forward pass use `values`, sent by another worker, as the model's buffers."""
        self.values, self._given = values, True
