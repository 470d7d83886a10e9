"""The supervisor decides who continues after a loss, or that none of the workers can."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is public

from holdfast.progress import Phase, Progress
from holdfast.runs.config import RunConfig
from holdfast.supervise.nodes.rendezvous import Peers, RoundInfo
from holdfast.supervise.workers.membership_control import MembershipController, Stranded


def worker(seat: int, phase: Phase) -> SimpleNamespace:
    """Return a running member in `phase`."""
    progress = Progress()
    progress.phase, progress.suspected = phase, 0
    return SimpleNamespace(
        seat=seat,
        membership=0,
        is_ready=False,
        is_starting=False,
        is_in_reserve=False,
        has_failed=False,
        has_finished=phase is Phase.CLOSING,
        can_lose_peers=phase is Phase.RECOVERING,
        task=SimpleNamespace(progress=progress),
    )


def controller(*workers: SimpleNamespace) -> MembershipController:
    """Return the controller of a run of three members, of which `workers` are left."""
    config = RunConfig(script="t.py", workers=3, recovery="replay")
    pool = SimpleNamespace(running=[*workers], has_script_collectives=False)
    round = RoundInfo(attempt=1, round="round", address="", workers=(3,))
    return MembershipController(config, cast(Any, pool), round, Peers("round", HashStore()), Path("out"))


def test_members_that_seek_a_lost_one_while_another_has_finished_cannot_continue() -> None:
    with pytest.raises(Stranded):
        controller(worker(1, Phase.RECOVERING), worker(2, Phase.CLOSING)).update()


def test_a_loss_after_which_all_others_finish_is_none_to_recover_from() -> None:
    controller(worker(1, Phase.CLOSING), worker(2, Phase.CLOSING)).update()


@pytest.mark.parametrize("is_possible", [True, False])
def test_only_where_live_recovery_was_possible_a_survivor_will_say_why_it_gave_up(is_possible: bool) -> None:
    lost, survivor = worker(1, Phase.TRAINING), worker(2, Phase.RECOVERING)
    lost.has_failed = survivor.task.progress.has_fallen_back = True
    lost.task.progress.has_fallen_back = not is_possible  # over NCCL, all workers know from the beginning
    assert controller(lost, survivor).will_say_why == is_possible
