"""Histories of real runs, changed so that they lie: the audit names each lie by the check that it breaks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from holdfast import events
from holdfast.audit.verdicts import audit_files, worst
from holdfast.events import Event
from holdfast.faults.schedule import Failure
from holdfast.history.log import read_history
from holdfast.sampler.digest import Samples
from holdfast.server.members import Member
from server_in_process import run_in_process
from server_runs import settings

Files: TypeAlias = dict[str, list[Event]]


def lines(out: Path) -> Files:
    """The histories of a run, by the name of their file."""
    return {path.stem: list(read_history(path).events) for path in sorted((out / "history").glob("*.jsonl"))}


def findings(files: Files) -> dict[str, str]:
    """By check, whatever it does not pass and why."""
    found = audit_files((name, event) for name in sorted(files) for event in files[name])
    return {finding.check: f"{finding.verdict}: {finding.because}" for finding in found if finding.verdict != "pass"}


def at(files: Files, who: str, kind: type[Any], which: Callable[[Any], bool] = lambda what: True) -> int:
    """The first line of a file that is of a kind."""
    return next(n for n, event in enumerate(files[who]) if isinstance(event.what, kind) and which(event.what))


def change(files: Files, who: str, line: int, **changed: Any) -> None:
    event = files[who][line]
    files[who][line] = event._replace(what=event.what._replace(**changed))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """Runs as they are: with a lost node, a node lost in a round, one that joins, a lost controller, and staleness."""
    folder, patch = tmp_path_factory.mktemp("runs"), pytest.MonkeyPatch()
    lost, in_round = (Failure(step=2, kind="node", targets=(1,), point=point) for point in ("boundary", "apply"))
    nobody, arrives = (lambda *_: None), (lambda count: Member("node", 3) if count == 66 else None)
    arguments: dict[str, tuple[Any, ...]] = {
        "lost": (settings(folder / "lost", lost), nobody),
        "dropped": (settings(folder / "dropped", in_round), nobody),
        "joined": (settings(folder / "joined", workload="mf-generated"), nobody, arrives),
        "taken over": (settings(folder / "over"), lambda count, *_: Member("controller", 0) if count == 150 else None),
        "stale": (settings(folder / "stale", lost, staleness=1, iterations=5), nobody),
    }
    try:
        for given in arguments.values():
            run_in_process(patch, *given)
    finally:
        patch.undo()
    return {name: lines(given[0].out) for name, given in arguments.items()}


def of(runs: dict[str, Files], name: str) -> Files:
    return {who: list(events_of_file) for who, events_of_file in runs[name].items()}


def test_true_histories_pass(runs: dict[str, Files]) -> None:
    assert {name: findings(files) for name, files in runs.items()} == {name: {} for name in runs}


@pytest.mark.parametrize("name", ["lost", "stale"])
def test_a_push_that_was_applied_twice(runs: dict[str, Files], name: str) -> None:
    files = of(runs, name)
    line = at(files, "node-0", events.Applied)
    files["node-0"].insert(line, files["node-0"][line])

    assert findings(files)["every_push_is_applied_once"].startswith("fail: iteration 0 round 0")


@pytest.mark.parametrize("name", ["lost", "stale"])
def test_a_push_that_was_never_applied(runs: dict[str, Files], name: str) -> None:
    files = of(runs, name)
    del files["node-0"][at(files, "node-0", events.Applied)]

    assert findings(files)["every_push_is_applied_once"].startswith("fail: iteration 0 round 0")


def test_a_push_that_was_never_made(runs: dict[str, Files]) -> None:
    files = of(runs, "stale")
    del files["worker-1"][at(files, "worker-1", events.Pushed)]

    assert "nothing was pushed from part 1" in findings(files)["every_push_is_applied_once"]


def test_a_block_that_vanished(runs: dict[str, Files]) -> None:
    files = of(runs, "lost")
    line = at(files, "controller", events.Restored)
    what = files["controller"][line].what
    assert isinstance(what, events.Restored)
    own = at(files, f"node-{what.node}", events.Restored)
    for who, place in (("controller", line), (f"node-{what.node}", own)):
        change(files, who, place, blocks=what.blocks[1:], saved_at=what.saved_at[1:])

    assert f"block {what.blocks[0]} was lost and did not come back" in findings(files)["lost_blocks_came_back"]


def test_a_restore_from_a_save_that_never_was(runs: dict[str, Files]) -> None:
    files = of(runs, "lost")
    line = at(files, "controller", events.Restored)
    what = files["controller"][line].what
    assert isinstance(what, events.Restored)
    own = at(files, f"node-{what.node}", events.Restored)
    for who, place in (("controller", line), (f"node-{what.node}", own)):
        change(files, who, place, saved_at=[99, *what.saved_at[1:]])

    assert "from the save of iteration 99" in findings(files)["restores_only_committed"]


def test_a_dropped_push_that_is_not_declared(runs: dict[str, Files]) -> None:
    files = of(runs, "dropped")
    del files["controller"][at(files, "controller", events.Dropped)]

    assert "nothing is declared dropped" in findings(files)["every_round_reaches_every_block"]
    assert "nor declared dropped" in findings(files)["every_push_is_applied_once"]


def test_pushes_that_are_declared_dropped_where_none_can_be(runs: dict[str, Files]) -> None:
    files = of(runs, "stale")
    line = at(files, "controller", events.Iterate)
    dropped = files["controller"][line]._replace(what=events.Dropped(0, 0, [0], Samples.of([1])))
    files["controller"].insert(line, dropped)

    assert "declared dropped" in findings(files)["every_round_reaches_every_block"]


def test_a_worker_that_was_further_ahead_than_allowed(runs: dict[str, Files]) -> None:
    files = of(runs, "stale")
    lines_of_node = files["node-0"]
    late = at(files, "node-0", events.Applied, lambda what: what.iteration == 0 and what.parts == (1,))
    moved = lines_of_node.pop(late)
    lines_of_node.insert(1 + at(files, "node-0", events.Applied, lambda what: what.iteration == 2), moved)

    expected = "fail: node-0 applied iteration 0 after iteration 2: 1 are allowed"
    assert findings(files) == {"nobody_was_too_far_ahead": expected}


def test_a_run_that_claims_less_staleness_than_it_used(runs: dict[str, Files]) -> None:
    files = of(runs, "stale")
    change(files, "controller", at(files, "controller", events.Serve), staleness=0)

    assert any(why.startswith("fail") for why in findings(files).values())


def test_a_node_that_joined_and_never_got_its_blocks(runs: dict[str, Files]) -> None:
    files = of(runs, "joined")
    files["controller"] = [event for event in files["controller"] if not isinstance(event.what, events.Moved)]

    assert findings(files)["every_block_has_one_owner"] == "fail: node-3 joined, but received no blocks"


def test_a_node_that_never_joined(runs: dict[str, Files]) -> None:
    files = of(runs, "joined")
    del files["controller"][at(files, "controller", events.Joined)]

    assert "node-3 has a history, but never joined" in findings(files)["all_members_are_on_record"]


def test_two_controllers_at_once(runs: dict[str, Files]) -> None:
    """A controller that was given up still writes: its lines appear between those of the other."""
    files = of(runs, "taken over")
    begun = at(files, "controller", events.Serve, lambda what: what.attempt == 1)
    last = max(n for n, event in enumerate(files["controller"][:begun]) if isinstance(event.what, events.Iterate))
    zombie = files["controller"][last]
    files["controller"].insert(begun + 2, zombie)

    assert "was done where" in findings(files)["iterations_follow"]


def test_two_controllers_with_one_number(runs: dict[str, Files]) -> None:
    files = of(runs, "taken over")
    change(files, "controller", at(files, "controller", events.Serve, lambda what: what.attempt == 1), attempt=0)

    assert "two controllers started as number 0" in findings(files)["iterations_follow"]


@pytest.mark.parametrize("name", ["lost", "stale"])
@pytest.mark.parametrize("who", ["controller", "node-0", "node-1", "worker-1"])
def test_a_file_that_is_missing(runs: dict[str, Files], name: str, who: str) -> None:
    files = of(runs, name)
    del files[who]

    found = audit_files((name_of_file, event) for name_of_file in sorted(files) for event in files[name_of_file])
    assert worst(found) == "unknown", findings(files)
