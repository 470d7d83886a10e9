"""Workers of several nodes recover live: the node at which they meet decides for all, and a whole node may be lost."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from finished_run import different, events, failed_checks
from live_runs import EPOCHS, PATIENCE
from supervisor_process import SUPPORT, Start, Supervisor, wait_until

LOOP = SUPPORT / "training_script.py"
HOW: dict[str, Any] = {"script": LOOP, "save_every": 10}
TASK = {"epochs": EPOCHS, "patience": PATIENCE}


@pytest.fixture
def two(start: Start) -> Any:
    """Start two nodes with two workers each; the first one is where they meet."""

    def run(
        recovery: str, failures: list[dict[str, Any]], workers: int = 2, script: Path = LOOP, **task: Any
    ) -> list[Supervisor]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = probe.getsockname()
        nodes = {"nnodes": 2, "rendezvous": f"{where[0]}:{where[1]}", "min_nodes": 1, "lost_after": 4.0}
        jobs = []
        for rank in (0, 1):
            how = {**HOW, "script": script, "workers": workers, "recovery": recovery, "failures": failures}
            jobs.append(start({**TASK, **task}, nodes={**nodes, "node_rank": rank}, **how))
            wait_until(lambda: answers(where), "the first node to listen")
        return jobs

    return run


def answers(where: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(where) == 0


def completed(jobs: list[Supervisor], *, restarts: int = 0) -> Path:
    said = "\n".join(job.stderr for job in jobs)
    for job in jobs:
        assert job.result().get("verdict") == "completed", (job.result(), said)
    assert len({event.what.attempt for event in events(jobs[0].out, "restart")}) == restarts, said
    assert failed_checks(jobs[0].out) == [], said
    return jobs[0].out


def pids(out: Path, rank: int) -> set[int]:
    return {event.what.pid for event in events(out, "attempt", f"rank-{rank}")}


@pytest.mark.parametrize("lost", [[0], [3], [2, 3]], ids=str)
def test_workers_continue_without_lost_workers_on_any_node(two: Any, lost: list[int]) -> None:
    out = completed(two("forward", [{"step": 12, "kind": "kill", "targets": lost}]))
    assert all(len(pids(out, rank)) == 1 + (rank in lost) for rank in range(4))
    worlds = [event.what.world for event in events(out, "step", "rank-1")]
    assert (worlds[0], min(worlds), worlds[-1]) == (4, 4 - len(lost), 4)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_only_worker_of_a_node_is_replaced(two: Any, lost: int) -> None:
    out = completed(two("forward", [{"step": 12, "kind": "kill", "targets": [lost]}], workers=1))
    assert [len(pids(out, rank)) for rank in range(2)] == [1 + (rank == lost) for rank in range(2)]


def test_a_step_replayed_on_several_nodes_is_the_exact_step(two: Any, start: Start) -> None:
    reference = start({"model": "normed", "epochs": EPOCHS}, out="reference", workers=4, recovery="replay", **HOW)
    out = completed(two("replay", [{"step": 12, "kind": "kill", "targets": [1, 2]}], model="normed"))
    assert reference.result()["verdict"] == "completed", reference.stderr
    assert different(reference.out, out) == []


def test_the_shards_of_all_workers_of_a_node_come_back_from_the_other_node(two: Any, start: Start) -> None:
    sharded = SUPPORT / "fsdp_script.py"
    reference = start({"epochs": 2}, out="reference", script=sharded, workers=4, save_every=10)
    failures = [{"step": 12, "kind": "kill", "targets": [2, 3], "point": "backward=0.5"}]
    out = completed(two("replay", failures, script=sharded, epochs=2))
    assert reference.result()["verdict"] == "completed", reference.stderr
    assert different(reference.out, out) == []


def test_the_workers_of_other_nodes_continue_without_a_lost_node(two: Any, tmp_path: Path) -> None:
    first, second = two("forward", [], gate=str(tmp_path / "gate"), patience=0.0)
    wait_until(lambda: len(events(first.out, "step", "rank-0")) > 20, "some steps")
    os.kill(second.pid, signal.SIGKILL)
    wait_until(lambda: bool(events(first.out, "regroup", "rank-0")), "the others to go on")
    (tmp_path / "gate").touch()
    out = completed([first])
    assert all(len(pids(out, rank)) == 1 for rank in range(4))
    assert [event.what.world for event in events(out, "step", "rank-0")][-1] == 2


def test_the_other_nodes_restart_when_the_rendezvous_node_is_lost(two: Any, tmp_path: Path) -> None:
    first, second = two("forward", [], gate=str(tmp_path / "gate"), patience=0.0)
    wait_until(lambda: len(events(first.out, "step", "rank-0")) > 20, "some steps")
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: bool(events(first.out, "restart")), "the others to start again")
    (tmp_path / "gate").touch()
    completed([second], restarts=1)
