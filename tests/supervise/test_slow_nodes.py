"""A node whose workers are all slower than those of the other nodes is named, and a slow worker makes no node slow."""

from collections.abc import Callable

import numpy as np
import pytest

from holdfast.supervise.slow_nodes import LOOKS, WINDOW, SlowNodes, latest_steps
from holdfast.supervise.stragglers import FIRST, LATE, SlowSteps
from seeds import seeds

Times = Callable[[int, int, int], float]
EVERY = 20  # steps from one look to the next


def watched(times: Times, steps: int, *, nodes: int = 3, workers: int = 2, lag: int = 0) -> list[SlowSteps]:
    """Return the reports of a detector; `times` is by node, worker and step. Other nodes' steps are known `lag` late."""
    detector, reports = SlowNodes(), []
    for reached in range(EVERY, steps + 1, EVERY):
        latest = {}
        for node in range(nodes):
            own = [lambda step, node=node, worker=worker: times(node, worker, step) for worker in range(workers)]
            summary = latest_steps(own, reached - (lag if node else 0))
            if summary:
                latest[node] = summary
        reports += detector.look(latest)
    return reports


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_node_that_becomes_slow_is_named_with_the_step_since_when(factor: float) -> None:
    noise = np.random.default_rng(1).lognormal(0, 0.1, (3, 2, 1000))

    def times(node: int, worker: int, step: int) -> float:
        return 0.01 * noise[node, worker, step] * (factor if node == 1 and step >= 500 else 1)

    reports = watched(times, 800)
    assert {report.seat for report in reports} == {1}
    assert 480 <= reports[0].since <= 520
    assert reports[0].until <= 500 + WINDOW + (LOOKS + 1) * EVERY
    assert reports[0].ratio == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("nodes", [2, 4])
def test_noise_names_no_node(seed: int, nodes: int) -> None:
    noise = np.random.default_rng(seed).lognormal(0, 0.4, (nodes, 2, 2000))
    assert watched(lambda node, worker, step: 0.01 * noise[node, worker, step], 2000, nodes=nodes, lag=15) == []


def test_one_slow_worker_makes_no_node_slow() -> None:
    assert watched(lambda node, worker, _: 0.03 if (node, worker) == (1, 0) else 0.01, 1000) == []


def test_steps_that_are_longer_on_all_nodes_make_no_node_slow_although_some_report_them_later() -> None:
    late = 2 * EVERY  # two looks
    assert watched(lambda _, __, step: 0.03 if step // 200 % 2 else 0.01, 2000, lag=late) == []


def test_the_end_of_a_slow_period_is_reported_with_the_seconds_that_the_others_waited() -> None:
    last = watched(lambda node, _, step: 0.03 if node == 2 and 100 <= step < 500 else 0.01, 1000)[-1]
    assert (last.seat, last.is_over) == (2, True)
    assert last.seconds == pytest.approx(400 * 0.02, rel=0.1)


def test_a_slow_node_that_is_lost_ends_its_period() -> None:
    detector = SlowNodes()
    own = {0: 0.01, 1: 0.03}
    for reached in range(WINDOW + FIRST, 400, EVERY):
        detector.look({node: latest_steps([lambda _, t=t: t], reached) for node, t in own.items()})
    (report,) = detector.look({0: latest_steps([lambda _: 0.01], 400)})
    assert (report.seat, report.is_over) == (1, True)
    assert detector.end() == []


def test_a_node_that_trains_no_new_step_is_not_compared_again() -> None:
    detector = SlowNodes()
    steps = {node: latest_steps([lambda _, t=t: t], 100) for node, t in {0: 0.01, 1: 0.03}.items()}
    assert [report for _ in range(50) for report in detector.look(steps)] == []


def test_the_latest_steps_are_those_whose_times_are_known_of_all_workers() -> None:
    known = 200 - LATE // 2
    steps = latest_steps([lambda step: 0.01 if step < known else None, lambda _: 0.02], 200)
    assert steps == (known, 0.01, 0.01)
    assert latest_steps([lambda _: 0.01, lambda _: None], 200) is None
    assert latest_steps([lambda _: 0.01], FIRST + WINDOW - 1) is None
    assert latest_steps([], 200) is None
