"""A script that uses torch.distributed by itself cannot go on live after a loss: the run starts again, and is exact."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from finished_run import different, events, failed_checks
from holdfast import progress
from holdfast.distributed import process_group
from holdfast.distributed.process_group import SCRIPT_COLLECTIVES, ReplacedGroup
from holdfast.errors import WorkerLost
from holdfast.live.settlement import NOWHERE, MemberReport, make_plan
from supervisor_process import SUPPORT, Start, Supervisor

SCRIPT = SUPPORT / "collectives_script.py"


def trained(start: Start, exchanges: str, failures: list[tuple[int, str]], out: str, **config: object) -> Supervisor:
    """A run of three workers, of which rank 1 is killed at these places."""
    job = start(
        {"exchanges": exchanges, "told": "/dev/null"},
        script=SCRIPT,
        out=out,
        workers=3,
        save_every=5,
        failures=[{"step": step, "kind": "kill", "point": point, "targets": [1]} for step, point in failures],
        **config,
    )
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    return job


@pytest.mark.parametrize("exchanges", ["step", "epoch"])
@pytest.mark.parametrize("recovery", ["replay", "forward"])
def test_a_run_whose_script_calls_torch_distributed_restarts_after_a_loss(
    start: Start, recovery: str, exchanges: str
) -> None:
    """Killed in backward before it has exchanged anything at an epoch's end, and after that."""
    plain = trained(start, exchanges, [], "plain", recovery=recovery)
    struck = trained(start, exchanges, [(2, "backward=0.5"), (14, "backward=0.5")], "struck", recovery=recovery)
    assert events(struck.out, "restart"), struck.stderr
    assert SCRIPT_COLLECTIVES in struck.stderr
    assert not failed_checks(struck.out)
    if recovery == "replay" or exchanges == "step":  # else what was lost before the first exchange stays lost
        assert not different(plain.out, struck.out)


def test_no_spare_waits_once_a_script_is_known_to_call_torch_distributed(start: Start) -> None:
    """A spare would have to take part in what the others exchange before it joins."""
    job = trained(start, "step", [(3, "forward"), (9, "forward")], "out", recovery="replay", spares=1)
    assert len(events(job.out, "restart")) == 2
    assert not [event for event in events(job.out, "regroup") if event.what.attempt > 1]


def test_a_replacement_worker_can_call_get_rank(start: Start, tmp_path: Path) -> None:
    told = tmp_path / "told"
    job = start(
        {"exchanges": "never", "told": str(told)},
        script=SCRIPT,
        workers=3,
        recovery="replay",
        failures=[{"step": 2, "kind": "kill", "targets": [1]}],
    )
    assert job.result().get("verdict") == "completed", job.stderr
    assert not events(job.out, "restart"), job.stderr
    assert {*told.read_text().splitlines()} == {f"{rank} of 3" for rank in range(3)}


def test_recovery_needs_a_restart_if_one_member_has_called_torch_distributed() -> None:
    stands = {0: MemberReport(step=3, members=(0, 1, 2)), 2: MemberReport(step=3, members=(0, 1, 2), exchanges=True)}
    assert make_plan(stands) == SCRIPT_COLLECTIVES
    assert not isinstance(make_plan({0: stands[0], 1: MemberReport(step=NOWHERE)}), str)


@pytest.fixture
def outlived(monkeypatch: pytest.MonkeyPatch) -> progress.Progress:
    """A default group that the run has outlived, as rank 1 of 3; and what the supervisor hears."""
    here = progress.Progress()
    monkeypatch.setattr(progress, "here", here)
    process_group.replace_default_group(1, 3)
    monkeypatch.setattr(process_group, "_kept", [])
    return here


EXCHANGED = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.empty(6), x),
    "all_gather_object": lambda x: dist.all_gather_object([None] * 3, 1),
    "barrier": lambda x: dist.barrier(),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "new_group": lambda x: dist.new_group([0, 1]),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(torch.empty(1), torch.ones(3)),
    "send": lambda x: dist.send(x, 0),
}


@pytest.mark.filterwarnings("ignore")  # torch deprecates some of them
@pytest.mark.parametrize("name", EXCHANGED)
def test_every_collective_of_a_group_with_a_lost_member_makes_the_run_restart(
    outlived: progress.Progress, name: str
) -> None:
    try:
        assert isinstance(dist.group.WORLD, ReplacedGroup)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (1, 3, "gloo")
        assert not process_group.has_script_collectives()
        with pytest.raises(WorkerLost, match=SCRIPT_COLLECTIVES):
            EXCHANGED[name](torch.ones(2))
        assert outlived.has_exchanged
        assert outlived.has_fallen_back
    finally:
        process_group.leave_default_group()
