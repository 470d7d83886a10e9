"""Numbers that differ from rank to rank, such as a running loss, as state that one rank can save for all."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from holdfast import progress


class EachRank:
    """Numbers of every rank, gathered at every boundary.

    Rank 0 writes the snapshot, so these few numbers are gathered before it is taken, in one small collective per step. On
    a resume each rank gets its own back; with another number of ranks, the mean of all.
    """

    def __init__(self, rank: int, world: int, take: Callable[[], torch.Tensor]) -> None:
        self._rank, self._world, self._take = rank, world, take
        self._all = torch.zeros(world, 0, dtype=torch.float64)

    def gather(self) -> None:
        """Gather the numbers of all ranks."""
        mine = self._take().to(torch.float64)
        if self._world == 1 or not dist.is_initialized():
            self._all = mine[None].clone()
            return
        progress.here.count_post()  # from here on this rank can only wait for its peers
        everyone = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(everyone, mine)
        self._all = torch.stack(everyone)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of all ranks at the boundary, one row per rank."""
        return {"all": self._all}

    def mine(self, state: Mapping[str, Any]) -> torch.Tensor:
        """Return the numbers with which this rank resumes."""
        rows: torch.Tensor = state["all"]
        return rows[self._rank] if len(rows) == self._world else rows.mean(dim=0)
