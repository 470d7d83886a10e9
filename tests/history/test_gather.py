"""The histories of nodes with folders of their own are one history: sent to a store, fetched, each writer's lives in order."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.errors import Corrupt, StorageFailed
from holdfast.events import Attempt, Commit, Done, Launch, Restart, Seconds, Step, What
from holdfast.history import fold, gather
from holdfast.history.folded import StepRun
from holdfast.history.gather import gather_files, last_attempt, send, sizes_of_ranks
from holdfast.history.log import HistoryWriter, read_history, stream_blocks, stream_history
from holdfast.sampler.digest import Samples


@pytest.fixture
def tell(tmp_path: Path) -> Callable[..., None]:
    """Let a writer in the folder of a node live once more, and say this."""
    now = iter(range(1_000_000))

    def live(node: str, who: str, *events: What, ahead: float = 0.0) -> None:
        with HistoryWriter(tmp_path / node / "history", who, clock=lambda: next(now) + ahead) as writer:
            for event in events:
                writer.append(event)

    return live


def attempts(files: list[Path], who: str) -> list[int]:
    """The attempts of which a writer tells, in the order in which they are read."""
    events = stream_history(files, [])
    return [event.what.attempt for _, event in events if event.who == who and isinstance(event.what, Attempt)]


def began(number: int, rank: int) -> Attempt:
    return Attempt(number, world=4, rank=rank, pid=1)


def test_what_other_nodes_sent_is_read_beside_the_files_at_hand(tmp_path: Path, tell, store: Store) -> None:  # type: ignore[no-untyped-def]
    tell("a", "rank-0", began(1, 0))
    tell("b", "rank-1", began(1, 1), Done(1, 3))
    send(tmp_path / "b" / "history", store)
    with gather_files([tmp_path / "a"], store) as files:
        together = read_history(files).events
        elsewhere = [file for file in files if tmp_path / "a" not in file.parents]
    assert together == tuple(
        sorted((*read_history(tmp_path / "a").events, *read_history(tmp_path / "b").events), key=lambda each: each.time)
    )
    assert [file.name for file in (tmp_path / "a" / "history").iterdir()] == ["rank-0.jsonl"]
    assert len(elsewhere) == 1
    assert not elsewhere[0].exists()  # what was fetched is gone again


def test_a_file_that_was_sent_and_is_at_hand_counts_once(tmp_path: Path, tell) -> None:  # type: ignore[no-untyped-def]
    store = DirectoryStore(tmp_path / "store")
    tell("a", "rank-0", began(1, 0))
    send(tmp_path / "a" / "history", store)
    tell("a", "rank-0", began(2, 0))
    with gather_files([tmp_path / "a", tmp_path / "a"], store) as files:
        assert attempts(files, "rank-0") == [1, 2]


def test_sessions_of_a_rank_on_several_nodes_are_ordered_by_attempt_not_by_clock(  # type: ignore[no-untyped-def]
    tmp_path: Path, tell
) -> None:
    tell("b", "rank-2", began(1, 2), ahead=5000.0)
    tell("a", "rank-2", began(2, 2))
    tell("b", "rank-2", began(3, 2), Done(3, 9), ahead=5000.0)
    tell("a", "rank-2", began(4, 2))
    for folders in (("a", "b"), ("b", "a")):
        with gather_files([tmp_path / name for name in folders]) as files:
            assert attempts(files, "rank-2") == [1, 2, 3, 4]
            told = [event.what.attempt for event in read_history(files).events if isinstance(event.what, Attempt)]
            assert told == [1, 2, 3, 4]


def test_a_torn_line_of_one_of_a_ranks_files_is_still_reported(tmp_path: Path, tell) -> None:  # type: ignore[no-untyped-def]
    for node, number in (("a", 1), ("b", 2)):
        tell(node, "rank-2", began(number, 2))
    with (tmp_path / "a" / "history" / "rank-2.jsonl").open("ab") as file:
        file.write(b'{"event": "st')
    with gather_files([tmp_path / "a", tmp_path / "b"]) as files:
        found = read_history(files)
        assert attempts(files, "rank-2") == [1, 2]
    assert [torn.size for torn in found.torn] == [13]


def test_sending_again_writes_only_what_is_new(tmp_path: Path, tell, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(gather, "PIECE", 200)
    written: list[str] = []

    class Noting(DirectoryStore):
        def put(self, name, parts) -> None:  # type: ignore[no-untyped-def]
            written.append(name)
            super().put(name, parts)

    store = Noting(tmp_path / "store")
    tell("a", "rank-0", *(Done(1, step) for step in range(10)))
    path = tmp_path / "a" / "history" / "rank-0.jsonl"
    send(path.parent, store)
    assert len(written) == path.stat().st_size // 200 + 1 > 3
    written.clear()
    tell("a", "rank-0", Done(1, 10))
    send(path.parent, store)
    assert len(written) <= 3
    with gather_files([], store) as (fetched,):
        assert fetched.read_bytes() == path.read_bytes()


def test_a_file_is_sent_as_it_was_before_the_workers_started(tmp_path: Path, tell, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A part of an attempt would look like a rank that left out steps, if its node is lost later."""
    monkeypatch.setattr(gather, "PIECE", 200)
    store, history = DirectoryStore(tmp_path / "store"), tmp_path / "a" / "history"
    tell("a", "rank-0", *(Done(1, step) for step in range(10)))
    tell("a", "supervisor-0", Launch(1, 2))
    before, earlier = sizes_of_ranks(history), (history / "rank-0.jsonl").read_bytes()
    tell("a", "rank-0", *(began(2, 0) for _ in range(10)))
    tell("a", "rank-1", began(2, 1))
    tell("a", "supervisor-0", Restart(2, 2))
    send(history, store, before)
    with gather_files([], store) as (rank, supervisor):
        assert rank.read_bytes() == earlier
        assert supervisor.read_bytes() == (history / "supervisor-0.jsonl").read_bytes()
    send(history, store)
    with gather_files([], store) as files:
        assert [file.read_bytes() for file in files] == [file.read_bytes() for file in sorted(history.iterdir())]


