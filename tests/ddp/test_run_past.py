"""What the histories of earlier attempts tell the next one."""

from pathlib import Path

import pytest

from holdfast.checkpoint.store import DirectoryStore
from holdfast.ddp.inject import Injection, faulty
from holdfast.ddp.past import Past, read_past
from holdfast.ddp.saving import Unrecorded
from holdfast.failure import Failure
from holdfast.history import HistoryWriter, read_history, recall


def write(folder: Path, who: str, *events: tuple[str, dict[str, object]]) -> None:
    with HistoryWriter(folder, who) as history:
        for event, fields in events:
            history.append(event, **fields)  # type: ignore[arg-type]


def test_without_a_history_there_is_no_past(tmp_path: Path) -> None:
    assert read_past(tmp_path / "none") == Past()


def test_the_past_is_the_last_attempt_the_commits_that_hold_and_the_failures_of_all_ranks(tmp_path: Path) -> None:
    write(
        tmp_path,
        "rank-0",
        ("attempt", {"attempt": 1}),
        ("commit", {"attempt": 1, "step": 50}),
        ("commit", {"attempt": 1, "step": 100}),
        ("attempt", {"attempt": 2}),
        ("recover", {"attempt": 2, "restored": 50}),  # 100 was bad: a later 100 is another
        ("commit", {"attempt": 2, "step": 80}),
    )
    write(tmp_path, "rank-3", ("failure", {"attempt": 1, "step": 70, "kind": "kill", "rank": 3}))
    write(tmp_path, "storage", ("failure", {"attempt": 1, "step": 50, "kind": "enospc", "rank": 0}))
    assert read_past(tmp_path) == Past(2, frozenset({50, 80}), frozenset({(70, "kill", 3), (50, "enospc", 0)}))


def test_only_the_kinds_asked_for_are_recalled_and_a_torn_line_is_not(tmp_path: Path) -> None:
    write(tmp_path, "rank-0", ("attempt", {"attempt": 1}), ("step", {"note": '{"event": "attempt"'}))
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"event": "attempt", "time": 1')
    assert [event.fields for event in recall(tmp_path / "rank-0.jsonl", "attempt", "commit")] == [{"attempt": 1}]


def test_a_failure_strikes_its_targets_once_in_the_life_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[int] = []
    monkeypatch.setitem(
        __import__("holdfast.ddp.inject").ddp.inject.ACTS, "slow", lambda failure: struck.append(failure.step)
    )
    schedule = (
        Failure(step=3, kind="slow"),
        Failure(step=4, kind="slow", targets=(1, 2)),
        Failure(step=3, kind="enospc"),
    )
    with HistoryWriter(tmp_path, "rank-0") as record:
        for rank in range(3):
            injection = Injection(schedule, rank, 1, (), record)
            for step in (2, 3, 4, 3):  # a rank may pass a boundary again
                injection.strike(step)
    assert struck == [3, 4, 4]
    past = read_past(tmp_path)
    assert past.struck == {(3, "slow", 0), (4, "slow", 1), (4, "slow", 2)}
    for rank in range(3):
        for step in range(6):
            Injection(schedule, rank, 2, past.struck, Unrecorded()).strike(step)
    assert struck == [3, 4, 4]


def test_a_fault_of_storage_is_on_record_before_it_strikes_and_strikes_once(tmp_path: Path) -> None:
    schedule = (Failure(step=5, kind="lost-rename"), Failure(step=5, kind="kill"))
    store = DirectoryStore(tmp_path / "store")
    assert faulty(store, schedule[1:], 1, (), tmp_path) is store
    faulty(store, schedule, 1, (), tmp_path).put("step-00000005/state.safetensors", [b"lost"])
    assert store.names() == []
    (event,) = [each for each in read_history(tmp_path).events if each.event == "failure"]
    assert (event.who, event.fields["kind"], event.fields["step"]) == ("storage", "lost-rename", 5)
    assert faulty(store, schedule, 2, read_past(tmp_path).struck, tmp_path) is store
