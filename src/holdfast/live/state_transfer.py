"""The state of one member, handed to others over the link of the group, tensor by tensor; nothing is pickled.

What lies on a device leaves it through pinned memory, the next piece while the one before is on its way.

Buffers such as batch normalization's, which every forward takes over from rank 0, where a run recovers live.

A window's first forward changes them, so they are kept as they came: a member that is lost in the middle of a step may
be replaced by one that computes the same forward with the same buffers.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import BroadcastOptions

from holdfast import progress
from holdfast.checkpoint.state_tree import Flat, flatten, unflatten
from holdfast.distributed.gloo_link import Link

PIECE = 1 << 24  # bytes that are sent at once
_TAG = 0


def transfer(link: Link, rank: int, giver: int, takers: Collection[int], state: Callable[[], Any]) -> Any:
    """Hand the state of the giver to the takers, all by their ranks; what we got, if anything."""
    if rank == giver:
        _give(link, takers, state())
    return _take(link, giver) if rank in takers else None


def meet(link: Link) -> None:
    """Go on once every member has come as far."""
    link.do("allreduce", [torch.zeros(1)])


def broadcast(link: Link, root: int, values: torch.Tensor) -> None:
    """Everybody has what the member with this rank has."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    link.do("broadcast", [values], options)
    progress.here.add_moved(values.nbytes)


def _give(link: Link, takers: Collection[int], state: Any) -> None:
    flat = flatten(state)
    tensors = {name: torch.as_tensor(value).detach() for name, value in flat.tensors.items()}
    about = [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors.items()]
    text = torch.frombuffer(bytearray(json.dumps([flat.extra, about]).encode()), dtype=torch.uint8)
    for piece in (torch.tensor([text.numel()]), text):
        _sent(link, _sending(link, takers, piece))
    before: list[Any] = []
    for piece in _on_host(tensors):
        sending = _sending(link, takers, piece)
        _sent(link, before)
        before = sending
    _sent(link, before)


def _sending(link: Link, takers: Collection[int], piece: torch.Tensor) -> list[Any]:
    progress.here.add_moved(piece.nbytes)
    return [link.post("send", [piece], taker, _TAG) for taker in takers]


def _sent(link: Link, works: Iterable[Any]) -> None:
    for each in works:
        link.wait(each)


def _take(link: Link, giver: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    _receive(link, giver, size)
    text = torch.empty(int(size), dtype=torch.uint8)
    _receive(link, giver, text)
    extra, about = json.loads(text.numpy().tobytes())
    tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, kind, shape in about}
    for piece in _pieces(tensors):
        _receive(link, giver, piece)
    flat = Flat(dict(tensors), extra)
    return unflatten(flat.tensors, flat.extra)


def _receive(link: Link, giver: int, values: torch.Tensor) -> None:
    link.do("recv", [values], giver, _TAG)
    progress.here.add_moved(values.nbytes)


def _on_host(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The pieces of these, in memory that gloo can send; each is good until the next but one."""
    pinned: list[torch.Tensor] = []
    for number, piece in enumerate(_pieces(tensors)):
        if not piece.is_cuda:
            yield piece
            continue
        if not pinned:
            pinned = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        yield pinned[number % 2][: piece.numel()].copy_(piece)


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of these, a piece at a time."""
    for value in tensors.values():
        if value.numel():
            yield from value.contiguous().reshape(-1).view(torch.uint8).split(PIECE)


TIMES = 9  # that buffers are asked for: so many losses in one forward


@dataclass(slots=True, eq=False)
class Buffers:
    """The buffers that came from rank 0 in this window, and how often they came."""

    synced: int = 0
    _values: list[torch.Tensor] = field(default_factory=list)
    _given: bool = False  # they came from another, and the next forward uses them

    @property
    def are_there(self) -> bool:
        """Whether the models have any."""
        return bool(self._values)

    def sync(self, broadcast: Callable[[], None], buffers: list[torch.Tensor], recover: Callable[[], None]) -> None:
        """Take over rank 0's buffers before a forward; if members are lost meanwhile, those of the new rank 0."""
        for again in range(TIMES):
            if self._given:
                break
            try:
                broadcast()
                break
            except RuntimeError:  # gloo has no type for a peer that is gone
                if again == TIMES - 1:
                    raise
                recover()
        if self._given:
            torch._foreach_copy_(buffers, self._values)
            self._given = False
        elif len(self._values) == len(buffers):
            torch._foreach_copy_(self._values, buffers)
        else:
            self._values = [each.clone() for each in buffers]
        self.synced += 1

    def values(self) -> list[torch.Tensor]:
        """As they came from rank 0."""
        return self._values

    def use(self, values: list[torch.Tensor]) -> None:
        """Have the next forward use these, which another got from rank 0."""
        self._values, self._given = values, True
