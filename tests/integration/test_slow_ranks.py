"""A rank that becomes slower than the others is named, and with `--replace-slow` a spare takes its place."""

import os
import signal

import pytest

from finished_run import failed_checks
from holdfast.cost.breakdown import cost_breakdown
from holdfast.history.log import read_history
from holdfast.processor_wait import COUNTER
from holdfast.supervise.nodes.connection import is_listening
from listening_ports import free_port
from supervisor_process import SUPPORT, Start, wait_until

SCRIPT = SUPPORT / "slow_rank_script.py"


def test_a_rank_slowed_by_half_is_named_with_the_step_and_its_cost(start: Start) -> None:
    job = start(script=SCRIPT, workers=3, args=["300", "1", "150", "1.5"], save_every=100)
    assert job.result()["verdict"] == "completed", job.stderr
    first = job.events("straggler")[0].what
    assert first.rank == 1
    assert 140 <= first.step <= 160
    assert first.until <= 220  # within 50 steps, and the steps of the looks between them
    assert "rank 1 is 1." in job.stderr
    cost = cost_breakdown(read_history(job.out / "history").events)
    (slow,) = cost.stragglers
    assert slow.until >= 290
    assert slow.seconds > 0.3  # 150 steps that are longer by 5 ms
    assert failed_checks(job.out) == []


def test_a_spare_replaces_a_slow_rank_without_a_restart(start: Start) -> None:
    job = start(
        script=SCRIPT,
        workers=3,
        args=["400", "1", "100", "3"],
        save_every=100,
        recovery="replay",
        spares=1,
        replace_slow=1.5,
    )
    assert job.result()["verdict"] == "completed", job.stderr
    assert len(job.events("launch")) == 1
    assert job.events("restart") == []
    (loss,) = job.events("detect")
    assert loss.what.rank == 1
    assert "--replace-slow" in loss.what.message
    last = job.events("straggler")[-1].what
    assert last.until < 300, "the replacement is not slow"
    assert failed_checks(job.out) == []


def test_ranks_of_equal_speed_are_not_named(start: Start) -> None:
    job = start(script=SCRIPT, workers=3, args=["300", "1", "1000", "3"], save_every=50)
    assert job.result()["verdict"] == "completed", job.stderr
    assert job.events("straggler") == []


def test_a_slow_rank_of_a_sharded_model_is_named(start: Start) -> None:
    job = start(script=SCRIPT, workers=3, args=["250", "1", "100", "3", "sharded"], save_every=100, recovery="replay")
    assert job.result()["verdict"] == "completed", job.stderr
    reports = [event.what for event in job.events("straggler")]
    assert {report.rank for report in reports} == {1}
    assert 90 <= reports[0].step <= 110
    assert failed_checks(job.out) == []


@pytest.mark.skipif(not COUNTER.exists(), reason="this kernel does not count how long threads wait")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each rank needs a processor of its own")
def test_a_rank_that_shares_its_processor_with_other_work_is_not_named(start: Start) -> None:
    job = start(script=SUPPORT / "shared_core_script.py", workers=2, args=["200"], save_every=100)
    assert job.result()["verdict"] == "completed", job.stderr
    assert job.events("straggler") == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_node_that_is_slower_than_the_other_one_is_named(start: Start, first: int) -> None:
    endpoint = f"127.0.0.2:{free_port('127.0.0.2')}"
    jobs = {}
    for node in (first, 1 - first):  # the first node to listen at the endpoint decides for both, and reports
        jobs[node] = start(
            script=SCRIPT,
            workers=1,
            args=["100000", "1", "0", "2"],
            save_every=100000,
            nodes={"nnodes": 2, "node_rank": node, "rendezvous": endpoint},
        )
        wait_until(lambda: is_listening(endpoint), "the first node listens")
    who = f"supervisor-{first}"
    wait_until(lambda: bool(jobs[first].events("straggler", who)), "the slow node is named")
    jobs[first].signal(signal.SIGTERM)
    assert [job.result()["verdict"] for job in jobs.values()] == ["preempted"] * 2, jobs[first].stderr
    reports = [event.what for event in jobs[first].events("straggler", who)]
    assert {(report.rank, report.node) for report in reports} == {(None, 1)}
    assert "node 1 is" in jobs[first].stderr
    assert jobs[first].events("straggler", f"supervisor-{1 - first}") == [], "one node reports for all"
