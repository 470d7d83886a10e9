"""Gradients are summed alike by a process that was resumed and by one that was never stopped, weighted by share."""

import json
from typing import Any

import pytest
from torch import nn
from torch.distributed import HashStore

from holdfast.distributed.membership import Coordination
from holdfast.errors import BadInput
from holdfast.live.recovery import LiveRecovery
from holdfast.train.replicate import Replica
from supervisor_process import SUPPORT, Start

Found = list[dict[str, Any]]
WAYS = ("default", "uneven", "views", "uneven views", "small buckets", "unused", "static")
RANKS, STEPS = 3, 3


@pytest.fixture(scope="module")
def found() -> Found:
    """What every rank found; filled by whoever is first."""
    return []


@pytest.fixture
def sums(found: Found, start: Start) -> Found:
    """One run for all tests of this file."""
    if not found:
        job = start(None, script=SUPPORT / "replica_script.py", workers=RANKS, max_restarts=0)
        assert job.result()["verdict"] == "completed", job.stderr
        found += [json.loads((job.out / f"sums-{rank}.json").read_text()) for rank in range(RANKS)]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_process_sums_to_the_same_bits(sums: Found, way: str) -> None:
    assert all(each[way]["same"] for each in sums)


@pytest.mark.parametrize("way", WAYS)
def test_the_buckets_of_ddp_are_final_before_the_first_backward(sums: Found, way: str) -> None:
    for each in sums:
        first, *later = each[way]["layouts"]
        assert later == [first] * STEPS
        assert len(first) > 2


@pytest.mark.parametrize("way", WAYS)
def test_summed_and_held_back_passes_are_counted(sums: Found, way: str) -> None:
    for each in sums:
        passes, held = (2 * STEPS, 0) if way == "static" else (STEPS, STEPS)
        assert (each[way]["reduced"], each[way]["held"]) == (passes, held)


def test_every_rank_is_weighted_by_its_share(sums: Found) -> None:
    assert all(0 < error < 1e-5 for each in sums for error in each["errors"].values())


def test_other_work_runs_after_the_last_sum_has_begun(sums: Found) -> None:
    for each in sums:
        *before, last = each["order"]
        assert last == "meanwhile"
        assert set(before) == {"sum"}


def test_two_replicas_count_for_themselves(sums: Found) -> None:
    assert [each["two"] for each in sums] == [[[1, 1], [0, 0]]] * RANKS


def test_a_hook_that_would_sum_without_weights_is_refused(sums: Found) -> None:
    assert {each["hook"] for each in sums} == {
        "A replicated model sums its gradients itself: leave out register_comm_hook."
    }


def test_optimizers_that_step_inside_backward_are_refused(sums: Found) -> None:
    assert {each["inside"] for each in sums} == {
        "A replicated model sums its gradients itself: leave out register_comm_hook."
    }


def test_torch_compile_finds_the_replicated_model_in_its_forward(sums: Found) -> None:
    """In the first forward, which is DDP's own, and in those after it, which are ours; and in none after one failed."""
    assert [each["asked"] for each in sums] == [["ours", "ours", "None"]] * RANKS


def test_a_replicated_model_can_be_copied(sums: Found) -> None:
    assert all(each["copied"] for each in sums)


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        (
            nn.Linear(2, 2),
            {"find_unused_parameters": True},
            "find_unused_parameters: leave it out and use every parameter",
        ),
        (nn.Linear(2, 2), {"static_graph": True}, "static_graph: leave it out, or choose restart"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), {}, "sparse gradients, which 0 has: leave out sparse=True"),
        (nn.EmbeddingBag(3, 2, sparse=True), {}, "sparse gradients, which the model has"),
    ],
    ids=["unused", "static", "embedding", "bag"],
)
def test_models_and_options_that_live_recovery_does_not_support_are_refused_in_one_line(
    model: nn.Module, options: dict[str, Any], named: str
) -> None:
    live = LiveRecovery("forward", 2, Coordination(0, (0, 1), HashStore, seat=0))
    with pytest.raises(BadInput, match=f"^Live recovery does not support .*{named}") as refused:
        Replica(model, options, live)
    assert "\n" not in str(refused.value)