def test_what_a_power_cut_took_back_is_taken_back_in_the_store(tmp_path: Path, tell, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(gather, "PIECE", 200)
    store = DirectoryStore(tmp_path / "store")
    tell("a", "rank-0", *(Done(1, step) for step in range(20)))
    path = tmp_path / "a" / "history" / "rank-0.jsonl"
    send(path.parent, store)
    lines = path.read_bytes().splitlines(keepends=True)
    for left in (lines[:4], lines[:4] + [lines[0]] * 12):
        path.write_bytes(b"".join(left))
        send(path.parent, store)
        with gather_files([], store) as (fetched,):
            assert fetched.read_bytes() == path.read_bytes()


def test_the_attempts_of_a_run_go_on_counting_on_a_fresh_node(tmp_path: Path, tell) -> None:  # type: ignore[no-untyped-def]
    store = DirectoryStore(tmp_path / "store")
    assert last_attempt(store) == 0
    tell("a", "supervisor-0", Launch(1, 2), Restart(2, 2))
    tell("b", "supervisor-1", Launch(1, 2), Restart(3, 2))
    for node in ("a", "b"):
        send(tmp_path / node / "history", store)
    assert last_attempt(store) == 3


def test_a_missing_piece_and_a_history_that_is_not_a_file_are_refused_in_one_line(
    tmp_path: Path, tell, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(gather, "PIECE", 200)
    store = DirectoryStore(tmp_path / "store")
    tell("a", "rank-0", *(Done(1, step) for step in range(20)))
    send(tmp_path / "a" / "history", store)
    store.remove(store.names("histories/")[1])
    with pytest.raises(Corrupt, match=r"a piece of rank-0\.jsonl is missing"), gather_files([], store):
        pass
    os.mkfifo(tmp_path / "a" / "history" / "rank-9.jsonl")
    with pytest.raises(StorageFailed, match=r"rank-9\.jsonl is not a file"), gather_files([tmp_path / "a"]):
        pass


def test_folded_lines_are_sent_and_merged_as_they_were_written(
    tmp_path: Path, tell: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "KEPT", 0)
    store = DirectoryStore(tmp_path / "store")
    steps = [Step(1, 4, 0, 0, n, n, Samples.of([n]), Seconds(0.0, 0.001, 0.0)) for n in range(300)]
    tell("a", "rank-0", began(1, 0), *steps, Commit(1, 300, 1))
    tell("b", "rank-0", began(2, 0), Done(2, 300))
    before = read_history([tmp_path / node / "history" / "rank-0.jsonl" for node in "ab"]).events
    assert fold.fold(tmp_path / "a" / "history", least=1) == 1
    for node in "ab":
        send(tmp_path / node / "history", store)
    for places, source in (([tmp_path / "a", tmp_path / "b"], None), ([tmp_path / "b"], store)):
        with gather_files(places, source) as files:
            assert read_history(files).events == before


def folded_node(tell: Callable[..., None], history: Path, rank: int = 0, steps: int = 600) -> None:
    """Write the history of a node with one rank, and fold most of it."""
    share = (Step(1, 4, rank, 0, n, n, Samples.of([n]), Seconds(0.0, 0.001, 0.0)) for n in range(steps))
    tell(history.parent.name, f"rank-{rank}", began(1, rank), *share, Commit(1, steps, 1))
    assert fold.fold(history, [rank], newest=lambda: steps, least=1) > 0


def test_folded_lines_are_sent_and_fetched_as_segments(
    tmp_path: Path, tell: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "KEPT", 1000)
    monkeypatch.setattr(fold, "MOST", 100_000)
    monkeypatch.setattr(gather, "PIECE", 5000)
    store = DirectoryStore(tmp_path / "store")
    for node in ("a", "b", "c"):  # two machines have been rank 0, so their segments have the same names
        folded_node(tell, tmp_path / node / "history", rank=int(node == "c"))
        send(tmp_path / node / "history", store)
        tell(node, f"rank-{int(node == 'c')}", began(2, 0), Done(2, 600))
        send(tmp_path / node / "history", store)
    before = [read_history(tmp_path / node).events for node in ("a", "b", "c")]
    sizes = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    lines = sum(path.stat().st_size for path in tmp_path.glob("?/history/*.jsonl"))
    assert sizes < lines / 3
    with gather_files([], store) as files:
        assert sorted(read_history(files).events) == sorted(event for events in before for event in events)
    with gather_files([], store) as files:
        runs = [item for name, item in stream_blocks(files, []) if name == "rank-1" and isinstance(item, StepRun)]
        assert sum(run.steps for run in runs) == 512


def test_a_missing_segment_is_refused_in_one_line(
    tmp_path: Path, tell: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "KEPT", 1000)
    monkeypatch.setattr(gather, "PIECE", 5000)
    store = DirectoryStore(tmp_path / "store")
    folded_node(tell, tmp_path / "a" / "history")
    send(tmp_path / "a" / "history", store)
    store.remove(store.names("histories/segments/")[0])
    with pytest.raises(Corrupt, match=r"a piece of rank-0\.jsonl is missing"), gather_files([], store):
        pass


def test_a_file_at_hand_is_not_fetched(tmp_path: Path, tell: Callable[..., None]) -> None:
    store = DirectoryStore(tmp_path / "store")
    tell("a", "rank-0", began(1, 0))
    send(tmp_path / "a" / "history", store)
    with gather_files([tmp_path / "a"], store) as files:
        assert files == [tmp_path / "a" / "history" / "rank-0.jsonl"]
