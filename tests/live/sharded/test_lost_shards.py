"""The rules that restore the rows of a lost shard: each takes its values from where it says."""

import pytest
import torch

from holdfast.live.sharded import lost_shards
from holdfast.live.sharded.lost_shards import Remains, RowState


def rows(weight: list[float], first: list[float], second: list[float]) -> RowState:
    return RowState(*(torch.tensor(values)[:, None] for values in (weight, first, second)))


REMAINS = Remains(
    gathered=torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16),
    saved=rows([1.0, 2.0], [0.1, 0.2], [0.3, 0.4]),
    mean_second_moment=torch.tensor([0.7]),
    neighbours=(rows([10.0, 20.0], [1.0, 2.0], [3.0, 4.0]), rows([30.0], [5.0], [6.0])),
)
ZEROS = [0.0, 0.0]


@pytest.mark.parametrize(
    ("rule", "weight", "first", "second"),
    [
        (lost_shards.whole, [1.0, 2.0], [0.1, 0.2], [0.3, 0.4]),
        (lost_shards.fresh, [1.5, 2.5], [0.1, 0.2], [0.3, 0.4]),
        (lost_shards.fresh_averaged, [1.5, 2.5], ZEROS, [0.7, 0.7]),
        (lost_shards.fresh_zeroed, [1.5, 2.5], ZEROS, ZEROS),
        (lost_shards.zero_weights, ZEROS, ZEROS, [0.7, 0.7]),
        (lost_shards.neighbours, [20.0, 25.0], [3.0, 3.5], [4.5, 5.0]),
    ],
)
def test_a_rule_takes_the_lost_rows_from_its_sources(
    rule: lost_shards.Rule, weight: list[float], first: list[float], second: list[float]
) -> None:
    restored = rule(REMAINS)
    assert restored.weight.dtype == torch.float32  # not that of the gathered weights
    for values, expected in zip(
        (restored.weight, restored.first_moment, restored.second_moment), (weight, first, second), strict=True
    ):
        torch.testing.assert_close(values[:, 0], torch.tensor(expected))


@pytest.mark.parametrize("rule", [lost_shards.whole, lost_shards.fresh])
def test_restored_rows_do_not_share_memory_with_the_snapshot(rule: lost_shards.Rule) -> None:
    restored = rule(REMAINS)
    restored.weight.zero_()
    restored.second_moment.zero_()
    assert REMAINS.saved.weight.any()
    assert REMAINS.saved.second_moment.all()


def test_without_surviving_neighbours_and_rows_the_values_are_zero() -> None:
    nothing = rows([], [], [])
    alone = Remains(REMAINS.gathered, REMAINS.saved, lost_shards.mean_row(torch.empty(0, 1)), (nothing, nothing))
    assert not lost_shards.neighbours(alone).weight.any()
    assert not lost_shards.fresh_averaged(alone).second_moment.any()


@pytest.mark.parametrize(("key", "expected"), [("exp_avg", [0.0, 0.0]), ("exp_avg_sq", [0.7, 0.7])])
def test_a_run_without_a_snapshot_uses_the_rule_of_the_experiment(key: str, expected: list[float]) -> None:
    rule = lost_shards.fresh_averaged(REMAINS)
    of_rule = rule.first_moment if key == "exp_avg" else rule.second_moment
    values = lost_shards.fresh_moment(key, REMAINS.saved.weight, REMAINS.mean_second_moment)
    assert values is not None
    assert torch.equal(values, of_rule)
    torch.testing.assert_close(values[:, 0], torch.tensor(expected))


def test_a_state_with_an_unknown_meaning_gets_no_values() -> None:
    assert lost_shards.fresh_moment("ax", torch.zeros(2, 1), torch.ones(1)) is None


def test_new_values_of_a_single_row_are_stored_as_torch_stores_them() -> None:
    values = lost_shards.fresh_moment("exp_avg_sq", torch.zeros(1), torch.tensor(0.7))
    assert values is not None
    assert values.stride() == (1,)
