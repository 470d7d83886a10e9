"""Tensors in protected dicts and lists are restored in place exactly if the script still used the same tensor."""

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.train.state.protected import Protected


def test_another_name_for_a_tensor_in_a_protected_dict_keeps_its_value() -> None:
    mean, counts = torch.zeros(4), np.zeros(2)
    protected = Protected({"stats": {"mean": mean, "by": [{"counts": counts}]}})
    mean += 2
    counts += 3
    state, own = protected.capture(), protected.own()

    for restore in (lambda new: new.restore(state), lambda new: new.restore_own(own)):
        mean, counts = torch.zeros(4), np.zeros(2)
        stats: dict[str, Any] = {"mean": mean, "by": [{"counts": counts}]}
        again = Protected({"stats": stats})
        restore(again)
        assert stats["mean"] is mean
        assert stats["by"][0]["counts"] is counts
        assert (mean.tolist(), counts.tolist()) == ([2.0] * 4, [3.0] * 2)
        assert again.digest() == protected.digest()


def test_a_tensor_that_the_script_had_replaced_leaves_other_names_of_the_first_one_alone() -> None:
    start = torch.zeros(4)
    stats = {"mean": start, "variance": start}
    protected = Protected({"stats": stats})
    stats["mean"] = stats["mean"] + 2
    state = protected.own()

    start = torch.zeros(4)
    stats = {"mean": start, "variance": start}
    again = Protected({"stats": stats})
    again.restore_own(state)
    assert (start.tolist(), stats["mean"].tolist()) == ([0.0] * 4, [2.0] * 4)
    assert stats["variance"] is start
    assert again.digest() == protected.digest()


def test_a_copy_of_the_weights_in_a_dict_does_not_change_the_model() -> None:
    """At the beginning the dict has the tensors of the model itself, and later a copy of the best."""
    model = torch.nn.Linear(2, 1)
    best = {"weights": model.state_dict()}
    protected = Protected({"model": model, "best": best})
    best["weights"] = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    state, own, weight = protected.capture(), protected.own(), model.weight.detach().clone()

    again = torch.nn.Linear(2, 1)
    best = {"weights": again.state_dict()}
    resumed = Protected({"model": again, "best": best})
    resumed.restore(state)
    resumed.restore_own(own)
    assert torch.equal(again.weight, weight)
    assert not best["weights"]["weight"].any()


@pytest.mark.parametrize(
    "first",
    [torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(1).expand(4), None],
    ids=["other shape", "other dtype", "expanded", "no tensor"],
)
def test_a_tensor_that_does_not_fit_is_replaced(first: torch.Tensor | None) -> None:
    protected = Protected({"stats": {"mean": torch.ones(4)}})
    stats = {"mean": first}
    again = Protected({"stats": stats})
    again.restore(protected.capture())
    assert stats["mean"] is not first
    assert stats["mean"] is not None
    assert stats["mean"].tolist() == [1.0] * 4
    assert again.digest() == protected.digest()
