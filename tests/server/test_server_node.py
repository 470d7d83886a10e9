"""While a node chooses what to save, workers can pull from it, and methods that change blocks wait."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from holdfast.server.server_node import THREADS, ServerNode
from holdfast.workloads.divided import RoundId
from repository import EXAMPLES
from server_runs import settings

WITHIN = 60.0  # seconds
ALL = np.arange(500)
EXAMPLE = EXAMPLES / "pagerank.py"
QUESTION = ("survey", -np.inf, 0)
SLOW = f"""
import importlib.util, time
from pathlib import Path

from holdfast.blocks.division import euclidean

found = importlib.util.spec_from_file_location("pagerank", {str(EXAMPLE)!r})
pagerank = importlib.util.module_from_spec(found)
found.loader.exec_module(pagerank)
HERE = Path(__file__).parent


def slow(blocks, a, b):
    (HERE / "measures").touch()
    deadline = time.monotonic() + {WITHIN}
    while not (HERE / "go on").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody said that it may go on")
        time.sleep(0.005)
    return euclidean(blocks, a, b)


class Slow(pagerank.PageRank):
    norm = staticmethod(slow)


def workload(data):
    made = pagerank.workload(data)
    return Slow(made.pages, made.links)
"""


@pytest.fixture
def slow(tmp_path: Path) -> Any:
    """A run whose nodes measure distances until they are told to go on."""
    (tmp_path / "slow.py").write_text(SLOW)
    return settings(tmp_path, workload=str(tmp_path / "slow.py"))


def awaited(there: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + WITHIN
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_cluster")
def test_workers_pull_while_a_node_measures_how_far_its_blocks_have_moved(tmp_path: Path, slow: Any) -> None:
    options: Any = {"num_cpus": 0, "concurrency_groups": THREADS}
    node: Any = ray.remote(**options)(ServerNode).remote(0, slow)
    try:
        ray.get(node.begin.remote(ALL, 0), timeout=WITHIN)
        answer = node.answer.remote(1, *QUESTION)
        awaited((tmp_path / "measures").exists)

        pulled, _ = ray.get(node.pull.remote(0, ALL), timeout=WITHIN)
        assert len(pulled["rank"]) == len(ALL)

        (tmp_path / "go on").touch()
        assert ray.get(answer, timeout=WITHIN).candidates == len(ALL)
    finally:
        ray.kill(node)


def test_a_round_is_not_applied_while_a_node_measures(tmp_path: Path, slow: Any) -> None:
    node, answers = ServerNode(0, slow), []
    node.begin(ALL, 0)
    before = node.pull(0, ALL)[0]["rank"]
    choosing = threading.Thread(target=lambda: answers.append(node.answer(1, *QUESTION)))
    choosing.start()
    awaited((tmp_path / "measures").exists)

    applying = threading.Thread(target=lambda: node.commit(0, RoundId(0, 0, 0), (0, 1)))
    applying.start()
    applying.join(0.1)
    assert applying.is_alive()
    assert np.array_equal(node.pull(0, ALL)[0]["rank"], before)
    (tmp_path / "go on").touch()
    for each in (choosing, applying):
        each.join(WITHIN)
        assert not each.is_alive()
    assert len(answers) == 1
    node.close()
