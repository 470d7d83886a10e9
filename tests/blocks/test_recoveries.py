"""Recoveries: what goes back, what stays, and how far the state moves (Theorems 4.1 and 4.2)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.division import along, euclidean
from holdfast.blocks.recoveries import fresh, full, partial, recover, recovery, unsaved
from holdfast.errors import BadInput
from holdfast.theory.bounds import full_size, partial_size


@given(st.integers(1, 8), st.data())
def test_partial_recovery_moves_the_state_exactly_as_far_as_theorem_4_1_says(rows: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lost = np.array(data.draw(st.lists(st.sampled_from(range(rows)), unique=True)), dtype=np.int64)
    live, saved = {"w": rng.normal(size=(rows, 3))}, {"w": rng.normal(size=(rows, 3))}
    blocks = along(live, "w")
    distances = euclidean(blocks, live, saved)
    after = {"w": live["w"].copy()}
    recover(partial, blocks, after, saved, lost)
    moved = float(np.linalg.norm(after["w"] - live["w"]))
    assert moved == pytest.approx(partial_size(distances, lost))
    assert moved <= full_size(distances) * (1 + 1e-12)


def test_full_recovery_returns_to_the_checkpoint_and_partial_keeps_the_survivors() -> None:
    saved = {"w": np.zeros((3, 1))}
    blocks = along(saved, "w")
    back, mixed = {"w": np.ones((3, 1))}, {"w": np.ones((3, 1))}
    assert recover(full, blocks, back, saved, np.array([1])).tolist() == [0, 1, 2]
    assert recover(partial, blocks, mixed, saved, np.array([1])).tolist() == [1]
    assert back["w"].ravel().tolist() == [0, 0, 0]
    assert mixed["w"].ravel().tolist() == [1, 0, 1]


@given(st.integers(1, 12), st.data())
def test_only_fresh_recovery_renews_blocks_and_only_lost_ones_that_were_never_saved(
    count: int, data: st.DataObject
) -> None:
    ids = st.lists(st.sampled_from(range(count)), unique=True).map(lambda chosen: np.array(sorted(chosen), np.int64))
    lost, saved_at = data.draw(ids), np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    assert fresh(count, lost).tolist() == partial(count, lost).tolist()
    assert len(unsaved(full, saved_at, lost)) == len(unsaved(partial, saved_at, lost)) == 0
    expected = [] if len(lost) == count else [block for block in lost.tolist() if saved_at[block] == 0]
    assert unsaved(fresh, saved_at, lost).tolist() == expected


def test_an_unknown_recovery_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="'sideways': choose one of full, partial, fresh"):
        recovery("sideways")
