"""A node finds the end of a run in its folder, or at the place of its checkpoints."""

from pathlib import Path

import pytest

from holdfast.checkpoint.store import DirectoryStore
from holdfast.events import SUPERVISED_ONLY, Attempt, Done, Judged, Launch, Restart, What
from holdfast.history import gather
from holdfast.history.log import HistoryWriter
from holdfast.supervise.checkpoint_place import Checkpoints, PlaceContents
from holdfast.supervise.nodes.multi_node import RunEndWatch
from holdfast.supervise.verdict import completion

NOTHING = PlaceContents(None, 0)
LAUNCH = Launch(attempt=1, workers=1, argv=("train.py",), nodes=2)
COMMAND = ("train.py",)
AGAIN = Restart(2, 1, newest=10, left=3)
COMPLETED = Judged("completed", 2, "all workers have finished")


def write(out: Path, who: str, *events: What) -> None:
    with HistoryWriter(out / "history", who) as history:
        for what in events:
            history.append(what)


def attempt(number: int) -> Attempt:
    return Attempt(attempt=number, world=1, rank=0, pid=1)


def test_only_a_verdict_on_the_newest_attempt_counts() -> None:
    assert completion([LAUNCH, AGAIN]) is None
    assert completion([LAUNCH, AGAIN, COMPLETED, LAUNCH]) == COMPLETED  # in any order: others were in fewer attempts
    assert completion([LAUNCH, Judged("completed", 1, "")]) == Judged("completed", 1, "")
    assert completion([COMPLETED, Restart(3, 1, newest=10, left=3)]) is None
    assert completion([LAUNCH, AGAIN, Judged("preempted", 2, "asked to")]) is None


def test_the_run_has_ended_once_its_ranks_have_recorded_it(tmp_path: Path) -> None:
    write(tmp_path, "rank-0", attempt(1))
    watch = RunEndWatch(tmp_path, Checkpoints(tmp_path, None), NOTHING, COMMAND, extends=False)
    assert watch.look() is None
    write(tmp_path, "rank-0", Done(attempt=1, step=12))
    assert "this run is done, trained to its end, step 12: nothing was started" in str(watch.look())


def test_the_run_has_ended_once_a_supervisor_has_recorded_it_although_a_rank_was_lost(tmp_path: Path) -> None:
    write(tmp_path, "rank-0", attempt(2), Done(attempt=2, step=12))
    write(tmp_path, "rank-1", attempt(2))
    write(tmp_path, "supervisor-0", LAUNCH, AGAIN)
    watch = RunEndWatch(tmp_path, Checkpoints(tmp_path, None), NOTHING, COMMAND, extends=False)
    assert watch.look() is None
    write(tmp_path, "supervisor-0", COMPLETED)
    verdict = watch.look()
    assert verdict is not None
    assert (
        verdict.line == "completed after 2 attempts: this run is done, all workers have finished: nothing was started"
    )
    assert RunEndWatch(tmp_path, Checkpoints(tmp_path, None), NOTHING, COMMAND, extends=False).look() == verdict


@pytest.mark.parametrize(("because", "extends"), [("all done", True), (f"all done; {SUPERVISED_ONLY}", False)])
def test_an_earlier_end_does_not_count_if_the_run_is_extended_or_only_supervised(
    tmp_path: Path, because: str, extends: bool
) -> None:
    write(tmp_path, "supervisor-0", LAUNCH, Judged("completed", 1, because))
    if extends:
        write(tmp_path, "rank-0", attempt(1), Done(attempt=1, step=12))
    watch = RunEndWatch(tmp_path, Checkpoints(tmp_path, None), NOTHING, COMMAND, extends=extends)
    assert watch.look() is None
    write(tmp_path, "supervisor-0", AGAIN, Judged("completed", 2, because))
    assert watch.look() is not None


def test_without_a_shared_folder_the_end_is_found_at_the_place_of_the_checkpoints(tmp_path: Path) -> None:
    here, other, place = tmp_path / "here", tmp_path / "other", tmp_path / "place"
    store = DirectoryStore(place)
    write(here, "supervisor-1", LAUNCH)
    write(other, "supervisor-0", LAUNCH, AGAIN)
    gather.send(other / "history", store)
    checkpoints = Checkpoints(here, str(place))
    contents = checkpoints.try_out(alone=False)
    assert contents == PlaceContents(None, 2, None, COMMAND)
    watch = RunEndWatch(here, checkpoints, contents, COMMAND, extends=False)
    assert watch.look() is None
    write(other, "supervisor-0", COMPLETED)
    gather.send(other / "history", store)
    assert "this run is done, all workers have finished" in str(watch.look())
    again = checkpoints.try_out(alone=False)
    assert again == PlaceContents(None, 2, COMPLETED, COMMAND)
    returned = RunEndWatch(here, checkpoints, again, COMMAND, extends=False).look()
    assert returned is not None, "a node that took part and returns later waited for nodes that have ended"
    assert RunEndWatch(here, checkpoints, again, COMMAND, extends=True).look() is None
    replacement = RunEndWatch(tmp_path / "new", checkpoints, again, COMMAND, extends=False)
    assert replacement.look() == returned, "a machine with an empty folder waited for nodes that have ended"
    stranger = RunEndWatch(tmp_path / "new", checkpoints, again, (*COMMAND, "--lr", "1"), extends=False)
    assert stranger.look() is None  # it was another run's
