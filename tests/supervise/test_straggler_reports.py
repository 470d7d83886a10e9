"""The supervisor writes down a slow worker and replaces it only if a spare is ready."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.events import Straggler
from holdfast.progress import Phase, Progress
from holdfast.supervise import straggler_reports
from holdfast.supervise.straggler_reports import StragglerReports


class FakeRun:
    """Three workers and a spare, whose steps a test reports; rank 0 takes 30 ms instead of 10."""

    def __init__(self, replace_from: float | None, *, has_ready_spare: bool = True) -> None:
        self.events: list[Straggler] = []
        self.lines: list[str] = []
        self.workers = [self._worker(seat, is_in_reserve=seat == 3) for seat in range(4)]
        self.workers[3].is_ready = has_ready_spare
        journal = SimpleNamespace(append=self.events.append)
        display = SimpleNamespace(say=lambda line, style="": self.lines.append(line))
        pool = SimpleNamespace(running=self.workers)
        self.reports = StragglerReports(cast(Any, pool), cast(Any, journal), cast(Any, display), replace_from)

    def _worker(self, seat: int, *, is_in_reserve: bool) -> Any:
        progress = Progress()
        progress.phase = Phase.TRAINING
        task = SimpleNamespace(progress=progress)
        return SimpleNamespace(
            seat=seat, rank=seat, is_in_reserve=is_in_reserve, is_ready=False, has_failed=False, hung="", task=task
        )

    def train(self, steps: int) -> None:
        for step in range(steps):
            for worker in self.workers[:3]:
                worker.task.progress.report_own_time(step, 0.03 if worker.rank == 0 else 0.01)
                worker.task.progress.step = step + 1
            self.reports.look(attempt=1)


@pytest.fixture(autouse=True)
def _look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggler_reports, "LOOK", 0.0)


def test_a_slow_worker_is_recorded_and_shown() -> None:
    run = FakeRun(None)
    run.train(60)
    assert run.events[0].rank == 0
    assert run.events[0].ratio == pytest.approx(3.0, rel=0.01)
    assert "rank 0 is 3.0 times as slow as the other workers since step" in run.lines[0]
    assert not any(worker.hung for worker in run.workers)


def test_a_ready_spare_replaces_a_slow_worker() -> None:
    run = FakeRun(1.5)
    run.train(60)
    assert "(limit 1.5, from --replace-slow): a spare replaces it" in run.workers[0].hung


@pytest.mark.parametrize("limit", [1.5, 4.0])
def test_a_slow_worker_stays_without_a_ready_spare_or_below_the_limit(limit: float) -> None:
    run = FakeRun(limit, has_ready_spare=limit > 3)
    run.train(60)
    assert run.events
    assert not run.workers[0].hung


def test_a_slow_node_is_recorded_and_shown() -> None:
    run = FakeRun(None)
    for step in range(200):
        for worker in run.workers[:3]:
            worker.task.progress.report_own_time(step, 0.01)
            worker.task.progress.step = step + 1
        run.reports.look(attempt=1)
        if steps := run.reports.latest_steps():
            run.reports.look_at_nodes({0: steps, 1: steps._replace(shortest=0.02, usual=0.02)})
    assert (run.events[0].rank, run.events[0].node, run.events[0].ratio) == (None, 1, 2.0)
    assert "node 1 is 2.0 times as slow as the other nodes since step" in run.lines[0]
    run.reports.end()
    assert len(run.events) == len(run.lines) + 1


def test_a_new_attempt_ends_the_slow_periods_of_the_last() -> None:
    run = FakeRun(None)
    run.train(60)
    count = len(run.events)
    run.reports.look(attempt=2)
    assert len(run.events) == count + 1
    assert run.events[-1].attempt == 1
