"""Failures at every point of a step, in real runs: they strike where they were told to, and once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import step_dump_script
from finished_run import different, events, failed_checks
from holdfast.cost.breakdown import cost_breakdown
from holdfast.errors import BadInput
from holdfast.faults import points
from holdfast.faults.schedule import Failure
from holdfast.history.log import read_history
from holdfast.history.tail import read_past
from holdfast.lab.backprop.simulated_workers import Interruption, Share, apply_gradients, compute_gradients
from holdfast.runs.config import RunConfig
from holdfast.sampler.plan import SamplePlan
from holdfast.train import inject
from holdfast.train.inject import Injection
from live_runs import LOOP, WORKERS, fingerprints, run_with_live_recovery
from supervisor_process import SUPPORT, Start, Supervisor

INSIDE = [
    {"step": 3, "point": "forward", "targets": [1, 2]},
    {"step": 8, "point": "backward=0.5", "targets": [1, 3]},
    {"step": 13, "point": "optimizer", "targets": [0]},
    {"step": 16, "point": "save", "targets": [0]},
    {"step": 26, "point": "save", "targets": [1]},
]
LIVED = [
    {"step": 3, "point": "forward", "targets": [1]},
    {"step": 14, "point": "backward=0", "targets": [3]},
    {"step": 26, "point": "backward=0.5", "targets": [1, 3]},
    {"step": 38, "point": "backward=1", "targets": [0]},
    {"step": 50, "point": "optimizer", "targets": [2]},
    {"step": 62, "point": "save", "targets": [0]},
    {"step": 90, "point": "recovery", "targets": [2]},
    {"step": 98, "point": "boundary", "targets": [0]},
]
SEVERAL = {"bucket": 0.0003}  # three buckets


def killed(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"kind": "kill", **failure} for failure in failures]


def planned(failures: list[dict[str, Any]]) -> set[tuple[int, str, int]]:
    return {(each["step"], each["point"], rank) for each in failures for rank in each["targets"]}


def assert_accounted_for(job: Supervisor, failures: list[dict[str, Any]]) -> None:
    """Every failure struck as it was planned; the audit passes, and the cost knows all of them."""
    struck = [(event.what.step, event.what.point, event.what.rank) for event in events(job.out, "failure")]
    assert sorted(struck) == sorted(planned(failures))
    assert failed_checks(job.out) == []
    known = {(cost.rank, cost.kind) for cost in cost_breakdown(read_history(job.out).events).failures}
    assert known == {(rank, "kill") for _, _, rank in struck}


def test_after_a_failure_at_any_point_a_restart_and_a_replay_are_exact(start: Start) -> None:
    how: dict[str, Any] = {"script": LOOP, "workers": WORKERS, "save_every": 10}
    task = {**SEVERAL, "epochs": 6}
    reference = start(task, out="reference", **how)
    job = start(task, out="restarted", failures=killed(INSIDE), **how)
    assert job.result()["verdict"] == "completed", job.stderr
    assert reference.result()["verdict"] == "completed", reference.stderr
    assert len(events(job.out, "restart")) == len(INSIDE)
    assert_accounted_for(job, INSIDE)
    assert different(reference.out, job.out) == []
    within = [{"step": 12, "point": "backward=0.5", "targets": [0, 2]}]
    job = run_with_live_recovery(start, "replay", killed(within), **task)
    assert_accounted_for(job, within)
    assert different(reference.out, job.out) == []


def test_survivors_recover_forward_from_every_point(start: Start) -> None:
    job = run_with_live_recovery(start, "forward", killed(LIVED), **SEVERAL, epochs=19, patience=0.5)
    assert_accounted_for(job, LIVED)
    assert all(len(each) == 1 for each in fingerprints(job.out).values())
    kept = {(event.what.step, event.what.kept, event.what.redone) for event in events(job.out, "regroup")}
    assert (14, 0, 3) in kept  # before the first sum: nobody has any
    assert (26, 1, 2) in kept
    assert not any(step == 38 and redone for step, _, redone in kept)  # every sum was done


@pytest.mark.parametrize("strategy", ["forward", "skip"])
def test_a_failed_step_has_the_gradients_of_the_simulation(start: Start, tmp_path: Path, strategy: str) -> None:
    lost, point = (1, 3), 0.5
    failures = [{"step": step_dump_script.STEP, "kind": "kill", "point": f"backward={point}", "targets": lost}]
    job = start(
        script=SUPPORT / "step_dump_script.py",
        args=[str(tmp_path)],
        workers=WORKERS,
        recovery=strategy,
        failures=failures,
    )
    assert job.result().get("verdict") == "completed", job.stderr
    assert not events(job.out, "restart"), job.stderr
    first = next(event.what for event in events(job.out, "regroup") if event.what.lost)
    assert (first.step, first.kept, first.redone) == (
        step_dump_script.STEP,
        step_dump_script.LAYERS // 2,
        step_dump_script.LAYERS // 2,
    )
    for survivor in (0, 2):
        before, gradients, after = torch.load(tmp_path / f"rank-{survivor}.pt", weights_only=True)
        expected = simulated(before, Interruption(strategy=strategy, point=point, casualties=frozenset(lost)))
        torch.testing.assert_close([gradients, after], list(expected))
    assert failed_checks(job.out) == []


def simulated(before: dict[str, Tensor], interruption: Interruption) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of the step that was dumped, and the weights after it, for an optimizer that steps after backward."""
    model = step_dump_script.network()
    model.load_state_dict(before)
    optimizer = step_dump_script.trainer(model)
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        gradients.update({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})

    optimizer.register_step_pre_hook(keep)
    apply_gradients(model, optimizer, compute_gradients(model, shares(), F.cross_entropy), interruption, inside=False)
    return gradients, {name: each.detach() for name, each in model.named_parameters()}


