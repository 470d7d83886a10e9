"""A model that is sharded over several ranks, simulated in one process: rows by rank, lost shards, shadows of shards.

Sharding is bookkeeping here. The tensors stay whole, and the rows of a rank are those that FSDP2 gives it.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from holdfast.checkpoint.sharding import Sharding
from holdfast.lab.sharded.gpt_training import GptState, adamw, load_states, read_states
from holdfast.live.sharded.lost_shards import Remains, RowState, Rule, mean_row


def rank_rows(count: int, world_size: int) -> list[tuple[int, int]]:
    """Return for each rank the first of its rows and the row after its last one, out of `count` rows of a parameter."""
    sharding = Sharding(mesh=(world_size,), splits=((0, 0),))
    return [sharding.held_box((count,), rank)[0] for rank in range(world_size)]


def restore_lost(
    rule: Rule, live: GptState, saved: GptState, lost: Collection[int], world_size: int, gathered: torch.dtype
) -> GptState:
    """Return `live` with the rows of the ranks in `lost` restored by `rule`; all other values are the same.

    `saved` is the newest snapshot, and `gathered` the dtype in which forward gathers weights."""
    pairs = zip(live.parameters, saved.parameters, strict=True)
    restored = [_restored(rule, own, old, lost, world_size, gathered) for own, old in pairs]
    return GptState(tuple(restored), live.step)


def _restored(
    rule: Rule, live: RowState, saved: RowState, lost: Collection[int], world_size: int, gathered: torch.dtype
) -> RowState:
    bounds, restored = rank_rows(len(live), world_size), live.clone()
    survivors = [bound for rank, bound in enumerate(bounds) if rank not in lost]
    second = mean_row(torch.cat([live.second_moment[start:stop] for start, stop in survivors]))
    for rank in sorted(lost):
        start, stop = bounds[rank]
        if start == stop:
            continue
        near = nearest_survivors(rank, lost, bounds)
        before, after = (live.rows(*bounds[other]) if other is not None else live.rows(0, 0) for other in near)
        remains = Remains(live.weight[start:stop].to(gathered), saved.rows(start, stop), second, (before, after))
        values = rule(remains)
        restored.weight[start:stop] = values.weight
        restored.first_moment[start:stop] = values.first_moment
        restored.second_moment[start:stop] = values.second_moment
    return restored


def nearest_survivors(
    rank: int, lost: Collection[int], bounds: Sequence[tuple[int, int]]
) -> tuple[int | None, int | None]:
    """Return the nearest ranks before and after `rank`, around the ring, that have rows and are not lost; None if none."""
    world_size = len(bounds)

    def first(direction: int) -> int | None:
        ring = ((rank + direction * distance) % world_size for distance in range(1, world_size))
        return next((other for other in ring if other not in lost and bounds[other][0] < bounds[other][1]), None)

    return first(-1), first(1)


class SimulatedShadow:
    """Copies of the rows of every rank, each with an AdamW of its own that makes the same steps as the owner.

    A copy sees only the gradient rows of its owner, as they are after gradients were reduced and clipped. Here the
    owners' rows are steps of whole tensors, which a vector kernel may round differently in the last bit."""

    def __init__(self, state: GptState, world_size: int) -> None:
        self._steps = state.step
        self._bounds = [rank_rows(len(parameter), world_size) for parameter in state.parameters]
        self._ranks = []
        for rank in range(world_size):
            pairs = zip(state.parameters, self._bounds, strict=True)
            rows = [parameter.rows(*bounds[rank]) for parameter, bounds in pairs]
            optimizer = adamw([nn.Parameter(row.weight.clone()) for row in rows])
            load_states(optimizer, rows, state.step)
            self._ranks.append(optimizer)

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Make the optimizer step of every rank from the whole, clipped `gradients` of all parameters."""
        for rank, optimizer in enumerate(self._ranks):
            group = optimizer.param_groups[0]
            group["lr"].fill_(rate)
            for copy, gradient, bounds in zip(group["params"], gradients, self._bounds, strict=True):
                copy.grad = gradient[slice(*bounds[rank])].clone()
            optimizer.step()
        self._steps += 1

    def state(self) -> GptState:
        """Return the state of the whole model, joined from the copies."""
        ranks = [read_states(optimizer) for optimizer in self._ranks]
        joined = [
            RowState(
                torch.cat([shard.weight for shard in shards]),
                torch.cat([shard.first_moment for shard in shards]),
                torch.cat([shard.second_moment for shard in shards]),
            )
            for shards in zip(*ranks, strict=True)
        ]
        return GptState(tuple(joined), self._steps)
