"""The order that a sampler gives is drawn from the seed and the epoch alone, and samplers that cannot work are refused."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from attached_runs import attach, close_attached_runs  # noqa: F401 - an autouse fixture
from holdfast.audit.verdicts import audit_run
from holdfast.errors import BadInput
from holdfast.sampler.digest import Samples
from holdfast.train.data.samplers import DrawnOrders
from holdfast.train.state import rng

SIZE = 20


class Shuffled(Sampler[int]):
    """Shuffles with every global generator, and is told the epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE).tolist()
        random.shuffle(order)
        np.random.shuffle(order)
        return iter(order)


class Stateful(Sampler[int]):
    """Draws from a generator of its own, which nobody seeds again."""

    def __init__(self) -> None:
        self._own = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._own.permutation(SIZE).tolist())


@pytest.mark.parametrize(
    "sampler",
    [
        Shuffled(),
        RandomSampler(range(SIZE)),
        WeightedRandomSampler(torch.ones(SIZE), 30, generator=torch.Generator()),
        lambda epoch, seed: torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch + seed)),
    ],
)
def test_an_epoch_has_the_same_order_in_every_process_and_another_one_in_the_next_epoch(sampler: Any) -> None:
    one, other = DrawnOrders(sampler, SIZE, seed=3), DrawnOrders(sampler, SIZE, seed=3)
    assert one.digest == other.digest
    assert one.of(0).tolist() != one.of(1).tolist()
    assert other.of(7).tolist() == one.of(7).tolist()  # without drawing the epochs before
    assert one.digest != DrawnOrders(sampler, SIZE, seed=4).digest


def test_drawing_an_order_leaves_the_random_generators_as_they_were() -> None:
    before = rng.capture()
    DrawnOrders(Shuffled(), SIZE, seed=0).of(1)
    assert rng.capture() == before


def test_a_sampler_is_told_the_epoch() -> None:
    sampler = Shuffled()
    DrawnOrders(sampler, SIZE, seed=0).of(4)
    assert sampler.epochs == [0, 0, 4]


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        (BatchSampler(SequentialSampler(range(SIZE)), 4, drop_last=False), "the run makes the batches"),
        (DistributedSampler(range(SIZE), num_replicas=2, rank=0), "divides the samples among the ranks"),
        (lambda epoch, seed: [[0, 1], [2, 3]], r"returned \[0, 1\] for epoch 0, which is not the index"),
        (lambda epoch, seed: [0.5, 1.5], "returned 0.5 for epoch 0"),
        (lambda epoch, seed: [0, SIZE], "indices from 0 to 20 for epoch 0, and the dataset has samples 0 to 19"),
        (Stateful(), "two different orders for the same epoch"),
        (iter(range(SIZE)), "two different orders for the same epoch"),
        (17, "a int is neither a sampler nor a function"),
    ],
)
def test_a_sampler_that_cannot_work_is_refused_before_training_with_advice(sampler: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        DrawnOrders(sampler, SIZE, seed=0)


def test_an_epoch_with_another_number_of_samples_is_refused() -> None:
    orders = DrawnOrders(lambda epoch, seed: range(10 + epoch), SIZE, seed=0)
    with pytest.raises(BadInput, match="11 indices for epoch 1 and 10 for epoch 0"):
        orders.of(1)


def trained(out: Path, sampler: Any, stop: int | None = None, **options: Any) -> list[int]:
    run = attach(out, save_every=2, **options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.protect(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.arange(float(SIZE))[:, None])
    ids: list[int] = []
    for batch in run.batches(data, sampler=sampler, global_batch=4, num_epochs=2):
        if batch.step == stop:
            break
        ids += batch.ids.tolist()
        model(batch[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return ids


def test_a_run_that_resumes_trains_the_rest_of_the_order(tmp_path: Path) -> None:
    def downwards(epoch: int, seed: int) -> range:
        return range(SIZE - 1, -1, -1) if epoch == 0 else range(SIZE)

    assert trained(tmp_path, downwards, stop=6) == [*range(19, -1, -1), *range(4)]
    assert trained(tmp_path, downwards) == list(range(4, SIZE))


def test_a_run_that_resumes_with_another_sampler_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, range(SIZE), stop=3)
    with pytest.raises(BadInput, match=r"sampler is .*, not"):
        trained(tmp_path, list(reversed(range(SIZE))))
    with pytest.raises(BadInput, match="sampler is None, not"):
        trained(tmp_path, None)


def rewrite(out: Path, kind: str, change: Any) -> None:
    """Change the fields of every event of a kind in rank 0's history."""
    file = out / "history" / "rank-0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["event"] == kind:
            change(line)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def verdict(out: Path, check: str) -> tuple[str, str]:
    return next((found.verdict, found.because) for found in audit_run(out) if found.check == check)


def test_the_audit_names_a_sample_that_the_sampler_did_not_return(tmp_path: Path) -> None:
    trained(tmp_path, range(SIZE))
    assert verdict(tmp_path, "every_sample_trained_once")[0] == "pass"

    def exchange(step: dict[str, Any]) -> None:
        if step["step"] == 6:
            step["samples"] = Samples.of([4, 5, 6, 17]).to_json()

    rewrite(tmp_path, "step", exchange)
    found, because = verdict(tmp_path, "every_sample_trained_once")
    assert found == "fail"
    assert "rank-0 trained sample 17 instead of sample 7" in because


def test_the_audit_fails_if_a_sampler_returned_two_orders_for_an_epoch(tmp_path: Path) -> None:
    weights = {"end": SIZE}

    def forgetful(epoch: int, seed: int) -> list[int]:
        return list(range(SIZE)) if epoch == 0 else [index % weights["end"] for index in range(SIZE)]

    trained(tmp_path, forgetful, stop=7)
    weights["end"] = 10  # what an order depends on has changed between two attempts
    trained(tmp_path, forgetful)
    found, because = verdict(tmp_path, "one_plan")
    assert found == "fail"
    assert "the sampler returned other orders of epoch 1 to rank-0 in attempt 1 and rank-0 in attempt 2" in because


def test_the_audit_cannot_tell_which_samples_were_right_without_the_recorded_orders(tmp_path: Path) -> None:
    trained(tmp_path, range(SIZE))
    rewrite(tmp_path, "order", lambda order: order.update(event="remark"))
    found, because = verdict(tmp_path, "every_sample_trained_once")
    assert (found, because) == ("unknown", "the history does not hold the order that the sampler returned for epoch 0")


def test_the_audit_cannot_tell_which_samples_were_right_if_a_piece_of_an_order_is_missing(tmp_path: Path) -> None:
    trained(tmp_path, range(SIZE))
    rewrite(tmp_path, "order", lambda order: order.update(first=1))
    found, because = verdict(tmp_path, "every_sample_trained_once")
    assert (found, because) == ("unknown", "rank-0 recorded an order of epoch 0 of which a piece is missing")
