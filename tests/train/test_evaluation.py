"""Ranks divide a dataset for evaluation and combine their numbers; plain values are restored on the rank that saved them."""

import math
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from attached_runs import attach, attached
from finished_run import different, failed_checks
from holdfast import progress
from holdfast.distributed.membership import Membership
from holdfast.distributed.ranks import Ranks
from holdfast.errors import BadInput, WorkerLost
from holdfast.progress import Phase
from holdfast.supervise.hang_detection import LEAST, HangDetector, RemoteProgress, WorkerLook
from holdfast.train.evaluation import MAX_NUMBERS, DatasetShard, RankReducer
from holdfast.train.state.protected import Protected
from supervisor_process import SUPPORT, Start


def of_ranks(size: int, do: Callable[[RankReducer], Any], tensor_parallel: int = 1) -> list[Any]:
    """What every rank has after doing this, all at the same time."""
    store, results, errors = HashStore(), [None] * size, []

    def rank(number: int) -> None:
        world = Ranks(rank=number, size=size, store=store, grouped=True, device=torch.device("cpu"), patience=3)
        world.group(tensor_parallel)
        try:
            results[number] = do(RankReducer(world, None))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    if errors:
        raise errors[0]
    return results


def test_sums_and_weighted_means_are_the_same_on_every_rank() -> None:
    def evaluate(reducer: RankReducer) -> Any:
        rank, _ = reducer.place()
        right = reducer.sum(rank + 1)
        loss = reducer.mean(float(rank) if rank else math.nan, weight=rank)  # rank 0 has no samples
        both = reducer.sum({"a": torch.tensor([0.5, rank]), "b": [np.float64(0.25), True]})
        return right, loss, both["a"].tolist(), both["b"]

    assert of_ranks(3, evaluate) == [(6, (1 + 4) / 3, [1.5, 3.0], [0.75, 3])] * 3


def test_a_sum_of_floats_is_rounded_once_whatever_the_order_of_the_ranks() -> None:
    values = [1e16, 1.0, -1e16]

    def add(order: list[float]) -> Callable[[RankReducer], float]:
        return lambda reducer: float(reducer.sum(order[reducer.place()[0]]))

    assert of_ranks(3, add(values)) == of_ranks(3, add(values[::-1])) == [1.0] * 3


