"""Ranks are lost at every call of a step: the others continue, and end with the bits of a run in which none is lost.

The ranks are threads that are connected in memory (see `simulated_ranks`); recovery and collectives are holdfast's own.
"""

import json
import logging
import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from finished_run import different, events, failed_checks
from holdfast import progress
from holdfast.live.sharded import shadow
from simulated_ranks import SIZE, Loss, Network, mesh_of, simulate
from supervisor_process import SUPPORT, Start, Supervisor

STRUCK = 1  # the step in which ranks are lost: the second of three
OTHERS = [frozenset(some) for count in range(SIZE) for some in combinations(range(SIZE), count)]
COPIES = {
    1: [{0, 1}, {1, 2}, {2, 3}, {3, 0}],
    2: [{0, 2}, {1, 3}],
}  # ranks that hold the copies of one shard, by replicas
SHAPES = pytest.mark.parametrize("replicas", [1, 2], ids=["FSDP2", "HSDP"])


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "here", progress.Progress())
    monkeypatch.setattr(shadow, "PIECE", 1)  # the copy of each layer is stepped on its own, in a collective of its own
    logging.disable(logging.WARNING)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    mesh.cache_clear()
    yield
    dist.destroy_process_group()
    logging.disable(logging.NOTSET)


@cache
def mesh(replicas: int) -> Any:
    return mesh_of(replicas)


def calls(network: Network, rank: int) -> dict[int, str]:
    """Return the calls of `rank` in the struck step: their number, and the operation."""
    return {number: operation for number, (step, operation) in enumerate(network.calls[rank]) if step == STRUCK}


@pytest.mark.slow  # seconds
@SHAPES
def test_a_rank_that_is_lost_at_any_call_of_a_step_comes_back_exactly(replicas: int) -> None:
    rng = random.Random(5)
    unstruck = simulate(mesh(replicas))
    for rank in range(SIZE):
        for number, operation in calls(unstruck, rank).items():
            has_sent = (rank + number) % 2 == 0
            loss = Loss(rank, number, has_sent, rng.choice(OTHERS) if has_sent else frozenset())
            struck = simulate(mesh(replicas), [loss])
            assert (struck.fallback, struck.membership.number) == (None, 1), (operation, loss)
            assert struck.finished == unstruck.finished, (operation, loss)


@pytest.mark.slow
@SHAPES
def test_two_ranks_that_are_lost_together_or_in_a_row_come_back_exactly_unless_both_held_the_same_shard(
    replicas: int,
) -> None:
    rng = random.Random(6)
    unstruck = simulate(mesh(replicas))
    for _ in range(24):
        one, other = rng.sample(range(SIZE), 2)
        first = Loss(one, rng.choice([*calls(unstruck, one)]), has_sent=True, completing=rng.choice(OTHERS))
        later = rng.random() < 0.5  # while the others recover
        number = rng.randrange(12) if later else first.call + rng.choice((0, 0, 1))
        second = Loss(other, number, rng.random() < 0.5, rng.choice(OTHERS), membership=int(later))
        struck = simulate(mesh(replicas), [first, second])
        if struck.fallback:
            assert {one, other} in COPIES[replicas], (first, second, struck.fallback)
            assert struck.fallback.startswith("ranks"), (first, second, struck.fallback)
        else:
            assert struck.finished == unstruck.finished, (first, second)


@pytest.mark.slow
def test_a_lost_node_comes_back_exactly_because_the_copies_of_its_shards_are_on_the_other_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # ranks 0 and 1 are on one node, 2 and 3 on the other
    rng, unstruck = random.Random(8), simulate(mesh(1))
    for number in calls(unstruck, 2):
        losses = [Loss(rank, number, rng.random() < 0.5, rng.choice(OTHERS)) for rank in (2, 3)]
        struck = simulate(mesh(1), losses)
        assert (struck.fallback, struck.finished) == (None, unstruck.finished), losses


@SHAPES
def test_workers_that_are_lost_in_each_kind_of_collective_do_as_the_simulated_ranks(
    start: Start, tmp_path: Path, replicas: int
) -> None:
    def train(name: str, strikes: list[Any]) -> tuple[Supervisor, list[tuple[str, int]]]:
        (notes := tmp_path / name).mkdir()
        task = {"replicas": replicas, "epochs": 2, "notes": str(notes), "strikes": strikes}
        script = SUPPORT / "struck_collectives_script.py"
        job = start(task, script=script, out=name, recovery="replay", save_every=5, workers=SIZE, max_restarts=9)
        assert job.result()["verdict"] == "completed", job.stderr
        assert failed_checks(job.out) == []
        return job, [(kind, size) for kind, size in json.loads((notes / "kinds").read_text().splitlines()[-1])]

    rng = random.Random(7)
    unstruck, made = train("unstruck", [])
    kinds = sorted({*made})
    numbers = [rng.choice([number for number, other in enumerate(made) if other == kind]) for kind in kinds]
    strikes = [
        [3 + 3 * n, 1 + n % 3, number, rng.random() < 0.5] for n, number in enumerate(numbers)
    ]  # rank 0 logs losses
    struck, _ = train("struck", strikes)
    assert events(struck.out, "restart", "supervisor") == [], struck.stderr
    regroups = {event.what.number: event.what for event in events(struck.out, "regroup")}
    assert len(regroups) == len(kinds), f"{[*regroups.values()]}\n{struck.stderr}"
    assert different(unstruck.out, struck.out) == []
    assert {*kinds} == simulate(mesh(replicas)).kinds
