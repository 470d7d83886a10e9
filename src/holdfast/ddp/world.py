"""Which rank of how many this process is, and how the ranks tell each other small things.

Under a supervisor or torchrun the ranks share a store and a process group; a process alone is a world of one.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they are public
from torch.distributed.rendezvous import rendezvous

from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """This process among its peers."""

    rank: int
    size: int
    store: Store
    grouped: bool
    device: torch.device

    def tell(self, topic: str, value: str) -> None:
        """Say something once, to whoever hears this topic."""
        self.store.set(topic, value)

    def hear(self, topic: str) -> str:
        """What was told, as soon as it is."""
        return bytes(self.store.get(topic)).decode()

    def is_told(self, topic: str) -> bool:
        """Whether it was told already."""
        return bool(self.store.check([topic]))

    def from_first(self, topic: str, value: str | None) -> str:
        """What rank 0 has to say, on every rank; only rank 0 gives the value."""
        if value is not None:
            self.tell(topic, value)
            return value
        return self.hear(topic)

    def gather(self, topic: str, value: str) -> list[str] | None:
        """What every rank has to say, in order, on rank 0; nothing on the others, which do not wait."""
        if self.rank:
            self.tell(f"{topic}/{self.rank}", value)
            return None
        topics = [f"{topic}/{rank}" for rank in range(1, self.size)]
        others = self.store.multi_get(topics) if topics else []
        for each in topics:
            self.store.delete_key(each)
        return [value, *(bytes(each).decode() for each in others)]


def join(timeout: float) -> World:
    """Find our peers, and be ready to add up gradients with them; collectives fail after so many seconds."""
    if dist.is_initialized():
        raise BadInput("attach() starts the process group itself: leave out init_process_group")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return World(rank=0, size=1, store=HashStore(), grouped=False, device=_device())
    patience = timedelta(seconds=timeout)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _device()
    store = _store(patience)
    store.set_timeout(patience)
    group = PrefixStore("group", store)
    dist.init_process_group(_backend(), store=group, rank=rank, world_size=size, timeout=patience)
    return World(rank=rank, size=size, store=PrefixStore("run", store), grouped=True, device=device)


# A group that a model outlives would be freed with the model, which waits for a thread while holding the interpreter's
# lock, and at times for ever (torch 2.13 with gloo). So it is never freed.
_kept: list[object] = []


def leave() -> None:
    """Part from our peers in order: a peer that goes without a word may be taken for one that crashed."""
    if dist.is_initialized():
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()


def _store(patience: timedelta) -> Store:
    """The store that whoever started us provides; each round of a supervisor has its own part of it."""
    if "HOLDFAST_ROUND" not in os.environ:
        found: Store = next(rendezvous("env://", timeout=patience))[0]
        return found
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = TCPStore(address, port, is_master=False, timeout=patience)
    return PrefixStore(f"holdfast/{os.environ['HOLDFAST_ROUND']}", server)


def _device() -> torch.device:
    """The accelerator that is this rank's, if there is any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _backend() -> str:
    """NCCL where every rank has a device of its own, which it insists on; gloo anywhere."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    own_device = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    return "cpu:gloo,cuda:nccl" if own_device else "gloo"
