"""The convolutional network: what it computes is what PyTorch computes, and a trial keeps to itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from holdfast.lab.simulate.lanes import trajectory
from holdfast.workloads.cnn import ConvolutionalNetwork, cnn
from holdfast.workloads.convnet import Architecture, Network, one_thread
from holdfast.workloads.datasets import LabeledData
from holdfast.workloads.workload import Arrays, Clock, stacked, unstacked

FIRST = Clock(np.array([0]), np.array([0]))


def small(side: int = 28, kernel: int = 5, stride: int = 2, **changes: object) -> ConvolutionalNetwork:
    """The network on random images, with few batches."""
    rng = np.random.default_rng(0)
    x = rng.random((512, side * side), dtype=np.float32)
    x[x < 0.6] = 0  # blank regions, as digits have: all four of a pooling window are then equal
    data = LabeledData("random", x, rng.integers(0, 10, 512), classes=10)
    architecture = Architecture(side, 10, kernel=kernel, stride=stride, channels=(8, 16), hidden=(24, 12))
    settings = {"partition": "layer", "batches": 3, "evaluated": 128, "criterion": 0.1} | changes
    return ConvolutionalNetwork(data, architecture, **settings)  # type: ignore[arg-type]


def scores(parameters: dict[str, torch.Tensor], x: torch.Tensor, stride: int) -> torch.Tensor:
    """The network as PyTorch has it."""
    side = int(x.shape[1] ** 0.5)
    value = functional.conv2d(x.view(-1, 1, side, side), parameters["conv1.weight"], parameters["conv1.bias"], stride)
    value = functional.max_pool2d(functional.relu(value), 2)
    value = functional.conv2d(value, parameters["conv2.weight"], parameters["conv2.bias"], padding=1)
    value = functional.max_pool2d(functional.relu(value), 2).flatten(1)
    for layer in ("full1", "full2"):
        value = functional.relu(functional.linear(value, parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]))
    return functional.linear(value, parameters["full3.weight"], parameters["full3.bias"])


def leaves(workload: ConvolutionalNetwork, state: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(state[name], requires_grad=True) for name in workload.architecture.shapes}


GEOMETRIES = pytest.mark.parametrize(("side", "kernel", "stride"), [(28, 5, 2), (8, 3, 1), (15, 4, 1)])


@GEOMETRIES
def test_the_loss_and_the_gradient_are_those_of_automatic_differentiation(side: int, kernel: int, stride: int) -> None:
    workload = small(side, kernel, stride)
    state, which = workload.start(), np.arange(64)
    parameters = leaves(workload, state)
    x, y = torch.from_numpy(workload.data.x), torch.from_numpy(workload.data.y)
    functional.cross_entropy(scores(parameters, x[:64], stride), y[:64]).backward()
    network = Network(workload.architecture, 64)
    network.parameters.fill({name: state[name] for name in workload.architecture.shapes})
    network.load(workload.data.x, which)
    network.differentiate(workload.data.y[which])
    for name, part in network.gradient.parts.items():
        assert torch.allclose(part, parameters[name].grad, rtol=1e-4, atol=1e-6), name  # type: ignore[arg-type]
    expected = float(functional.cross_entropy(scores(parameters, x[:128], stride), y[:128]).detach())
    assert workload.loss(stacked([state]))[0] == pytest.approx(expected, rel=1e-5)


def test_iterations_are_those_of_pytorch_and_its_adam() -> None:
    workload = small()
    stack = stacked([workload.start()])
    parameters = leaves(workload, workload.start())
    adam = torch.optim.Adam(parameters.values())
    last: list[dict[str, torch.Tensor]] = []
    for iteration in range(3):
        stack = workload.advance(stack, Clock(np.array([iteration]), np.array([5])))
        for which in workload.samples(iteration, stream=5):
            adam.zero_grad()
            output = scores(parameters, torch.from_numpy(workload.data.x[which]), stride=2)
            functional.cross_entropy(output, torch.from_numpy(workload.data.y[which])).backward()
            adam.step()
            last.append({name: value.detach().clone() for name, value in parameters.items()})
    state = unstacked(stack, 0)
    for name, value in parameters.items():
        moments = adam.state[value]
        average = sum(state[name] for state in last[-workload.batches :]) / workload.batches
        assert np.allclose(state[f"{name}.average"], average, atol=2e-4), name
        assert np.all(state[f"{name}.count"] == moments["step"].item()), name
        # A parameter moves by 1e-3 a step, whatever its gradient: one that is all rounding error moves at random.
        assert np.allclose(state[name], value.detach(), atol=2e-4), name
        assert np.allclose(state[f"{name}.mean"], moments["exp_avg"], rtol=1e-2, atol=1e-5), name
        assert np.allclose(state[f"{name}.square"], moments["exp_avg_sq"], rtol=1e-2, atol=1e-8), name


def test_a_trial_does_not_depend_on_its_neighbours() -> None:
    workload = small()
    states = [workload.start(stream) for stream in range(3)]
    clock = Clock(np.array([0, 4, 2]), np.array([0, 1, 2]))
    together = workload.advance(stacked(states), clock)
    losses = workload.loss(together)
    for lane, state in enumerate(states):
        alone = workload.advance(stacked([state]), Clock(clock.iteration[[lane]], clock.stream[[lane]]))
        assert all(np.array_equal(alone[name][..., 0], together[name][..., lane]) for name in alone)
        assert workload.loss(alone)[0] == losses[lane]


def test_advancing_leaves_its_argument_and_the_number_of_threads_alone() -> None:
    workload, threads = small(), torch.get_num_threads()
    stack = stacked([workload.start()])
    workload.advance(stack, FIRST)
    assert all(np.array_equal(stack[name][..., 0], value) for name, value in workload.start().items())
    assert torch.get_num_threads() == threads
    with pytest.raises(ZeroDivisionError), one_thread():
        assert 1 // (torch.get_num_threads() - 1)
    assert torch.get_num_threads() == threads


def test_stream_and_iteration_alone_decide_the_batches() -> None:
    workload = small()
    again = replace(workload, partition="shard")
    assert np.array_equal(workload.samples(7, 3), again.samples(7, 3))
    assert not np.array_equal(workload.samples(7, 3), workload.samples(8, 3))
    assert not np.array_equal(workload.samples(7, 3), workload.samples(7, 4))
    assert len(np.unique(workload.samples(7, 3))) == 3 * 64


@pytest.mark.parametrize(("partition", "count"), [("layer", 10), ("shard", 2 * (8 + 16 + 24 + 12 + 10))])
def test_blocks_cover_every_parameter_once_and_carry_its_moments(partition: str, count: int) -> None:
    workload = small(partition=partition)
    state = workload.start()
    names = list(workload.architecture.shapes)
    assert len(workload.blocks) == count
    assert [family.array for family in workload.blocks.families] == names
    assert int(workload.blocks.sizes.sum()) == sum(state[name].size for name in names)
    assert sorted(workload.blocks.members) == sorted(state)
    copy = {name: np.full_like(value, -1) for name, value in state.items()}
    workload.blocks.copy(state, copy, np.arange(count))
    assert all(np.array_equal(copy[name], value) for name, value in state.items())


@pytest.mark.parametrize("partition", ["layer", "shard"])
def test_restoring_a_block_restores_its_moments_and_nothing_else(partition: str) -> None:
    workload = small(partition=partition)
    saved = workload.start()
    live = unstacked(workload.advance(stacked([saved]), FIRST), 0)
    before = {name: value.copy() for name, value in live.items()}
    block = next(
        i for i in range(len(workload.blocks)) if workload.blocks.name(i) in ("conv2.weight", "conv2.weight[0]")
    )
    workload.blocks.copy(saved, live, np.array([block]))
    rows = slice(None) if partition == "layer" else slice(0, 1)
    for name, value in live.items():
        expected = before[name].copy()
        if name.startswith("conv2.weight"):
            assert not np.array_equal(expected[rows], saved[name][rows])
            expected[rows] = saved[name][rows]
        assert np.array_equal(value, expected), name


def test_the_quick_variant_reaches_its_criterion_in_as_many_iterations_as_a_panel_should() -> None:
    run = trajectory(cnn("digits", partition="layer"), limit=90)
    assert 20 <= run.length <= 90
