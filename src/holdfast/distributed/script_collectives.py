"""What a script exchanges by itself, over torch.distributed's groups, in a run that recovers live.

What the run exchanges goes over connections that are made anew among whoever is left. A group of torch's does not
outlive its first lost member, and whoever takes the place of a lost one has missed what came over it before. So a run
whose script uses one starts again after a loss. Once members have changed, the default group is one that still knows
rank and size, and has the run start again when something is to be exchanged over it.
"""

import logging
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup, Store, distributed_c10d  # type: ignore[attr-defined]  # public

from holdfast import progress
from holdfast.progress import fallen_back

logger = logging.getLogger(__name__)

SCRIPT_COLLECTIVES = (
    "the script exchanges by torch.distributed itself, whose groups end with the first member that leaves; run.sum and "
    "run.mean go on with the others"
)

_BACKEND = "holdfast_outlived"
_WAYS = ("all", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send")


def has_exchanged() -> bool:
    """Whether the script has exchanged something over a group of torch's, or has made one for that.

    The supervisor hears of it, and whoever reads what rank 0 prints, once.
    """
    groups = list(distributed_c10d._world.pg_map)
    found = len(groups) > 1 or any(map(_has_been_used, groups))
    if found and not progress.here.has_exchanged:
        progress.here.exchanges()
        if dist.get_rank() == 0:
            logger.warning("after the loss of a worker the run starts again, as with restart: %s.", SCRIPT_COLLECTIVES)
    return found


def outlive(rank: int, size: int) -> None:
    """Have a default group that knows rank and size, and nothing else: members have changed, or we were never in one."""
    if isinstance(dist.group.WORLD, Outlived) and dist.get_rank() == rank:
        return
    let_go()
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _outlived, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=HashStore(), rank=rank, world_size=size)
    if (group := dist.group.WORLD) is not None:
        distributed_c10d._world.pg_map[group] = (dist.Backend.GLOO, NoStore())  # for groups that are made by it


# A group that a model outlives would be freed with the model, which waits for a thread while holding the interpreter's
# lock, and at times for ever (torch 2.13 with gloo). So it is never freed.
_kept: list[object] = []


def let_go() -> None:
    """Part with the default group, if there is one."""
    if dist.is_initialized():
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()


class Outlived(ProcessGroup):
    """A group over which nothing can be exchanged any more."""

    @property
    def group_name(self) -> Any:
        """What functional collectives find their group by."""
        _fall_back()


class NoStore(Store):
    """The store of a group over which nothing can be exchanged any more: no other group can be made by it."""


def _outlived(store: Store, rank: int, size: int, timeout: timedelta) -> Outlived:
    return Outlived(rank, size)  # type: ignore[call-arg]  # there is such a form


def _fall_back(*_: Any, **__: Any) -> NoReturn:
    progress.here.exchanges()
    raise fallen_back(SCRIPT_COLLECTIVES)


def _has_been_used(group: ProcessGroup) -> bool:
    """Every exchange over a group has a number."""
    count: int = 0 if isinstance(group, Outlived) else group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return count > 0


for _name in filter(lambda name: name.lstrip("_").startswith(_WAYS), dir(ProcessGroup)):
    setattr(Outlived, _name, _fall_back)
for _name in ("add", "check", "compare_set", "get", "set", "wait"):
    setattr(NoStore, _name, _fall_back)
