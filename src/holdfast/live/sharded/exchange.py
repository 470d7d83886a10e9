"""Exchanges in which every rank sends the next rank the data for the copy of its shards that the next rank keeps.

They complete on no rank before all ranks have received their values. A rank that is interrupted in an exchange which
another rank has completed has therefore received everything.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.distributed.gloo_link import Link
from holdfast.live.sharded.derived_gradients import derive, times
from holdfast.live.sharded.operations import Meanwhile, Reduce, Ring, nothing

NOT_DERIVED = -1  # as the digest of places, which is positive


class Exchange:
    """An exchange in which each rank sends `own` to the next rank and receives the values of `copies`.

    `write` is called with each tensor in `copies` and its values."""

    def __init__(
        self,
        own: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
        write: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        self._own, self._copies, self._write = own, copies, write
        self._received: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []

    def run(self, link: Link, ring: Ring, meanwhile: Meanwhile) -> None:
        self.transfer(link, ring, meanwhile)
        link.do("allreduce", [torch.zeros(1)])
        self.conclude()

    def transfer(
        self, link: Link, ring: Ring, meanwhile: Meanwhile, *, sends: bool = True, receives: bool = True
    ) -> None:
        """Send the values to the next rank, if it needs them, and receive those of the previous rank."""
        works = []
        self._received = []  # new memory in every try: the operations of a broken connection may never end
        for kind in sorted({value.dtype for value in self._own}, key=str):
            own = [value.detach().reshape(-1) for value in self._own if value.dtype == kind]
            copies = [copied for copied in self._copies if copied.dtype == kind]
            if sends:
                works.append(link.post("send", [torch.cat(own).cpu()], ring.next, 0))
            if receives:
                incoming = torch.empty(sum(copied.numel() for copied in copies), dtype=kind)
                works.append(link.post("recv", [incoming], ring.previous, 0))
                self._received.append((copies, incoming))
        if works:
            meanwhile(works[-1])
        for work in works:
            link.wait(work)

    def conclude(self) -> None:
        """Write the values that have arrived. All have, once any rank has completed the exchange."""
        for copies, incoming in self._received:
            values = incoming.split([copied.numel() for copied in copies])
            for copied, new in zip(copies, values, strict=True):
                self._write(copied, new.view_as(copied))

    def run_again(self, link: Link, ring: Ring) -> bool:
        raise AssertionError("the state has changed since the values were exchanged")

    can_serve: Any = None  # a step in which the state has changed is never repeated
    serve: Any = None

    def release(self) -> None:
        self._own, self._copies, self._received = [], [], []


class GradientExchange(Exchange):
    """An exchange of the gradients before an optimizer step, and of a digest by which the next rank checks its copy.

    All ranks first tell each other how their gradients follow from `reductions`, this step's reduced gradients. Only
    gradients that the next rank cannot derive are sent. `check` is called with the digest of the previous rank."""

    def __init__(
        self,
        own: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
        reductions: Sequence[Reduce],
        digest: int,
        check: Callable[[int], object],
    ) -> None:
        super().__init__(own, copies, set_gradient)
        self._derived = derive(own, reductions)
        places, factor = (self._derived.digest, self._derived.factor) if self._derived else (NOT_DERIVED, 1.0)
        self._header = torch.tensor([digest, places, *struct.unpack("q", struct.pack("d", factor))])
        self._check = check
        self._previous_digest, self._factor = digest, 1.0
        self._derives = False  # the gradients of the previous rank

    def run(self, link: Link, ring: Ring, meanwhile: Meanwhile) -> None:
        headers = self._header.new_empty(ring.size * self._header.numel())
        work = link.post("_allgather_base", headers, self._header)
        meanwhile(work)
        link.wait(work)
        self._previous_digest, places, factor = headers.view(ring.size, -1)[ring.previous].tolist()
        next_places = int(headers.view(ring.size, -1)[ring.next][1])
        (self._factor,) = struct.unpack("d", struct.pack("q", factor))
        own_places = int(self._header[1])
        self._derives = own_places == places != NOT_DERIVED
        self.transfer(
            link, ring, nothing, sends=not own_places == next_places != NOT_DERIVED, receives=not self._derives
        )
        link.do("allreduce", [torch.zeros(1)])
        self.conclude()

    def conclude(self) -> None:
        """Set the gradients of the copies, and compare the digests."""
        self._check(self._previous_digest)
        super().conclude()
        if self._derives and self._derived:
            for copied, values in zip(self._copies, self._derived.of_previous(self._copies), strict=True):
                set_gradient(copied, times(values, self._factor))

    def release(self) -> None:
        super().release()
        self._derived = None


def set_gradient(copied: torch.Tensor, values: torch.Tensor) -> None:
    """Make `values` the gradient of a copied parameter."""
    copied.grad = values.to(copied.device)
