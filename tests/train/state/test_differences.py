"""What differs between a saved state and the protected objects is named."""

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.train.state.differences import SHOWN, listed
from holdfast.train.state.protected import Protected


def test_what_differs_is_named() -> None:
    saved = Protected({"model": nn.Linear(3, 2), "optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters())}).capture()
    net = nn.Linear(3, 4, bias=False).double()
    now = Protected({"model": net, "optimizer": torch.optim.SGD(net.parameters()), "scheduler": nn.Identity()})
    assert now.differences(saved) == [
        "scheduler was not protected",
        "model.weight is float64[4, 3], not float32[2, 3]",
        "model.bias is gone",
        "optimizer has groups of [1] parameters, not [2]",
    ]


@pytest.mark.parametrize("saved", [7, None, [], {"param_groups": 7}, {"param_groups": [{}]}])
def test_a_state_of_any_other_form_is_a_difference(saved: Any) -> None:
    net = nn.Linear(2, 1)
    protected = Protected({"optimizer": torch.optim.SGD(net.parameters(), lr=0.1)})
    assert protected.differences({"optimizer": saved}) == ["optimizer was something else"]


def test_of_many_differences_the_first_are_named_and_the_others_counted() -> None:
    assert listed([str(number) for number in range(SHOWN + 3)]).endswith("3; and 3 more")
    assert "more" not in listed(["one", "two"])
