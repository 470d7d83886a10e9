"""What a scheduler does to a run: it asks all processes of all nodes to stop, gives them a grace, and starts them again."""

import os
import signal
from contextlib import suppress
from typing import Any

from listening_ports import free_port
from supervisor_process import Start, Supervisor, alive, descendants, wait_until


def nodes(start: Start, task: dict[str, Any]) -> list[Supervisor]:
    """The two commands of docs/clusters.md, which share a folder."""
    endpoint = f"127.0.0.2:{free_port('127.0.0.2')}"
    return [
        start(task, workers=1, nodes={"nnodes": 2, "node_rank": rank, "rendezvous": endpoint}, save_every=50_000)
        for rank in (0, 1)
    ]


def test_a_job_that_is_preempted_on_all_nodes_saves_and_goes_on_when_it_is_started_again(
    start: Start,
) -> None:
    endless = {"steps": 100_000, "pause": 0.01, "save_every": 50_000}
    jobs = nodes(start, endless)
    wait_until(lambda: len(jobs[0].notes("step")) > 2, f"a few steps; it said {jobs[0].stderr}")
    processes = [pid for job in jobs for pid in (job.pid, *descendants(job.pid))]
    for pid in processes:  # as SLURM and Ray do; Kubernetes asks the first process of each pod
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert [job.result()["verdict"] for job in jobs] == ["preempted"] * 2, jobs[0].stderr + jobs[1].stderr
    wait_until(lambda: not any(map(alive, processes)), "all processes to end")
    reached = jobs[0].notes("step")[-1]["step"] + 1

    again = nodes(start, endless)
    wait_until(lambda: all(len(again[0].notes("attempt", rank)) > 1 for rank in (0, 1)), "the next start of both")
    assert [again[0].notes("attempt", rank)[1]["first"] for rank in (0, 1)] == [reached] * 2
    again[1].signal(signal.SIGTERM)
    assert [job.result()["verdict"] for job in again] == ["preempted"] * 2, again[0].stderr + again[1].stderr
