"""Workloads and clusters on which only Ray itself can tell: topics, the network, a model of one's own, and an address."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from holdfast import events
from holdfast.audit.verdicts import audit, worst
from holdfast.faults.schedule import Failure
from holdfast.history.log import read_history
from repository import EXAMPLES
from server_runs import served, told

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize(
    "workload",
    ["lda-generated", "cnn-digits", str(EXAMPLES / "pagerank.py")],
    ids=["topics", "network", "a model of one's own"],
)
def test_a_workload_is_trained_on_ray_and_outlives_a_node(tmp_path: Path, workload: str) -> None:
    failure = Failure(step=1, kind="node", targets=(1,))
    outcome = served(tmp_path, failure, workload=workload, nodes=2, workers=1, iterations=3)

    losses = [event.loss for event in told(tmp_path, events.Iterate)]
    assert outcome.iterations == len(losses) == 3
    assert losses[-1] < losses[0]
    assert [event.number for event in told(tmp_path, events.Lost)] == [1]
    findings = audit(read_history(tmp_path).events)
    assert worst(findings) == "pass", findings


def test_a_cluster_that_runs_is_used_by_its_address(tmp_path: Path) -> None:
    """From another process, as a user does; the cluster is left as it was."""
    address = ray.get_runtime_context().gcs_address
    there = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    words = [
        "--workload",
        "mlr-digits",
        "--out",
        str(tmp_path),
        "--iterations",
        "3",
        "--workers",
        "1",
        "--inject",
        "kill@1",
        "--address",
        address,
    ]

    ended = subprocess.run(
        [sys.executable, "-c", "from holdfast.cli import main; main()", "serve", "train", *words],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=dict(os.environ),
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("did not converge after 3 iterations")
    assert "Traceback" not in ended.stderr
    assert {node["NodeID"] for node in ray.nodes() if node["Alive"]} == there
    assert len(told(tmp_path, events.Iterate)) == 3
