"""The replicas of a model under hybrid sharding (HSDP): other ranks hold the same shards, so no copies of them are kept.

All replicas make the same optimizer steps. Just before each of them, all ranks exchange a digest of a few of their
parameters. With it, each rank checks that the replicas have the same bits. It is also the collective after which the
state changes: it completes on no rank before all ranks have reduced their gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.distributed.gloo_link import Link
from holdfast.live.sharded.operations import Meanwhile, Ring
from holdfast.live.sharded.shadow import OwnShards, Shadow, sample


class Replicas:
    """The ranks that hold the same shards as this rank. It has the methods by which a `Shadow` is used."""

    nbytes = 0

    def __init__(self, own: OwnShards, others: Sequence[int]) -> None:
        self._own, self._others = own, others
        self.is_exact = True
        """False once a sample of this rank's parameters differs from the sample of another replica."""

    def exchange_gradients(self, _: str, __: object) -> "Agreement":
        """Return the exchange of digests that precedes a step of an optimizer."""
        return Agreement(torch.tensor([sample(self._own.sampled)]), self)

    def compare(self, digests: torch.Tensor, rank: int) -> None:
        """Compare the digests of all ranks with the digest of this `rank`."""
        self.is_exact &= all(digests[other] == digests[rank] for other in self._others)

    def step(self, _: str) -> None:
        """Do nothing: the other replicas make the optimizer step themselves."""

    def capture(self) -> dict[str, Any]:
        """Return the values of this rank's shards and of their optimizer states, without copying them."""
        return self._own.capture()


class Agreement:
    """An exchange of the digests of all ranks."""

    def __init__(self, digest: torch.Tensor, replicas: Replicas) -> None:
        self._digest, self._replicas = digest, replicas

    def run(self, link: Link, ring: Ring, meanwhile: Meanwhile) -> None:
        digests = self._digest.new_empty(ring.size)
        work = link.post("_allgather_base", digests, self._digest)
        meanwhile(work)
        link.wait(work)
        self._replicas.compare(digests, ring.rank)

    def conclude(self) -> None:
        """Do nothing: without the other digests, the next step compares them."""

    def run_again(self, link: Link, ring: Ring) -> bool:
        raise AssertionError("the state has changed since the digests were exchanged")

    can_serve: Any = None  # a step in which the state has changed is never repeated
    serve: Any = None

    def release(self) -> None:
        """Do nothing: it keeps nothing."""


Copies = Shadow | Replicas


def ranks_with_copies(own: OwnShards, ring: Ring) -> Mapping[int, tuple[int, ...]]:
    """Return, for each rank, the ranks that hold a copy of its shards: its replicas, or the next rank."""
    if not own.has_replicas:
        return {rank: (ring.at(rank).next,) for rank in range(ring.size)}
    columns = next(iter(own.parameters.values())).device_mesh.mesh.T.tolist()  # of ranks with the same shards
    return {rank: tuple(other for other in column if other != rank) for column in columns for rank in column}
