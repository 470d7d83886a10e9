"""Workloads: the mathematics is what it says it is."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from holdfast.lab.simulate.lanes import trajectory
from holdfast.workloads.mlr import mlr
from holdfast.workloads.qp import QuadraticProgram
from holdfast.workloads.workload import Clock, stacked, unstacked

FIRST = Clock(np.array([0]), np.array([0]))


def test_the_quadratic_program_contracts_by_its_smallest_curvature() -> None:
    program = QuadraticProgram(seed=3)
    losses = trajectory(program).losses
    worst = float(np.max(losses[1:] / losses[:-1]))
    assert worst == pytest.approx(1 - program.rate * min(program.curvatures), abs=1e-6)


def test_the_optimum_of_the_quadratic_program_is_a_fixed_point() -> None:
    program = QuadraticProgram(seed=3)
    stack = stacked([{"x": program.optimum}])
    assert np.array_equal(program.advance(stack, FIRST)["x"], stack["x"])
    assert program.loss(stack).tolist() == [0]


def test_an_iteration_of_logistic_regression_is_what_automatic_differentiation_gives() -> None:
    workload = mlr("digits")
    start = {"weights": np.random.default_rng(0).normal(0, 0.1, (64, 10)).astype(np.float32)}
    weights = torch.tensor(start["weights"], requires_grad=True)
    x, y = torch.from_numpy(workload.data.x), torch.from_numpy(workload.data.y)
    assert workload.loss(stacked([start]))[0] == pytest.approx(
        float(cross_entropy(x @ weights, y, reduction="sum").detach())
    )
    for rows in torch.arange(len(y)).split(workload.batch):
        loss = cross_entropy(x[rows] @ weights, y[rows], reduction="sum")
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = (weights - workload.rate * gradient).detach().requires_grad_()
    advanced = unstacked(workload.advance(stacked([start]), FIRST), 0)["weights"]
    assert np.allclose(advanced, weights.detach().numpy(), atol=1e-5)


def test_rows_of_the_weight_matrix_are_the_blocks() -> None:
    workload = mlr("digits")
    assert len(workload.blocks) == 64
    assert workload.blocks.name(7) == "weights[7]"


def test_scores_too_large_for_a_float_do_not_spoil_the_loss() -> None:
    workload = mlr("digits")
    huge = {"weights": np.full((64, 10), 1e30, dtype=np.float32)}
    huge["weights"][:, 0] = -1e30
    assert np.isfinite(workload.loss(stacked([huge]))).all()
    assert np.isfinite(workload.advance(stacked([huge]), FIRST)["weights"]).all()
