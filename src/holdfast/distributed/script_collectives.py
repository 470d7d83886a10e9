"""Collectives that a script calls by itself, with torch.distributed, in a run that recovers live.

The run's own exchanges use connections that are replaced after a loss. A process group of torch does not survive its
first lost member, and a worker that replaces it has missed what was exchanged before. So a run whose script uses such
groups restarts after a loss. Once the members have changed, the default group only knows rank and size; a collective on
it makes the run restart.
"""

import logging
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup, Store, distributed_c10d  # type: ignore[attr-defined]  # public

from holdfast import progress
from holdfast.progress import restart_needed

logger = logging.getLogger(__name__)

SCRIPT_COLLECTIVES = (
    "the script calls torch.distributed itself, whose groups end with the first lost worker; run.sum and run.mean "
    "continue without it"
)

_BACKEND = "holdfast_outlived"
_COLLECTIVES = ("all", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send")


def has_exchanged() -> bool:
    """Return True if the script has used, or made, a process group of torch; report it once."""
    groups = list(distributed_c10d._world.pg_map)
    has_used = len(groups) > 1 or any(map(_has_been_used, groups))
    if has_used and not progress.here.has_exchanged:
        progress.here.set_exchanged()
        if dist.get_rank() == 0:
            logger.warning(
                "After the loss of a worker this run restarts, as with --recovery restart: %s.", SCRIPT_COLLECTIVES
            )
    return has_used


def outlive(rank: int, size: int) -> None:
    """Replace the default group, which has lost a member or never had this one, by one that only knows rank and size."""
    if isinstance(dist.group.WORLD, Outlived) and dist.get_rank() == rank:
        return
    let_go()
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _outlived, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=HashStore(), rank=rank, world_size=size)
    if (group := dist.group.WORLD) is not None:
        distributed_c10d._world.pg_map[group] = (dist.Backend.GLOO, NoStore())  # for groups that a script makes from it


# Groups are never freed: freeing one waits for a thread while holding the interpreter's lock, sometimes forever
# (torch 2.13 with gloo).
_kept: list[object] = []


def let_go() -> None:
    """Leave the default group, if there is one."""
    if dist.is_initialized():
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()


class Outlived(ProcessGroup):
    """A group on which every collective makes the run restart."""

    @property
    def group_name(self) -> Any:
        """The name by which functional collectives find their group."""
        _fall_back()


class NoStore(Store):
    """The store of such a group, from which no other group can be made."""


def _outlived(store: Store, rank: int, size: int, timeout: timedelta) -> Outlived:
    return Outlived(rank, size)  # type: ignore[call-arg]  # this form exists


def _fall_back(*_: Any, **__: Any) -> NoReturn:
    progress.here.set_exchanged()
    raise restart_needed(SCRIPT_COLLECTIVES)


def _has_been_used(group: ProcessGroup) -> bool:
    """Return True if a collective was called on `group`: each has a sequence number."""
    count: int = 0 if isinstance(group, Outlived) else group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return count > 0


for _name in filter(lambda name: name.lstrip("_").startswith(_COLLECTIVES), dir(ProcessGroup)):
    setattr(Outlived, _name, _fall_back)
for _name in ("add", "check", "compare_set", "get", "set", "wait"):
    setattr(NoStore, _name, _fall_back)
