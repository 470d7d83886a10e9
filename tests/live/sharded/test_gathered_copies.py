"""Which part of an all-gather is kept as the previous rank's weights, and when."""

import torch
from torch import Tensor

from holdfast.live.sharded.gathered_copies import GatheredCopy, split_contribution
from holdfast.live.sharded.operations import Ring


def gathered(*ranks: list[float]) -> Tensor:
    return torch.tensor([value for values in ranks for value in values])


def copy_of_rank_0() -> GatheredCopy:
    return GatheredCopy(parameters=[], ring=Ring(1, 3))


def test_a_contribution_is_split_into_shards_without_their_padding() -> None:
    weight, bias = split_contribution(torch.arange(9.0), padded=[6, 3], shapes=[(2, 2), (3,)])
    assert weight.tolist() == [[0, 1], [2, 3]]
    assert bias.tolist() == [6, 7, 8]


def test_a_rank_with_no_rows_of_a_parameter_contributes_padding_only() -> None:
    (weight,) = split_contribution(torch.zeros(4), padded=[4], shapes=[(0, 4)])
    assert weight.shape == (0, 4)


def test_the_part_of_the_previous_rank_is_copied_once_between_two_optimizer_steps() -> None:
    copy = copy_of_rank_0()
    nothing = torch.empty(0)
    copy.values = torch.zeros(2)
    copy.keep(gathered([1, 2], [3, 4], [5, 6]), nothing, step=4, optimizer_steps=0)
    assert (copy.values.tolist(), copy.step) == ([1, 2], 4)
    copy.keep(gathered([9, 9], [9, 9], [9, 9]), nothing, step=4, optimizer_steps=0)  # backward gathers them again
    assert copy.values.tolist() == [1, 2]
    copy.keep(gathered([7, 8], [0, 0], [0, 0]), nothing, step=4, optimizer_steps=1)
    assert copy.values.tolist() == [7, 8]


def test_a_contribution_that_does_not_consist_of_the_parameters_is_not_kept() -> None:
    copy = copy_of_rank_0()
    copy.keep(gathered([1, 2], [3, 4], [5, 6]), torch.tensor([3.0, 4.0]), step=4, optimizer_steps=0)
    assert (copy.values, [*copy.rows()]) == (None, [])
