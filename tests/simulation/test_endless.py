"""A schedule that does not end is reported with its seed."""

import sys
import threading
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from simulation import cluster, scheduler
from simulation.live import play_live
from simulation.schedule import Outcome, failures, play
from simulation.scheduler import Process, World

BENCH = Path(__file__).parents[2] / "benchmarks" / "simulation" / "bench.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = util.spec_from_file_location("simulation_bench", BENCH)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("wait", [0.0, 1e-9, 0.5])
def test_tasks_that_wait_again_and_again_end_after_the_last_operation(
    wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "OPERATIONS", 100)
    world = World(0)

    def look_forever() -> None:
        while True:
            world.sleep(wait)

    for name in ("one", "other"):
        world.spawn(Process(name, 0), look_forever)
    world.run(float("inf"))
    assert failures(world) == [f"the schedule does not end: it is at {world.now:.0f} s, after 100 operations"]


@pytest.mark.parametrize(("seed", "play_one"), [(0, play), (1, play_live)])
def test_a_schedule_with_too_many_operations_has_a_violation(
    seed: int, play_one: Callable[[int], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "OPERATIONS", 50)
    assert "the schedule does not end" in play_one(seed).violations[0]


def test_a_schedule_that_restarts_again_and_again_has_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ATTEMPTS", 2)
    assert "it restarts again and again" in play(2612).violations[0], "2612 restarts several times"


def test_the_benchmark_reports_a_schedule_with_a_task_that_never_returns(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = threading.Event()

    def play_stuck(seed: int) -> None:
        world = World(seed)
        world.spawn(Process("stuck", 0), lambda: freed.wait() and None)
        world.run(1.0)

    monkeypatch.setattr(bench, "play_any", play_stuck)
    monkeypatch.setattr(bench, "ENDS_WITHIN", 0.05)
    report = bench.play_some(range(7, 9), float("inf"))
    freed.set()
    assert report.wrong == {7: ["the schedule did not end within 0.05 s of the real clock"]}
