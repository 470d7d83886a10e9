"""Sparse products: those of the dense matrix, for every trial of a stack alike."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.workloads.sparse import sparse


@settings(deadline=None)  # the first example compiles
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    width=st.integers(1, 3),
    trials=st.integers(1, 5),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_dense_matrix(
    rows: int, columns: int, width: int, trials: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    dense = np.where(rng.random((rows, columns)) < share, rng.normal(size=(rows, columns)), 0)
    where = rng.permutation(np.argwhere(dense))  # entries come in any order
    matrix = sparse(dense.shape, where[:, 0], where[:, 1], dense[where[:, 0], where[:, 1]])
    right, left = rng.normal(size=(columns, width, trials)), rng.normal(size=(rows, width, trials))
    np.testing.assert_allclose(matrix.times(right), np.einsum("ij,jkt->ikt", dense, right), atol=1e-12)
    np.testing.assert_allclose(matrix.transposed.times(left), np.einsum("ij,ikt->jkt", dense, left), atol=1e-12)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40)])
def test_a_trial_has_the_same_result_to_the_last_bit_in_every_stack(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    where = np.argwhere(rng.random(shape) < 0.5)
    matrix = sparse(shape, where[:, 0], where[:, 1], rng.normal(size=len(where)))
    right, left = rng.normal(size=(shape[1], 3, 7)), rng.normal(size=(shape[0], 3, 7))
    for lane in range(7):
        alone = slice(lane, lane + 1)
        assert np.array_equal(matrix.times(right)[..., alone], matrix.times(right[..., alone]))
        assert np.array_equal(matrix.transposed.times(left)[..., alone], matrix.transposed.times(left[..., alone]))