@pytest.mark.parametrize(
    ("value", "weight", "line"),
    [
        ("text", 1.0, "got a str"),
        (torch.zeros(MAX_NUMBERS + 1), 1.0, "at most 65536 numbers"),
        (1.0, -1.0, "must be 0 or more, and finite \\(got -1"),
        (1.0, 0.0, "all ranks have the weight 0"),
    ],
)
def test_values_that_cannot_be_reduced_are_refused(value: Any, weight: float, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        attach().mean(value, weight)


def test_ranks_that_reduce_different_values_are_refused() -> None:
    with pytest.raises(BadInput, match="with different values"):
        of_ranks(2, lambda reducer: reducer.sum([1] * (1 + reducer.place()[0])))


def test_alone_a_number_is_its_own_sum_and_tensors_keep_their_kind() -> None:
    run = attach()
    assert run.sum(3) == 3
    assert run.mean(0.1, weight=7) == pytest.approx(0.1)
    assert run.sum(torch.tensor([1, 2])).dtype == torch.int64
    assert run.mean(torch.tensor(1.5, dtype=torch.float64)).dtype == torch.float64
    assert [len(run.shard(range(5))), list(run.shard(range(5)))] == [5, [0, 1, 2, 3, 4]]


def test_the_ranks_of_a_tensor_parallel_group_evaluate_one_part_and_count_once() -> None:
    def evaluate(reducer: RankReducer) -> Any:
        part = list(DatasetShard(range(10), reducer.place, whole))
        return part, reducer.sum(len(part)), reducer.mean(sum(part) / len(part), weight=len(part))

    halves = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert of_ranks(4, evaluate, tensor_parallel=2) == [(halves[rank // 2], 10, 4.5) for rank in range(4)]


def whole() -> bool:
    """Return False: the models are not sharded."""
    return False


@settings(max_examples=4 * settings.default.max_examples)
@given(samples=st.integers(1, 30), world=st.integers(1, 5), batch=st.integers(1, 12))
def test_with_a_sharded_model_exactly_those_parts_are_refused_that_have_a_batch_more_than_others(
    samples: int, world: int, batch: int
) -> None:
    shards = [DatasetShard(range(samples), lambda rank=rank: (rank, world), lambda: True) for rank in range(world)]  # type: ignore[misc]
    loaders = [DataLoader(shard, batch_size=batch) for shard in shards]
    fewest = min(map(len, loaders))
    for loader in loaders:
        if len(loader) > fewest:
            with pytest.raises(BadInput, match="one batch less: with a sharded model every forward needs all ranks"):
                list(loader)
        else:
            assert len(list(loader)) == fewest


@settings(max_examples=50)
@given(samples=st.integers(1, 40), world=st.integers(1, 9))
def test_the_parts_of_all_ranks_are_the_whole_and_differ_by_at_most_one(samples: int, world: int) -> None:
    parts = [list(DatasetShard(range(samples), lambda rank=rank: (rank, world), whole)) for rank in range(world)]  # type: ignore[misc]
    assert [each for part in parts for each in part] == list(range(samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_part_is_found_anew_before_every_pass_also_by_processes_that_load() -> None:
    place = [(0, 3)]
    shard = DatasetShard(range(12), lambda: place[0], whole)
    loader = DataLoader(shard, batch_size=3, num_workers=1, persistent_workers=True)
    assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3]
    place[0] = (1, 2)  # a rank was lost
    assert torch.cat(list(loader)).tolist() == [6, 7, 8, 9, 10, 11]


class Lost:
    """A run of three that recovers live, in which member 1 is lost and we are member 0."""

    def __init__(self) -> None:
        self.member, self.members, self.is_joining = 0, (0, 1, 2), False
        self.shared = HashStore()
        self.shared.set_timeout(timedelta(seconds=5))
        self.coordination = SimpleNamespace(number=0, newest=Membership(1, (0, 2)), store=lambda: self.shared)


@pytest.fixture
def fallen() -> Any:
    """The memory in which a rank says that only a restart helps."""
    before = progress.here
    progress.adopt(progress.Progress())
    yield progress
    progress.adopt(before)


def test_what_a_lost_rank_said_before_counts_and_what_it_did_not_say_needs_a_restart(fallen: Any) -> None:
    live = Lost()
    world = Ranks(rank=0, size=3, store=HashStore(), grouped=True, device=torch.device("cpu"), patience=5)
    reducer = RankReducer(world, live)  # type: ignore[arg-type]
    for member in (1, 2):
        live.shared.set(f"evaluation/evaluate/-1/1/{member}", '["*", 1.0, [2.5]]')
    assert reducer.sum(1.0) == 6.0
    live.shared.set("evaluation/evaluate/-1/2/2", '["*", 1.0, [2.5]]')
    with pytest.raises(WorkerLost, match="the run restarts from its newest snapshot"):
        reducer.sum(1.0)
    assert fallen.here.has_fallen_back


def test_a_rank_that_is_lost_while_its_part_is_evaluated_needs_a_restart(fallen: Any) -> None:
    live = Lost()
    world = Ranks(rank=0, size=3, store=HashStore(), grouped=True, device=torch.device("cpu"), patience=5)
    reducer = RankReducer(world, live)  # type: ignore[arg-type]
    fallen.here.pass_boundary(0)
    reducer.place()
    live.members = (0, 2)
    with pytest.raises(WorkerLost, match="lost or joined while its part"):
        reducer.sum(1.0)


def test_an_evaluation_that_goes_on_is_no_hang_and_one_that_does_not_is() -> None:
    detector = HangDetector(None)
    detector.begin()

    def look(seconds: float, evaluated: int) -> bool:
        seen = WorkerLook(seat=0, boundaries=5, evaluated=evaluated, phase=Phase.TRAINING)
        return bool(detector.look([seen], seconds, lambda _: 0.0, RemoteProgress()))

    steps = int(8 * LEAST)
    assert not any(look(0.5 * number, number // 500) for number in range(steps))
    assert any(look(0.5 * number, -1) for number in range(steps, 2 * steps))


def test_plain_values_come_back_in_place() -> None:
    values = {"best": 0.25, "seen": [1, 2], "by": {"a": np.float32(0.1)}, "gone": None}
    average, counts = torch.ones(2), np.zeros(3)
    protected = Protected({"values": values, "average": average, "counts": counts, "log": (log := [1.5])})
    saved = protected.own()
    seen, by = values["seen"], values["by"]
    values.update(best=math.inf, new=1)
    del values["gone"]
    seen.append(3)  # type: ignore[union-attr]
    by["a"] = 7  # type: ignore[index,call-overload]
    average.zero_()
    counts += 1
    log.clear()
    protected.restore_own(saved)
    assert values == {"best": 0.25, "seen": [1, 2], "by": {"a": np.float32(0.1)}, "gone": None}
    assert values["seen"] is seen
    assert values["by"] is by
    assert type(by["a"]) is np.float32  # type: ignore[index,call-overload]
    assert (average.tolist(), counts.tolist(), log) == ([1, 1], [0, 0, 0], [1.5])


@pytest.mark.parametrize(
    ("thing", "line"),
    [
        (0.5, r"best is a float, which cannot be restored in place: write values = \{'best': ...\}"),
        ({"a": {1, 2}}, "is a set, which cannot be saved"),
        ({"a": "x" * (1 << 20)}, "plain values may take"),
        (object(), "lacks state_dict"),
    ],
)
def test_a_plain_value_that_cannot_come_back_is_refused(thing: Any, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        Protected({"best": thing})


def test_a_scheduler_that_follows_the_best_value_goes_on_after_a_failure(tmp_path: Path) -> None:
    def train(out: Path, steps: int | None = None) -> None:
        run = attach(out, save_every=2)
        model = run.replicate(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        progress = {"best": math.inf, "total": 0.0}
        run.protect(model=model, optimizer=optimizer, scheduler=scheduler, progress=progress)
        for batch in run.batches(torch.arange(24.0).reshape(-1, 1) / 24, global_batch=2, num_epochs=1):  # type: ignore[arg-type]
            loss = model(batch.data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress["total"] += loss.item()
            progress["best"] = min(progress["best"], loss.item())
            scheduler.step(progress["best"])
            if batch.step == steps:
                raise OSError("a failure")

    train(tmp_path / "whole")
    for steps in (3, 8):
        with pytest.raises(OSError, match="a failure"):
            train(tmp_path / "parts", steps)
        attached.pop().close()
    train(tmp_path / "parts")
    assert different(tmp_path / "whole", tmp_path / "parts") == []
    assert failed_checks(tmp_path / "parts") == []


@pytest.mark.parametrize("recovery", ["restart", "replay"])
def test_a_rank_killed_in_the_middle_of_an_evaluation_changes_no_bit(
    start: Start, start_reference: Start, recovery: str
) -> None:
    how: dict[str, Any] = {
        "script": SUPPORT / "evaluation_script.py",
        "workers": 2,
        "save_every": 3,
    }
    reference = start_reference(args=["-1"], **how)
    job = start(args=["1"], recovery=recovery, **how)
    for each in (reference, job):
        assert each.result().get("verdict") == "completed", each.stderr
    assert job.result()["attempts"] == 2
    assert reference.stdout.splitlines()[-1] == job.stdout.splitlines()[-1]  # each rank's sums, and the best mean
    assert different(reference.out, job.out) == []
    assert failed_checks(job.out) == []