def shares() -> list[Share]:
    """What every rank trained in the step that was dumped."""
    data = step_dump_script.samples()
    geometry = SamplePlan(samples=len(data), batch=step_dump_script.BATCH, epochs=step_dump_script.EPOCHS, seed=0)
    at = geometry.position(step_dump_script.STEP)
    found = [[data[each] for each in geometry.share(at, rank, WORKERS)] for rank in range(WORKERS)]
    return [Share(torch.stack([x for x, _ in each]), torch.stack([y for _, y in each])) for each in found]


def failure(point: str = "boundary", kind: str = "kill", targets: tuple[int, ...] = (1,)) -> Failure:
    return Failure(step=5, kind=kind, point=point, targets=targets)


@pytest.mark.parametrize(
    ("failed", "recovery", "why"),
    [
        (
            failure("backward=1.5"),
            "forward",
            "'backward=1.5' is not a point of a step: give a fraction from 0 to 1",
        ),
        (failure("backward=nan"), "forward", "'backward=nan' is not a point"),
        (failure("backward=half"), "forward", "'backward=half' is not a point"),
        (
            failure("backward"),
            "forward",
            "needs the fraction of gradient buckets that are summed, such as backward=0.5",
        ),
        (failure("sideways"), "forward", "kill cannot strike at 'sideways': choose boundary, forward, backward=0.5,"),
        (failure("forward=1.5"), "forward", "'forward=1.5' is not a point"),
        (failure("forward="), "forward", "'forward=' is not a point"),
        (failure("optimizer=0.5"), "forward", "kill cannot strike at 'optimizer=0.5'"),
        (failure("manifest"), "forward", "kill cannot strike at 'manifest'"),
        (
            failure("backward=0.5", "bit-flip"),
            "forward",
            "bit-flip cannot strike at 'backward=0.5': choose tensors,",
        ),
        (failure("backward=0.5", "flip"), "forward", "flip cannot change 'backward=0.5': choose weight or moment"),
        (failure("moment=half", "flip"), "forward", "flip cannot change 'moment=half'"),
        (failure("recovery"), "restart", "No failure can strike at recovery with --recovery restart"),
    ],
)
def test_a_point_that_cannot_be_reached_is_refused_in_one_line(failed: Failure, recovery: str, why: str) -> None:
    with pytest.raises(BadInput) as refused:
        RunConfig(script="train.py", workers=4, recovery=recovery, failures=(failed,))
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        ([failure(targets=(1, 4))], "cannot inject a failure at rank 4: the ranks of this run are 0 to 3"),
        (
            [failure("backward=0.5", targets=(0, 1, 2, 3))],
            "All 4 workers would be lost in step 5, and --recovery forward needs",
        ),
        ([failure(targets=(0, 1)), failure("optimizer", "hang", (2, 3))], "All 4 workers would be lost in step 5"),
    ],
)
def test_losing_every_worker_under_live_recovery_is_refused_in_one_line(failures: list[Failure], why: str) -> None:
    config = RunConfig(script="train.py", workers=4, recovery="forward", failures=tuple(failures))
    with pytest.raises(BadInput, match=why):
        config.check_world(1)
    slow = RunConfig(script="train.py", workers=2, recovery="forward", failures=(failure(kind="slow", targets=(0, 1)),))
    slow.check_world(1)
    replace(slow, recovery="restart", failures=(failure(targets=(0, 1)),)).check_world(1)


def test_a_failure_in_backward_needs_a_replicated_model() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(BadInput, match=r"at backward=0.5: no model is replicated over several workers, or shard"):
        Injection((failure("backward=0.5"),), 0, 1, (), None).watch([model], [])
    with pytest.raises(BadInput, match=r"at forward: no model is replicated or sharded. Use run.replicate"):
        Injection((failure("forward"),), 0, 1, (), None).watch([], [])
    with pytest.raises(BadInput, match=r"at forward=0.5: only a sharded model gathers in forward"):
        Injection((failure("forward=0.5"),), 0, 1, (), None).watch([model], [])
    struck = {(5, "kill", 1, "backward=0.5")}
    Injection((failure("backward=0.5"),), 0, 1, struck, None).watch([model], [])  # it has struck before


@pytest.mark.parametrize(("part", "buckets", "after"), [("0", 4, 0), ("0.5", 3, 1), ("0.7", 10, 7), ("1", 3, 3)])
def test_a_fraction_of_the_buckets_is_rounded_down_to_whole_ones(part: str, buckets: int, after: int) -> None:
    assert points.summed_buckets(failure(f"backward={part}"), buckets) == after


def test_failures_that_differ_only_in_their_point_strike_separately_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[str] = []
    monkeypatch.setitem(inject.ACTS, "slow", lambda failure: struck.append(failure.point))
    schedule = tuple(failure(point, "slow", (0,)) for point in ("boundary", "forward", "save", "recovery", "optimizer"))
    model = nn.Linear(1, 1)
    before = {(5, "slow", 0, "boundary")}
    for number in (1, 2):
        injection = Injection(schedule, 0, number, before | read_past(tmp_path).struck, tmp_path)
        injection.watch([model], [])
        model(torch.ones(1))  # nothing is near yet
        injection.strike_in_save(4)
        injection.strike(5)
        with torch.no_grad():
            model(torch.ones(1))  # an evaluation
        model(torch.ones(1)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        injection.strike_in_save(10)
        injection.strike_in_recovery(7)
    assert struck == ["forward", "optimizer", "save", "recovery"]
