"""A failure inside back-propagation: laws of what each strategy leaves, for any optimizer, point and casualties."""

import copy
from collections.abc import Callable, Iterator
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from holdfast.lab.backprop.simulated_workers import (
    Interruption,
    Share,
    completed_parameters,
    compute_gradients,
    layers_of,
    train_minibatch,
)

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda model: Adam(model.parameters(), lr=1e-2),
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: RMSprop(model.parameters(), lr=1e-2),
}
WORKERS = 4
POINTS = (0.0, 0.25, 0.5, 0.75, 1.0)
State = dict[str, torch.Tensor]
cases = {
    "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
    "point": st.sampled_from(POINTS),
    "lost": st.sets(st.integers(0, WORKERS - 1), min_size=1, max_size=WORKERS - 1),
    "inside": st.booleans(),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other in tiny operations take most of the time where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network() -> nn.Module:
    """Small, with statistics that a forward moves and with chance in it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)
    )


def shares(step: int = 0) -> list[Share]:
    """Uneven shares: a mean over workers is not the mean over samples."""
    torch.manual_seed(100 + step)
    sizes = (5, 4, 3, 2)
    return [Share(torch.randn(n, 6), torch.randint(0, 3, (n,)), key=10 * step + r) for r, n in enumerate(sizes)]


def trained(
    optimizer: str, interruption: Interruption | None = None, inside: bool = True, only: set[int] | None = None
) -> State:
    """The state after one whole mini-batch, and one that is interrupted: moments and statistics are not zero then."""
    model = network()
    stepping = OPTIMIZERS[optimizer](model)
    train_minibatch(model, stepping, shares(), cross_entropy, inside=inside)
    second = [share for worker, share in enumerate(shares(1)) if only is None or worker in only]
    train_minibatch(model, stepping, second, cross_entropy, interruption, inside=inside)
    moments = {
        f"{n}.{key}": value for n, state in stepping.state_dict()["state"].items() for key, value in state.items()
    }
    return copy.deepcopy({**model.state_dict(), **{k: torch.as_tensor(v) for k, v in moments.items() if v is not None}})


def before(optimizer: str) -> State:
    """The state in which the interrupted mini-batch begins."""
    model = network()
    train_minibatch(model, OPTIMIZERS[optimizer](model), shares(), cross_entropy)
    return model.state_dict()


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def cut(strategy: str, point: float, lost: set[int]) -> Interruption:
    return Interruption(strategy=strategy, point=point, casualties=frozenset(lost))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_layer_by_layer_is_the_same_step_as_all_layers_at_once_bit_for_bit(optimizer: str) -> None:
    assert same(trained(optimizer, inside=True), trained(optimizer, inside=False))


@settings(max_examples=5)
@given(optimizer=cases["optimizer"], point=cases["point"], inside=cases["inside"])
def test_without_casualties_every_strategy_is_the_baseline(optimizer: str, point: float, inside: bool) -> None:
    baseline = trained(optimizer)
    for strategy in ("replay", "forward", "skip"):
        assert same(trained(optimizer, cut(strategy, point, set()), inside), baseline)


@settings(max_examples=5)
@given(optimizer=cases["optimizer"], lost=cases["lost"], inside=cases["inside"])
def test_forward_at_the_very_end_moves_the_parameters_as_the_baseline(
    optimizer: str, lost: set[int], inside: bool
) -> None:
    after, baseline = trained(optimizer, cut("forward", 1.0, lost), inside), trained(optimizer)
    assert all(torch.equal(after[name], baseline[name]) for name in baseline if "running" not in name)


@settings(max_examples=5)
@given(optimizer=cases["optimizer"], lost=cases["lost"], inside=cases["inside"])
def test_forward_from_the_start_is_training_on_the_survivors_samples_alone(
    optimizer: str, lost: set[int], inside: bool
) -> None:
    survivors = set(range(WORKERS)) - lost
    assert same(trained(optimizer, cut("forward", 0.0, lost), inside), trained(optimizer, only=survivors))


@settings(max_examples=5)
@given(optimizer=cases["optimizer"], point=cases["point"], lost=cases["lost"])
def test_forward_is_the_same_for_updates_inside_and_after_backward(
    optimizer: str, point: float, lost: set[int]
) -> None:
    interruption = cut("forward", point, lost)
    assert same(trained(optimizer, interruption, inside=True), trained(optimizer, interruption, inside=False))


@settings(max_examples=5)
@given(optimizer=cases["optimizer"], point=cases["point"], lost=cases["lost"])
def test_where_the_optimizer_steps_after_backward_replay_is_the_baseline_and_skip_changes_nothing(
    optimizer: str, point: float, lost: set[int]
) -> None:
    assert same(trained(optimizer, cut("replay", point, lost), inside=False), trained(optimizer))
    skipped = trained(optimizer, cut("skip", point, lost), inside=False)
    assert all(torch.equal(skipped[name], value) for name, value in before(optimizer).items())


@settings(max_examples=5)
@given(point=cases["point"], lost=cases["lost"])
def test_skip_inside_backward_keeps_the_updates_above_the_point_and_nothing_else(point: float, lost: set[int]) -> None:
    done = completed_parameters(layers_of(network()), point)
    after, baseline, start = trained("adam", cut("skip", point, lost)), trained("adam"), before("adam")
    for name, _ in network().named_parameters():
        assert torch.equal(after[name], baseline[name] if name in done else start[name])


def test_replay_inside_backward_updates_the_layers_above_the_point_twice() -> None:
    after, baseline = trained("sgd", cut("replay", 0.5, {1})), trained("sgd")
    assert not torch.equal(after["6.weight"], baseline["6.weight"])
    model, start = network(), before("sgd")
    model.load_state_dict(start)
    optimizer = OPTIMIZERS["sgd"](model)
    train_minibatch(model, optimizer, shares(1), cross_entropy, cut("skip", 0.5, {1}))
    train_minibatch(model, optimizer, shares(1), cross_entropy)
    assert all(torch.equal(after[name], value) for name, value in model.state_dict().items())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.floats(0, 1))
def test_a_point_completes_whole_layers_starting_with_the_last(sizes: list[int], point: float) -> None:
    order = tuple(tuple(f"{layer}.{part}" for part in range(size)) for layer, size in enumerate(sizes))
    done = completed_parameters(order, point)
    tails = [0, *accumulate(reversed(sizes))]
    assert done == {name for layer in order[len(order) - tails.index(len(done)) :] for name in layer}
    assert len(done) <= point * sum(sizes) + 1e-5


def test_layers_are_the_modules_that_hold_the_parameters() -> None:
    order = layers_of(network())
    assert order == (("0.weight", "0.bias"), ("1.weight", "1.bias"), ("3.weight", "3.bias"), ("6.weight", "6.bias"))


def test_to_compute_gradients_changes_neither_the_model_nor_the_random_numbers_of_others() -> None:
    model = network()
    start, mine, drawn = copy.deepcopy(model.state_dict()), shares(), torch.get_rng_state()
    first, second = (compute_gradients(model, mine, cross_entropy) for _ in range(2))
    assert same(model.state_dict(), start)
    assert torch.equal(torch.get_rng_state(), drawn)
    for a, b in zip(first, second, strict=True):
        assert same(a.gradients, b.gradients)
        assert same(a.buffers, b.buffers)
    assert not torch.equal(first[0].buffers["1.running_mean"], first[1].buffers["1.running_mean"])


def test_a_frozen_layer_is_not_counted() -> None:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index]
    assert layers_of(model)[0] == ("1.weight", "1.bias")
    kept = model[0].weight.clone()  # type: ignore[index]
    train_minibatch(model, SGD(model.parameters(), lr=1.0), shares(), cross_entropy, cut("forward", 0.5, {0}))
    assert torch.equal(model[0].weight, kept)  # type: ignore[index]
