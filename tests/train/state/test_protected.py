"""What is protected comes back bit by bit, whatever its type."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from holdfast.checkpoint.payload import flatten, unflatten
from holdfast.errors import BadInput
from holdfast.train.state.protected import Protected

SCHEDULERS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4, 4]},
    "ExponentialLR": {"gamma": 0.9},
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
    "PolynomialLR": {"total_iters": 9},
    "LinearLR": {},
}


def through_a_checkpoint(state: Any) -> Any:
    flat = flatten(state)
    return unflatten({name: torch.as_tensor(value).clone() for name, value in flat.tensors.items()}, flat.extra)


def trained(optimizer: torch.optim.Optimizer, net: nn.Module, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        net(torch.randn(4, 3).to(next(net.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_an_optimizer_goes_on_as_if_nothing_had_happened(kind: Any, options: dict[str, Any]) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Protected]:
        torch.manual_seed(9)
        net = nn.Linear(3, 2)
        optimizer = kind(net.parameters(), **{"lr": 0.01, **options})
        return net, optimizer, Protected({"model": net, "optimizer": optimizer})

    net, optimizer, protected = made()
    trained(optimizer, net, 3)
    saved = through_a_checkpoint(protected.capture())
    trained(optimizer, net, 3)
    again, other, resumed = made()
    resumed.restore(saved)
    assert other.param_groups[0]["foreach"] == optimizer.param_groups[0]["foreach"]
    trained(other, again, 3)
    assert same(through_a_checkpoint(protected.capture()), through_a_checkpoint(resumed.capture()))


def test_optimizer_state_keeps_its_type_though_the_parameters_have_another() -> None:
    net = nn.Linear(3, 2).double()  # a type that every CPU multiplies; bf16 is none
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    trained(optimizer, net, 2)
    exact = torch.full((2, 3), 1 / 3)
    optimizer.state[net.weight]["momentum_buffer"] = exact
    protected = Protected({"optimizer": optimizer})
    saved = through_a_checkpoint(protected.capture())
    optimizer.state.clear()
    protected.restore(saved)
    assert optimizer.state[net.weight]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(optimizer.state[net.weight]["momentum_buffer"], exact)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_goes_on_where_it_was(name: str) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any, Protected]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
        scheduler = getattr(lr_scheduler, name)(optimizer, **SCHEDULERS[name])
        return optimizer, scheduler, Protected({"optimizer": optimizer, "scheduler": scheduler})

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    optimizer, scheduler, protected = made()
    rates(optimizer, scheduler, 4)
    saved = through_a_checkpoint(protected.capture())
    other, again, resumed = made()
    resumed.restore(saved)
    assert rates(optimizer, scheduler, 6) == rates(other, again, 6)


def test_nothing_is_shared_with_what_was_read() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    trained(optimizer, net, 1)
    protected = Protected({"model": net, "optimizer": optimizer})
    saved = through_a_checkpoint(protected.capture())
    before = through_a_checkpoint(saved)
    protected.restore(saved)
    trained(optimizer, net, 1)
    assert same(saved, before)


def test_buffers_belong_to_the_state() -> None:
    net = nn.BatchNorm1d(3)
    net(torch.randn(4, 3))
    saved = through_a_checkpoint(Protected({"model": net}).capture())
    other = nn.BatchNorm1d(3)
    Protected({"model": other}).restore(saved)
    assert torch.equal(other.running_mean, net.running_mean)  # type: ignore[arg-type]
    assert other.num_batches_tracked == 1


def test_a_thing_that_does_not_take_its_state_back_is_named() -> None:
    class Stubborn:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: Any, /) -> None:
            raise ValueError("no\nnever")

    with pytest.raises(BadInput, match=r"ema does not load its saved state \(ValueError: no never\)"):
        Protected({"ema": Stubborn()}).restore({"ema": {}})


def same(one: Any, other: Any) -> bool:
    a, b = flatten(one), flatten(other)
    return a.extra == b.extra and all(
        x.dtype == y.dtype and torch.equal(torch.as_tensor(x), torch.as_tensor(y))
        for x, y in zip(a.tensors.values(), b.tensors.values(), strict=True)
    )
