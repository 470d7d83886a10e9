"""Shards that are simulated in one process: every row has one owner, and only lost rows change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from holdfast.lab.sharded.gpt_training import GptState, adamw, load_states, read_states
from holdfast.lab.sharded.shard_trials import RULES
from holdfast.lab.sharded.simulated_shards import SimulatedShadow, nearest_survivors, rank_rows, restore_lost
from holdfast.live.sharded import lost_shards
from holdfast.live.sharded.lost_shards import RowState, Rule

counts = st.integers(1, 40)
world_sizes = st.integers(2, 9)


def state(counts: list[int], seed: int) -> GptState:
    generator = torch.Generator().manual_seed(seed)

    def drawn(count: int) -> Tensor:
        return torch.rand(count, 3, generator=generator) + 1

    return GptState(tuple(RowState(drawn(count), drawn(count), drawn(count)) for count in counts), 5)


@given(counts, world_sizes)
def test_every_row_belongs_to_one_rank_as_torch_chunk_divides_them(count: int, world_size: int) -> None:
    owned = [list(range(start, stop)) for start, stop in rank_rows(count, world_size)]
    chunks = [chunk.tolist() for chunk in torch.arange(count).chunk(world_size)]
    assert owned == chunks + [[]] * (world_size - len(chunks))


@pytest.mark.parametrize("rule", [*RULES.values()], ids=[strategy.name for strategy in RULES])
@given(counts, world_sizes, st.data())
def test_a_rule_changes_only_rows_of_lost_ranks(rule: Rule, count: int, world_size: int, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.integers(0, world_size - 1), max_size=world_size - 1))
    live, saved = state([count, 7], 0), state([count, 7], 1)
    restored = restore_lost(rule, live, saved, lost, world_size, torch.float32)
    assert restored.step == live.step
    for before, after in zip(live.parameters, restored.parameters, strict=True):
        for rank, (start, stop) in enumerate(rank_rows(len(before), world_size)):
            if rank not in lost:
                assert torch.equal(before.weight[start:stop], after.weight[start:stop])
                assert torch.equal(before.first_moment[start:stop], after.first_moment[start:stop])
                assert torch.equal(before.second_moment[start:stop], after.second_moment[start:stop])
            elif start < stop:  # all values differ, so the moments of a restored row differ from the lost ones
                assert not torch.equal(before.first_moment[start:stop], after.first_moment[start:stop])


@given(counts, world_sizes, st.data())
def test_the_whole_rule_gives_the_lost_rows_of_the_snapshot(count: int, world_size: int, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.integers(0, world_size - 1), max_size=world_size - 1))
    live, saved = state([count], 0), state([count], 1)
    (restored,) = restore_lost(lost_shards.whole, live, saved, lost, world_size, torch.float32).parameters
    for rank in lost:
        start, stop = rank_rows(count, world_size)[rank]
        assert torch.equal(restored.weight[start:stop], saved.parameters[0].weight[start:stop])


def test_fresh_weights_are_rounded_to_the_dtype_in_which_they_were_gathered() -> None:
    live, saved = state([8], 0), state([8], 1)
    (exact,) = restore_lost(lost_shards.fresh, live, saved, {1}, 4, torch.float32).parameters
    (rounded,) = restore_lost(lost_shards.fresh, live, saved, {1}, 4, torch.bfloat16).parameters
    assert torch.equal(exact.weight, live.parameters[0].weight)
    assert torch.equal(rounded.weight[2:4], exact.weight[2:4].bfloat16().float())
    assert torch.equal(rounded.weight[4:], exact.weight[4:])


def test_neighbours_are_the_nearest_survivors_with_rows_around_the_ring() -> None:
    bounds = [(0, 2), (2, 4), (4, 6), (6, 7), (7, 7)]
    assert nearest_survivors(1, {1}, bounds) == (0, 2)
    assert nearest_survivors(1, {1, 2}, bounds) == (0, 3)
    assert nearest_survivors(0, {0}, bounds) == (3, 1)  # rank 4 has no rows
    assert nearest_survivors(0, {0, 1, 2, 3}, bounds) == (None, None)


def test_a_shadow_makes_the_steps_of_the_owners() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(count, 5)) for count in (16, 3)]  # the second has fewer rows than ranks
    optimizer = adamw(parameters)
    load_states(optimizer, read_states(optimizer), 0)
    shadow = SimulatedShadow(GptState(read_states(optimizer), 0), 8)
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.param_groups[0]["lr"] = 0.01
        shadow.step([parameter.grad for parameter in parameters if parameter.grad is not None], 0.01)
        optimizer.step()
    shadowed = shadow.state()
    assert shadowed.step == 4
    for own, copy in zip(read_states(optimizer), shadowed.parameters, strict=True):
        torch.testing.assert_close(copy.weight, own.weight, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(copy.second_moment, own.second_moment, rtol=1e-6, atol=1e-9)
