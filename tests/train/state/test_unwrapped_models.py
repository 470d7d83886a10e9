"""A wrapped model is saved under the names of its own classes, and restored into plain and wrapped models."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from holdfast.train.state.protected import Protected
from holdfast.train.state.unwrapped_models import unwrapped, unwrapped_state


class Net(nn.Module):
    """A model of which a part may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def test_a_model_that_is_not_wrapped_is_itself() -> None:
    net = nn.Linear(1, 1)
    assert unwrapped(net) is net


def test_keys_are_the_users_own() -> None:
    model = Net()
    plain = model.state_dict()
    whole = compiled(model).state_dict()
    inside = nn.Sequential(compiled(nn.BatchNorm1d(2))).state_dict()
    both = OrderedDict((f"_orig_mod.module.{key}", value) for key, value in plain.items())
    for wrapped in (whole, both):
        assert list(wrapped) != list(plain)
        assert list(unwrapped_state(wrapped)) == list(plain)
    assert unwrapped_state(whole)._metadata.keys() >= plain._metadata.keys()  # type: ignore[attr-defined]
    assert next(iter(unwrapped_state(inside))) == "0.weight"
    mine = nn.ModuleDict({"module": nn.Linear(1, 1)}).state_dict()
    assert list(unwrapped_state(mine)) == ["module.weight", "module.bias"]


def test_a_state_of_a_compiled_model_is_restored_into_plain_and_compiled_models() -> None:
    one, other, third = compiled(Net()), Net(), Net()
    third.first = compiled(third.first)
    saved = Protected({"model": one}).capture()
    for model in (other, third, compiled(Net())):
        protected = Protected({"model": model})
        assert protected.differences(saved) == []
        protected.restore(saved)
        assert torch.equal(dict(model.named_parameters())[_name(model)], one.first.weight)
    assert Protected({"model": one}).signature() == Protected({"model": other}).signature()


def _name(model: nn.Module) -> str:
    return next(name for name, _ in model.named_parameters() if name.endswith("weight"))
