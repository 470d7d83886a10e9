"""Values for the rows of a lost shard: the rules that replace lost weights and lost moments of Adam.

In FSDP every rank holds some rows of each parameter and of both moments. If a rank is lost, its rows are lost; all
other rows keep their values. A rule computes the lost rows of one parameter from what is left (`Remains`). Rules read
and return tensors only: training runs and the experiment sharded-tradeoff use the same ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowState:
    """The state that Adam keeps for some rows of a parameter: the weights and both moments."""

    weight: Tensor
    first_moment: Tensor
    second_moment: Tensor

    def __len__(self) -> int:
        return len(self.weight)

    def rows(self, start: int, stop: int) -> "RowState":
        """Return the rows from `start` up to `stop`, as views."""
        return RowState(self.weight[start:stop], self.first_moment[start:stop], self.second_moment[start:stop])

    def clone(self) -> "RowState":
        return RowState(self.weight.clone(), self.first_moment.clone(), self.second_moment.clone())


@dataclass(frozen=True, slots=True, eq=False)
class Remains:
    """The values from which the lost rows of one parameter can be computed.

    `gathered` are the weights of the lost rows as the last forward gathered them on every rank, in the dtype of the
    computation. `saved` are the lost rows in the newest snapshot. `mean_second_moment` is one row: the mean of the
    second moments of all surviving rows. `neighbours` are the rows of the nearest surviving ranks on both sides; they
    may have more or fewer rows than were lost, or none."""

    gathered: Tensor
    saved: RowState
    mean_second_moment: Tensor
    neighbours: tuple[RowState, RowState]

    @property
    def fresh_weight(self) -> Tensor:
        return self.gathered.to(self.saved.weight.dtype)

    @property
    def zeros(self) -> Tensor:
        return torch.zeros_like(self.saved.weight)

    @property
    def averaged_second_moment(self) -> Tensor:
        return self.mean_second_moment.expand_as(self.saved.second_moment).clone()


Rule: TypeAlias = Callable[[Remains], RowState]
"""A function that returns the values of the lost rows of one parameter."""


def whole(remains: Remains) -> RowState:
    """Return weights and moments from the snapshot: partial recovery of the SCAR paper."""
    return remains.saved.clone()


def fresh(remains: Remains) -> RowState:
    """Return the gathered weights, with the moments from the snapshot."""
    return RowState(remains.fresh_weight, remains.saved.first_moment.clone(), remains.saved.second_moment.clone())


def fresh_averaged(remains: Remains) -> RowState:
    """Return the gathered weights, first moments of zero and the mean of the surviving second moments: no snapshot.

    Training runs use `fresh_moment`, which does the same for other optimizers."""
    return RowState(remains.fresh_weight, remains.zeros, remains.averaged_second_moment)


def fresh_zeroed(remains: Remains) -> RowState:
    """Return the gathered weights, with both moments zero: no snapshot."""
    return RowState(remains.fresh_weight, remains.zeros, remains.zeros)


def zero_weights(remains: Remains) -> RowState:
    """Return weights of zero, with the moments of `fresh_averaged`: no snapshot and no copy of the weights."""
    return RowState(remains.zeros, remains.zeros, remains.averaged_second_moment)


def neighbours(remains: Remains) -> RowState:
    """Return the mean of both neighbours' rows, for weights and moments: CheckFree's rule for pipeline stages.

    A neighbour with fewer rows is repeated; without any neighbour all values are zero."""
    count, shards = len(remains.saved), [shard for shard in remains.neighbours if len(shard)]
    if not shards:
        return RowState(remains.zeros, remains.zeros, remains.zeros)
    return RowState(
        _mean([shard.weight for shard in shards], count),
        _mean([shard.first_moment for shard in shards], count),
        _mean([shard.second_moment for shard in shards], count),
    )


AVERAGED = ("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum")
ZEROED = ("exp_avg", "momentum_buffer", "grad_avg")


def fresh_moment(key: str, rows: Tensor, mean: Tensor) -> Tensor | None:
    """Return values for lost `rows` of an optimizer's state `key` without a snapshot, as `fresh_averaged` for Adam.

    States that scale the steps are the `mean` of the surviving rows, because steps without them would be too large.
    Sums of gradients are zero. For an unknown state, return None."""
    if key in AVERAGED:
        return torch.empty_like(rows).copy_(mean)
    return torch.zeros_like(rows) if key in ZEROED else None


def mean_row(rows: Tensor) -> Tensor:
    """Return the mean of `rows`; zeros if there is none."""
    return rows.mean(dim=0) if len(rows) else rows.new_zeros(rows.shape[1:])


def _mean(shards: list[Tensor], count: int) -> Tensor:
    parts = [shard[torch.arange(count, device=shard.device) % len(shard)] for shard in shards]
    return torch.stack(parts).mean(dim=0)
