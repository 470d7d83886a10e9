"""A rank's copy of another rank's shards has that rank's bits after every step, for every supported optimizer."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.errors import BadInput
from holdfast.live.sharded.operations import Ring, ranks_apart
from holdfast.live.sharded.shadow import check_copyable, neighbours
from holdfast.train.state.protected import Protected
from supervisor_process import RunScript


def test_the_copy_makes_the_same_steps_as_its_owner(run_script: RunScript, tmp_path: Path) -> None:
    run_script("shadowed_ranks.py", tmp_path, within=300.0)
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) > 20
    different = {name: ranks for name, (ranks, _) in results.items() if ranks}
    assert different == {"changed_by_hook": [0, 1, 2]}  # and each rank knows it, so such a copy is never used
    sent = {name for name, (_, has_sent) in results.items() if has_sent}
    assert sent == {"accumulated", "changed_by_script", "averaged"}


@pytest.mark.parametrize(("size", "apart"), [(size, apart) for size in range(2, 9) for apart in range(1, size)])
def test_every_rank_gives_to_the_next_once_and_no_rank_gives_and_takes_in_one_round(size: int, apart: int) -> None:
    rounds = list(neighbours(Ring(0, size, apart)))
    assert sorted(pair for pairs in rounds for pair in pairs) == [(rank, (rank + apart) % size) for rank in range(size)]
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len({*ranks})


@pytest.mark.parametrize(("size", "nodes"), [(8, 2), (8, 4), (8, 8), (6, 3), (4, 1)])
def test_a_copy_is_on_another_node_if_there_are_several_of_equal_size(size: int, nodes: int) -> None:
    apart = ranks_apart(size, nodes)
    node_of = [rank * nodes // size for rank in range(size)]
    copies = [Ring(rank, size, apart).next for rank in range(size)]
    assert sorted(copies) == list(range(size))
    assert all((node_of[rank] != node_of[copy]) == (nodes > 1) for rank, copy in enumerate(copies))


def test_with_nodes_of_different_sizes_the_next_rank_keeps_the_copy() -> None:
    assert ranks_apart(5, 2) == 1


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor], ids=lambda kind: str(kind.__name__))
def test_an_optimizer_that_does_not_compute_each_element_on_its_own_is_refused(kind: type) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(BadInput, match=f"optimizer is a {kind.__name__}"):
        check_copyable(Protected({"model": model, "optimizer": kind(model.parameters())}))
