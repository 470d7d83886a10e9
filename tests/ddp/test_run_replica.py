"""How gradients are grouped for their reduction depends on the model alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.ddp.replica import FIRST_GROUP, GROUP, grouped, unwrapped

KINDS = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.sampled_from([1, 1000, FIRST_GROUP // 8, FIRST_GROUP, GROUP // 3])


@given(model=st.lists(st.tuples(KINDS, SIZES), max_size=12))
def test_groups_hold_every_parameter_once_in_order_by_kind_and_by_size(model: list[tuple[torch.dtype, int]]) -> None:
    parameters = [torch.empty(size, dtype=kind, device="meta") for kind, size in model]
    groups = [group.parameters for group in grouped(parameters)]
    for kind in (torch.float32, torch.bfloat16):
        inside = [id(each) for group in groups for each in group if each.dtype == kind]
        assert inside == [id(each) for each in parameters if each.dtype == kind]
    assert all(len({each.dtype for each in group}) == 1 for group in groups)
    assert all(sum(each.nbytes for each in group[:-1]) < GROUP for group in groups)


def test_a_model_that_is_not_wrapped_is_itself() -> None:
    net = nn.Linear(1, 1)
    assert unwrapped(net) is net
