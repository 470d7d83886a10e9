"""Matrix factorization: coordinate-wise least squares on the zero-filled matrix, the same in every lane."""

import os

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.lab.simulate.lanes import trajectory
from holdfast.workloads.mf import SETTINGS, MatrixFactorization, mf
from holdfast.workloads.ratings import Ratings, generated
from holdfast.workloads.workload import Arrays, Clock, stacked, unstacked

Matrix = NDArray[np.float64]
FIRST = Clock(np.array([0]), np.array([0]))
WIDE, TALL = generated(30, 50, rank=3), generated(50, 30, rank=3)


def zero_filled(data: Ratings) -> Matrix:
    matrix = np.zeros((data.users, data.items))
    matrix[data.rows, data.columns] = data.values
    return matrix


def plain_iteration(matrix: Matrix, state: Arrays) -> tuple[Matrix, Matrix]:
    """The textbook's: each column of L against what the others leave over, then each row of R."""
    left, right = state["L"].copy(), state["R"].T.copy()
    factors = range(len(right))
    for k in factors:
        others = matrix - sum(np.outer(left[:, j], right[j]) for j in factors if j != k)
        left[:, k] = others @ right[k] / (right[k] @ right[k])
    for k in factors:
        others = matrix - sum(np.outer(left[:, j], right[j]) for j in factors if j != k)
        right[k] = left[:, k] @ others / (left[:, k] @ left[:, k])
    return left, right


