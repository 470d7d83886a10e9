"""Whether a run has ended without a node, by what its folder and the place of its checkpoints tell."""

from pathlib import Path

import pytest

from holdfast.checkpoint.store import DirectoryStore
from holdfast.events import SUPERVISED_ONLY, Attempt, Done, Judged, Launch, Restart, What
from holdfast.history import gather
from holdfast.history.log import HistoryWriter
from holdfast.supervise.checkpoint_place import Checkpoints, PlaceContents
from holdfast.supervise.nodes.run_end import Ended
from holdfast.supervise.verdict import completion

NOTHING = PlaceContents(None, 0)
LAUNCH = Launch(attempt=1, workers=1, argv=("train.py",), nodes=2)
AGAIN = Restart(2, 1, newest=10, left=3)
COMPLETED = Judged("completed", 2, "all workers have finished")


def tell(out: Path, who: str, *told: What) -> None:
    with HistoryWriter(out / "history", who) as history:
        for what in told:
            history.append(what)


def attempt(number: int) -> Attempt:
    return Attempt(attempt=number, world=1, rank=0, pid=1)


def test_the_verdict_on_the_newest_attempt_counts() -> None:
    assert completion([LAUNCH, AGAIN]) is None
    assert completion([LAUNCH, AGAIN, COMPLETED, LAUNCH]) == COMPLETED  # in any order: others were in fewer attempts
    assert completion([LAUNCH, Judged("completed", 1, "")]) == Judged("completed", 1, "")
    assert completion([COMPLETED, Restart(3, 1, newest=10, left=3)]) is None
    assert completion([LAUNCH, AGAIN, Judged("preempted", 2, "asked to")]) is None


def test_the_run_has_ended_once_its_ranks_say_so(tmp_path: Path) -> None:
    tell(tmp_path, "rank-0", attempt(1))
    ended = Ended(tmp_path, Checkpoints(tmp_path, None), NOTHING, extends=False)
    assert ended.look() is None
    tell(tmp_path, "rank-0", Done(attempt=1, step=12))
    assert "this run is done, trained to its end, step 12: nothing was started" in str(ended.look())


def test_or_once_a_supervisor_does_though_a_rank_was_lost_with_its_node(tmp_path: Path) -> None:
    tell(tmp_path, "rank-0", attempt(2), Done(attempt=2, step=12))
    tell(tmp_path, "rank-1", attempt(2))
    tell(tmp_path, "supervisor-0", LAUNCH, AGAIN)
    ended = Ended(tmp_path, Checkpoints(tmp_path, None), NOTHING, extends=False)
    assert ended.look() is None
    tell(tmp_path, "supervisor-0", COMPLETED)
    found = ended.look()
    assert found is not None
    assert found.line == "completed after 2 attempts: this run is done, all workers have finished: nothing was started"
    assert Ended(tmp_path, Checkpoints(tmp_path, None), NOTHING, extends=False).look() == found


@pytest.mark.parametrize(("because", "extends"), [("all done", True), (f"all done; {SUPERVISED_ONLY}", False)])
def test_an_end_that_a_command_goes_beyond_is_none(tmp_path: Path, because: str, extends: bool) -> None:
    tell(tmp_path, "supervisor-0", LAUNCH, Judged("completed", 1, because))
    if extends:
        tell(tmp_path, "rank-0", attempt(1), Done(attempt=1, step=12))
    ended = Ended(tmp_path, Checkpoints(tmp_path, None), NOTHING, extends=extends)
    assert ended.look() is None
    tell(tmp_path, "supervisor-0", AGAIN, Judged("completed", 2, because))
    assert ended.look() is not None


def test_where_folders_are_not_shared_the_place_of_the_checkpoints_tells(tmp_path: Path) -> None:
    here, other, place = tmp_path / "here", tmp_path / "other", tmp_path / "place"
    store = DirectoryStore(place)
    tell(here, "supervisor-1", LAUNCH)
    tell(other, "supervisor-0", LAUNCH, AGAIN)
    gather.send(other / "history", store)
    checkpoints = Checkpoints(here, str(place))
    found = checkpoints.try_out(alone=False)
    assert found == PlaceContents(None, 2)
    ended = Ended(here, checkpoints, found, extends=False)
    assert ended.look() is None
    tell(other, "supervisor-0", COMPLETED)
    gather.send(other / "history", store)
    assert "this run is done, all workers have finished" in str(ended.look())
    again = checkpoints.try_out(alone=False)
    assert again == PlaceContents(None, 2, COMPLETED)
    assert Ended(here, checkpoints, again, extends=False).look() is None  # it may have been another run's
