"""What the histories of earlier attempts tell the next one, read from their end."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput, Corrupt, StorageFailed
from holdfast.events import Attempt, Commit, Recover, Seconds, Step, Strike, What
from holdfast.faults.schedule import Failure
from holdfast.history.log import HistoryWriter, backwards, read_history
from holdfast.history.tail import PastAttempts, has_commit, read_past
from holdfast.sampler.digest import Samples
from holdfast.train import inject
from holdfast.train.attach import attach
from holdfast.train.inject import Injection, check, faulty


def write(folder: Path, who: str, *events: What) -> None:
    with HistoryWriter(folder, who) as history:
        for event in events:
            history.append(event)


def step(number: int, attempt: int = 1) -> Step:
    return Step(attempt, 1, 0, 0, number, number, Samples(), Seconds(0.0, 1.0, 0.0))


def begin(attempt: int, restored: int | None) -> tuple[What, What]:
    return Attempt(attempt, 1, 0, 7), Recover(attempt, restored, 0, restored or 0, "keyed", 0.0)


def test_a_folder_without_a_history_has_no_past(tmp_path: Path) -> None:
    assert read_past(tmp_path / "none") == PastAttempts()
    assert not has_commit(tmp_path / "none", 50)


def test_the_past_is_the_last_attempt_and_the_failures_of_all_ranks(tmp_path: Path) -> None:
    write(tmp_path, "rank-0", *begin(1, None), step(0), *begin(2, None), step(0, 2))
    write(tmp_path, "injected-3", Strike(1, 70, "kill", 3))
    write(tmp_path, "injected-storage", Strike(1, 50, "enospc", 0))
    assert read_past(tmp_path) == PastAttempts(
        2, frozenset({(70, "kill", 3, "boundary"), (50, "enospc", 0, "boundary")})
    )


def test_a_commit_counts_unless_a_later_restore_went_back_behind_it(tmp_path: Path) -> None:
    life = [*begin(1, None), *map(step, range(60)), Commit(1, 50, 9), *map(step, range(60, 110)), Commit(1, 100, 9)]
    write(tmp_path, "rank-0", *life, step(110))
    assert [has_commit(tmp_path, number) for number in (100, 110)] == [True, False]
    write(tmp_path, "rank-0", *begin(2, 50), *(step(number, 2) for number in range(50, 110)))  # 100 was bad
    assert [has_commit(tmp_path, number) for number in (50, 100)] == [True, False]


def test_a_restart_reads_no_more_of_a_long_history_than_of_a_short_one(tmp_path: Path) -> None:
    """After a million steps as after a thousand, only what follows the newest snapshot is read."""

    def read(steps: int) -> int:
        folder = tmp_path / str(steps)
        write(
            folder,
            "rank-0",
            *begin(1, None),
            *map(step, range(steps)),
            Commit(1, steps, 9),
            *map(step, range(steps, steps + 9)),
        )
        looked = [event for event, _ in zip(backwards(folder / "rank-0.jsonl"), range(12), strict=False)]
        assert isinstance(looked[9].what, Commit)
        return sum(1 for _ in looked)

    assert read(1000) == read(20_000)
    damaged = tmp_path / "20000" / "rank-0.jsonl"
    text = damaged.read_bytes()
    damaged.write_bytes(b"x" * (len(text) // 2) + text[len(text) // 2 :])  # nobody looks there
    assert read_past(damaged.parent).attempt == 1
    assert has_commit(damaged.parent, 20_000)
    assert not has_commit(damaged.parent, 20_005)


def test_a_history_is_read_backwards_line_by_line_and_a_torn_line_is_not(tmp_path: Path) -> None:
    write(tmp_path, "rank-0", *map(step, range(300)))
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"event": "step", "time": 1')
    forwards = read_history(tmp_path).events
    assert list(backwards(tmp_path / "rank-0.jsonl")) == list(reversed(forwards))


def test_an_impossible_attempt_number_is_refused_in_one_line(tmp_path: Path) -> None:
    """The next would have a number that no history can hold."""
    write(tmp_path / "history", "rank-0", *begin((1 << 63) - 1, None))
    with pytest.raises(Corrupt, match="has an attempt 9223372036854775807, which is not possible") as error:
        attach(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("thing", "named"), [(os.mkfifo, "a pipe"), (os.mkdir, "a directory")])
@pytest.mark.parametrize("name", ["rank-0", "injected-0"])
def test_a_history_that_is_not_a_file_is_named(
    tmp_path: Path, name: str, thing: Callable[[Path], None], named: str
) -> None:
    (tmp_path / "history").mkdir()
    thing(tmp_path / "history" / f"{name}.jsonl")
    with pytest.raises(StorageFailed, match=f"{name}.jsonl is not a file but {named}: remove it, and start again"):
        attach(tmp_path)


def test_a_failure_strikes_its_targets_once_in_the_life_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[int] = []
    monkeypatch.setitem(inject.ACTS, "slow", lambda failure: struck.append(failure.step))
    schedule = (
        Failure(step=3, kind="slow"),
        Failure(step=4, kind="slow", targets=(1, 2)),
        Failure(step=3, kind="enospc"),
    )
    for rank in range(3):
        injection = Injection(schedule, rank, 1, (), tmp_path)
        for number in (2, 3, 4, 3):  # a rank may pass a boundary again
            injection.strike(number)
    assert struck == [3, 4, 4]
    past = read_past(tmp_path)
    assert past.struck == {(3, "slow", 0, "boundary"), (4, "slow", 1, "boundary"), (4, "slow", 2, "boundary")}
    for rank in range(3):
        for number in range(6):
            Injection(schedule, rank, 2, past.struck, None).strike(number)
    assert struck == [3, 4, 4]


def test_a_fault_of_storage_is_on_record_before_it_strikes_and_strikes_once(tmp_path: Path) -> None:
    schedule = (Failure(step=5, kind="lost-rename"), Failure(step=5, kind="kill"))
    store = DirectoryStore(tmp_path / "store")
    assert faulty(store, schedule[1:], 1, (), tmp_path) is store
    faulty(store, schedule, 1, (), tmp_path).put("step-00000005/shard-00000-of-00001.safetensors", [b"lost"])
    assert store.names() == []
    (event,) = [each for each in read_history(tmp_path).events if isinstance(each.what, Strike)]
    assert (event.who, event.what) == ("injected-storage", Strike(1, 5, "lost-rename", 0))
    assert faulty(store, schedule, 2, read_past(tmp_path).struck, tmp_path) is store


def test_a_fault_of_storage_strikes_the_files_of_the_ranks_that_it_names(tmp_path: Path) -> None:
    schedule = (Failure(step=5, kind="lost-rename", targets=(1, 2)),)
    store = DirectoryStore(tmp_path / "store")
    names = [f"step-00000005/shard-{rank:05d}-of-00003.safetensors" for rank in range(3)]
    for rank, name in enumerate(names):
        faulty(store, schedule, 1, (), tmp_path, rank).put(name, [b"value"])
    assert store.names() == names[:1]
    past = read_past(tmp_path).struck
    assert past == {(5, "lost-rename", 1, "boundary"), (5, "lost-rename", 2, "boundary")}
    assert all(faulty(store, schedule, 2, past, tmp_path, rank) is store for rank in range(3))


@pytest.mark.parametrize("point", ["extra", "manifest", "latest", "removal"])
def test_a_fault_of_a_file_that_only_rank_0_writes_is_refused_for_another_rank(point: str) -> None:
    check((Failure(step=5, kind="bit-flip", point=point, targets=(0,)),), 10)
    with pytest.raises(BadInput, match=f"cannot strike rank 1 at '{point}': only rank 0 commits"):
        check((Failure(step=5, kind="bit-flip", point=point, targets=(0, 1)),), 10)