@pytest.mark.parametrize("data", [WIDE, TALL], ids=["wide", "tall"])
def test_an_iteration_is_that_of_a_plain_dense_implementation(data: Ratings) -> None:
    workload = MatrixFactorization(data, factors=4, criterion=0)
    state = workload.start()
    for _ in range(3):
        left, right = plain_iteration(zero_filled(data), state)
        state = unstacked(workload.advance(stacked([state]), FIRST), 0)
        np.testing.assert_allclose(state["L"], left, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(state["R"].T, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("data", [WIDE, TALL], ids=["wide", "tall"])
def test_the_loss_is_the_residual_of_the_zero_filled_matrix(data: Ratings) -> None:
    workload = MatrixFactorization(data, factors=4, criterion=0)
    state = workload.start()
    residual = np.linalg.norm(zero_filled(data) - state["L"] @ state["R"].T)
    assert workload.loss(stacked([state]))[0] == pytest.approx(residual, rel=1e-12)


def test_a_difference_counts_by_what_it_does_to_the_product_on_average_over_its_directions() -> None:
    workload = MatrixFactorization(WIDE, factors=4, criterion=0)
    state = unstacked(workload.advance(stacked([workload.start()]), FIRST), 0)
    for block, name, other in ((0, "L", "R"), (WIDE.users, "R", "L")):
        moved = {**state, name: state[name].copy()}
        moved[name][0, 0] += 0.3
        effects = [np.linalg.norm(0.3 * state[other][:, k]) ** 2 for k in range(4)]
        distances = workload.norm(workload.blocks, moved, state)
        assert distances[block] ** 2 == pytest.approx(np.mean(effects))
        assert np.count_nonzero(distances) == 1


def test_the_loss_of_a_perfect_fit_is_a_number() -> None:
    data = Ratings("one", 1, 1, np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([0.1**2]))
    perfect = {"L": np.array([[0.1]]), "R": np.array([[0.1]])}
    assert MatrixFactorization(data, 1, 0).loss(stacked([perfect]))[0] == pytest.approx(0, abs=1e-8)


def test_no_iteration_increases_the_loss() -> None:
    losses = trajectory(mf("generated")).losses
    assert (np.diff(losses) < 0).all()


@pytest.mark.parametrize("data", [WIDE, TALL], ids=["wide", "tall"])
def test_a_trial_is_the_same_to_the_last_bit_in_every_lane_and_company(data: Ratings) -> None:
    starts = [MatrixFactorization(data, 5, 0).start(stream) for stream in range(16)]
    workload = MatrixFactorization(data, 5, 0)
    together = workload.advance(stacked(starts), FIRST)
    losses = workload.loss(together)
    for lane, start in enumerate(starts):
        alone = workload.advance(stacked([start]), FIRST)
        for name in ("L", "R"):
            assert np.array_equal(alone[name][..., 0], together[name][..., lane])
        assert workload.loss(alone)[0] == losses[lane]


def test_a_spoiled_trial_does_not_spoil_its_neighbours() -> None:
    workload = MatrixFactorization(WIDE, 5, 0)
    stack = stacked([workload.start()] * 3)
    stack["L"][..., 1] = np.nan
    stack["R"][..., 1] = np.nan
    after = workload.advance(stack, FIRST)
    assert np.array_equal(after["R"][..., 0], after["R"][..., 2])
    assert np.isfinite(workload.loss(after)[[0, 2]]).all()


def test_an_iteration_leaves_its_input_as_it_was() -> None:
    workload = MatrixFactorization(WIDE, 5, 0)
    stack = stacked([workload.start()] * 2)
    before = {name: value.copy() for name, value in stack.items()}
    workload.advance(stack, FIRST)
    assert all(np.array_equal(stack[name], before[name]) for name in before)


def test_a_factor_lost_on_both_sides_stays_a_number() -> None:
    workload = MatrixFactorization(WIDE, 5, 0)
    state = workload.start()
    state["L"][:, 2], state["R"][:, 2] = 0, 0
    after = workload.advance(stacked([state]), FIRST)
    assert all(np.isfinite(value).all() for value in after.values())
    assert np.isfinite(workload.loss(after)).all()


def test_rows_of_l_and_columns_of_r_are_the_blocks_and_cover_the_state() -> None:
    workload = mf("generated")
    users, items = workload.data.users, workload.data.items
    assert len(workload.blocks) == users + items
    assert workload.blocks.sizes.tolist() == [workload.factors] * (users + items)
    assert (workload.blocks.name(3), workload.blocks.name(users + 3)) == ("L[3]", "R[3]")
    target = {name: np.full_like(value, np.nan) for name, value in workload.start().items()}
    workload.blocks.copy(workload.start(), target, np.arange(users + items))
    assert all(np.array_equal(target[name], value) for name, value in workload.start().items())


@pytest.mark.parametrize("block", [3, 33], ids=["a row of L", "a column of R"])
def test_every_block_matters_to_the_next_iteration(block: int) -> None:
    workload = MatrixFactorization(WIDE, 5, 0)
    good, damaged = workload.start(), workload.start()
    workload.blocks.copy({name: np.zeros_like(value) for name, value in good.items()}, damaged, np.array([block]))
    after = workload.advance(stacked([good, damaged]), FIRST)
    assert (workload.norm(workload.blocks, unstacked(after, 0), unstacked(after, 1)) > 0).sum() > 1


def test_the_start_is_uniform_and_follows_the_seed() -> None:
    workload = mf("generated")
    start = workload.start()
    assert all(0 <= value.min() < 0.01 and 0.99 < value.max() < 1 for value in start.values())
    assert np.array_equal(start["R"], mf("generated").start()["R"])
    assert not np.array_equal(start["R"], workload.start(1)["R"])


def test_generated_ratings_reach_their_criterion_in_as_many_iterations_as_the_papers() -> None:
    assert 20 <= trajectory(mf("generated")).length <= 90


@pytest.mark.skipif(not os.environ.get("HOLDFAST_DATA"), reason="$HOLDFAST_DATA names no folder of real data")
@pytest.mark.parametrize("name", ["movielens", "jester"])
def test_real_ratings_reach_their_criterion_while_the_loss_still_falls(name: str) -> None:
    workload = mf(name)
    assert (workload.factors, workload.criterion) == SETTINGS[name]
    run = trajectory(workload)
    assert 20 <= run.length <= 90
    assert (np.diff(run.losses) < 0).all()
