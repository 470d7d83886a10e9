"""Live recovery is advised only where it is possible: over gloo, and with some tens of workers at most."""

from dataclasses import replace

import pytest

from fake_histories import calm
from holdfast.advice.advice import advise
from holdfast.advice.live_limits import MESH, NODE, why_restart
from holdfast.advice.question import Question
from holdfast.advice.run_costs import run_costs

COSTS = run_costs(calm().events)  # of 4 workers


def test_a_job_larger_than_a_node_is_assumed_to_use_nccl() -> None:
    assert why_restart(COSTS, Question(workers=NODE)) is None
    limit = why_restart(COSTS, Question(workers=NODE + 1))
    assert limit is not None
    assert "over NCCL (assumed for a job larger than a node)" in limit
    assert "--backend gloo" in limit


def test_the_given_number_of_nodes_decides_if_a_job_is_larger_than_a_node() -> None:
    assert why_restart(COSTS, Question(workers=16, nodes=1)) is None
    assert why_restart(COSTS, Question(workers=8, nodes=2)) is not None


def test_the_given_backend_decides_up_to_some_tens_of_workers() -> None:
    assert why_restart(COSTS, Question(workers=MESH, backend="gloo")) is None
    assert "docs/scale.md" in (why_restart(COSTS, Question(workers=MESH + 1, backend="gloo")) or "")
    assert "over NCCL (given)" in (why_restart(COSTS, Question(backend="nccl")) or "")


def test_a_sharded_job_restarts_over_nccl_at_every_loss() -> None:
    limit = why_restart(replace(COSTS, sharded=True), Question(workers=256))
    assert limit is not None
    assert limit.startswith("replay and partial need gloo; over NCCL")


@pytest.mark.parametrize(
    ("workers", "backend", "is_live"), [(48, None, False), (48, "gloo", True), (16384, "gloo", False)]
)
def test_the_advice_is_restart_where_live_recovery_is_not_possible(
    workers: int, backend: str | None, is_live: bool
) -> None:
    question = Question(workers=workers, backend=backend, mtbf=3600.0, restart=120.0, stall=5.0)
    found = advise(calm().events, question)
    assert (found.recovery != "restart") == is_live
    assert found.save_every == found.outlooks[found.recovery].interval.best
    if not is_live:
        limit = why_restart(found.costs, question)
        assert limit is not None
        assert any(line[1:] == limit[1:] for line in found.unknown)
        assert any(line.endswith(f"Only restart is advised: {limit}") for line in found.reasons)
