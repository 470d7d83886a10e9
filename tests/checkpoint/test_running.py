"""The running checkpoint equals a plain dict of the newest saved values, whatever happens in between."""

import logging
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.blocks.division import Array, Blocks, Ids, along, ragged, whole
from holdfast.checkpoint import running as running_module
from holdfast.checkpoint import scrub
from holdfast.checkpoint.digest import FORMAT, seal
from holdfast.checkpoint.index import generations
from holdfast.checkpoint.objects import ObjectStore
from holdfast.checkpoint.running import LIMIT, MANY, PIECE, PIECES, RunningCheckpoint, load_blocks, write_segments
from holdfast.checkpoint.store import DirectoryStore, Store, read
from holdfast.errors import BadInput, CommitConflict, Corrupt, FutureVersion, NoSnapshot
from snapshots import put_byte


def mixed_state(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "rows": rng.standard_normal((6, 3)),
        "moments": rng.standard_normal((6, 3)).astype(np.float32),
        "columns": torch.from_numpy(rng.standard_normal((2, 5))).to(torch.bfloat16),
        "documents": rng.integers(0, 9, 7),
        "bias": torch.from_numpy(rng.standard_normal(4)),
        "scalar": np.array(rng.standard_normal()),
    }


def mixed_blocks(state: dict[str, Array]) -> Blocks:
    return (
        along(state, "rows", companions=["moments"])
        + along(state, "columns", dim=1, size=2)
        + ragged(state, "documents", [0, 3, 3, 7])  # the second document is empty
        + whole(state, ["bias", "scalar"])
    )


COUNT = len(mixed_blocks(mixed_state(0)))
some_blocks = st.sets(st.integers(0, COUNT - 1)).map(lambda ids: np.array(sorted(ids), np.int64))


def value_of(blocks: Blocks, state: dict[str, Array], block: int) -> dict[str, Any]:
    return {name: torch.as_tensor(part).tolist() for name, part in blocks.pack(state, np.array([block])).items()}


def _filled(like: Array, value: float) -> Array:
    return torch.full_like(like, value) if isinstance(like, torch.Tensor) else np.full_like(like, value)


class AgainstADict(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 99), is_large=st.booleans())
    def create(self, seed: int, is_large: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        if is_large:  # enough to be compacted in every save
            self.patch.setattr(running_module, "ROOM", 0)
            self.patch.setattr(running_module, "PIECE", 1)
        self.store = ObjectStore(f"memory://{uuid.uuid4().hex}")
        self.live = mixed_state(seed)
        self.blocks = mixed_blocks(self.live)
        self.running = RunningCheckpoint.create(self.store, self.blocks, self.live)
        self.model = {block: (0, value_of(self.blocks, self.live, block)) for block in range(COUNT)}
        self.iteration = 0

    def teardown(self) -> None:
        self.patch.undo()

    @rule(ids=some_blocks, seed=st.integers(0, 99))
    def train_and_save(self, ids: Ids, seed: int) -> None:
        self.iteration += 1
        self.blocks.copy(mixed_state(seed), self.live, np.arange(COUNT))
        self.running.save(self.iteration, self.live, ids)
        for block in ids.tolist():
            self.model[block] = (self.iteration, value_of(self.blocks, self.live, block))

    @rule(ids=some_blocks)
    def lose_and_restore(self, ids: Ids) -> None:
        before = {block: value_of(self.blocks, self.live, block) for block in range(COUNT)}
        lost = {name: _filled(value, 77) for name, value in self.live.items()}
        self.blocks.copy(lost, self.live, ids)
        self.running.restore(ids, self.live)
        for block in range(COUNT):
            expected = self.model[block][1] if block in ids else before[block]
            assert value_of(self.blocks, self.live, block) == expected

    @rule()
    def compact(self) -> None:
        self.running.compact()

    @rule()
    def reopen(self) -> None:
        self.running = RunningCheckpoint.open(self.store, self.blocks)
        assert self.running.passed_over == ()

    @invariant()
    def equals_the_dict(self) -> None:
        everything = np.arange(COUNT)[::-1]
        target = mixed_state(100)
        self.blocks.unpack(self.running.load(everything), everything, target)
        for block, (iteration, value) in self.model.items():
            assert value_of(self.blocks, target, block) == value
            assert self.running.saved_at[block] == iteration

    @invariant()
    def the_store_holds_two_generations_at_most_and_all_is_well(self) -> None:
        assert len(generations(self.store)) <= 2
        assert scrub.verify(self.store) == []


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=16, stateful_step_count=12)


def matrix(value: float, rows: int = 64, columns: int = 8) -> dict[str, Array]:
    return {"w": np.full((rows, columns), value)}


def created(store: Store, rows: int = 64, columns: int = 8) -> tuple[RunningCheckpoint, Blocks]:
    state = matrix(0, rows, columns)
    blocks = along(state, "w")
    return RunningCheckpoint.create(store, blocks, state), blocks


def loaded(running: RunningCheckpoint) -> list[float]:
    return [float(row[0]) for row in np.asarray(running.load(np.arange(len(running.saved_at)))["w"])]


def test_it_works_in_every_store(store: Store) -> None:
    running, blocks = created(store)
    running.save(3, matrix(3), np.array([5, 1]))
    again = RunningCheckpoint.open(store, blocks)
    assert loaded(again) == [3.0 if block in (1, 5) else 0.0 for block in range(64)]
    assert again.saved_at.tolist() == [3 if block in (1, 5) else 0 for block in range(64)]


def test_blocks_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    running, _ = created(DirectoryStore(tmp_path))
    for iteration in (1, 2, 3):
        running.save(iteration, matrix(iteration), np.array([iteration]))
    assert [row[0] for row in np.asarray(running.load(np.array([3, 0, 1, 3, 2]))["w"])] == [3, 0, 1, 3, 2]


@pytest.mark.parametrize("share", [1, 8, 32, 64])
def test_it_never_holds_more_than_about_twice_a_large_state(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that count stay under the limit; with those that only the previous generation needs, about twice."""
    monkeypatch.setattr(running_module, "ROOM", 0)  # so that one of 2 MB is large
    monkeypatch.setattr(running_module, "PIECE", 1)
    store = ObjectStore(f"memory://{uuid.uuid4().hex}")
    running, _ = created(store, columns=4096)  # so large that headers hardly count
    state_bytes = 64 * 4096 * 8
    rng = np.random.default_rng(5)
    peak = 0
    for iteration in range(1, 40):
        running.save(iteration, matrix(iteration, columns=4096), rng.permutation(64)[:share])
        assert running.bytes <= LIMIT * state_bytes * 1.02
        peak = max(peak, sum(len(read(store, name)) for name in store.names("running/segment")))
    assert peak <= (LIMIT + 1) * state_bytes * 1.02
    if share <= 8:  # the usual fractions of a state
        assert peak <= 2.2 * state_bytes


def test_segments_of_a_large_state_are_small_enough_to_be_compacted_one_by_one(tmp_path: Path) -> None:
    created(DirectoryStore(tmp_path), columns=PIECES * PIECE // (64 * 8))
    assert PIECES <= len(DirectoryStore(tmp_path).names("running/segment")) <= PIECES + 1


def test_a_small_state_is_one_segment_that_stays_as_it_is_while_little_is_saved(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    running, _ = created(store)
    (first,) = store.names("running/segment")
    for iteration in range(1, 20):
        running.save(iteration, matrix(iteration), np.arange(32))
    assert first in store.names("running/segment")
    assert len(store.names("running/segment")) == 3  # and the newest save, and the one of the generation before


def test_many_small_saves_are_gathered_into_few_segments(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    running, blocks = created(store, rows=200)
    for iteration in range(1, 200):
        running.save(iteration, matrix(iteration, rows=200), np.array([iteration]))
        assert len(store.names("running/segment")) <= 2 * MANY  # of two generations
    assert loaded(RunningCheckpoint.open(store, blocks)) == [float(block) for block in range(200)]


def test_compacting_leaves_only_what_counts(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    running, blocks = created(store)
    running.save(1, matrix(1), np.arange(10, 20))
    held = running.bytes
    running.compact()
    assert running.bytes < held
    before = generations(store)
    running.compact()
    assert generations(store) == before
    assert loaded(RunningCheckpoint.open(store, blocks)) == [1.0 if 10 <= block < 20 else 0.0 for block in range(64)]


# Damage.


@pytest.mark.parametrize("which", ["running/index-", "running/segment-"])
def test_damage_to_the_newest_generation_falls_back_to_the_one_before(
    tmp_path: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = DirectoryStore(tmp_path)
    running, blocks = created(store, rows=2)
    running.save(1, matrix(1, rows=2), np.array([0]))
    running.save(2, matrix(2, rows=2), np.array([0]))
    path = tmp_path / store.names(which)[-1]
    good = path.read_bytes()
    for position, byte in enumerate(good):
        put_byte(path, position, byte ^ 1)
        with caplog.at_level(logging.WARNING):
            again = RunningCheckpoint.open(store, blocks)
        assert loaded(again)[0] == 1
        assert [passed.name for passed in again.passed_over] == ["running/index-00000002.json"]
        if position % 5 == 0:  # that scrubbing names it as well is seen at every fifth byte
            assert [finding.name for finding in scrub.verify(store)] == ["running/index-00000002.json"]
        if position + 1 < len(good):
            put_byte(path, position, byte)
    again.save(3, matrix(3, rows=2), np.array([0]))
    assert scrub.verify(store) == []
    assert loaded(RunningCheckpoint.open(store, blocks))[0] == 3


def test_damage_that_every_generation_shares_is_named(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    running, blocks = created(store)
    running.save(1, matrix(1), np.array([63]))
    oldest = store.names("running/segment")[0]
    (tmp_path / oldest).write_bytes(b"rotten")
    with pytest.raises(Corrupt, match=oldest):
        RunningCheckpoint.open(store, blocks)
    with pytest.raises(Corrupt, match=oldest):
        running.load(np.array([0]))
    running.save(2, matrix(2), np.arange(64))  # a process that is still alive can save every block again
    assert loaded(RunningCheckpoint.open(store, blocks)) == [2.0] * 64


def test_an_index_from_the_future_asks_for_an_upgrade(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    _, blocks = created(store)
    store.put("running/index-00000009.json", [seal({"format": FORMAT + 1})])
    with pytest.raises(FutureVersion):
        RunningCheckpoint.open(store, blocks)


# Bad input.


def test_a_running_checkpoint_is_created_only_once(tmp_path: Path) -> None:
    _, blocks = created(DirectoryStore(tmp_path))
    with pytest.raises(CommitConflict):
        RunningCheckpoint.create(DirectoryStore(tmp_path), blocks, matrix(0))


def test_two_writers_of_one_running_checkpoint_conflict_and_harm_nothing(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    first, blocks = created(store)
    second = RunningCheckpoint.open(store, blocks, writer="b")
    first.save(1, matrix(1), np.array([1]))
    with pytest.raises(CommitConflict):
        second.save(2, matrix(2), np.array([2]))
    assert loaded(RunningCheckpoint.open(store, blocks))[:3] == [0, 1, 0]


def test_a_store_without_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoSnapshot, match="create one"):
        RunningCheckpoint.open(DirectoryStore(tmp_path), along(matrix(0), "w"))


def test_other_blocks_and_repeated_blocks_are_refused(tmp_path: Path) -> None:
    running, _ = created(DirectoryStore(tmp_path))
    with pytest.raises(BadInput, match="other blocks"):
        RunningCheckpoint.open(DirectoryStore(tmp_path), along(matrix(0), "w", size=2))
    with pytest.raises(BadInput, match="twice"):
        running.save(1, matrix(1), np.array([1, 1]))


def test_inspection_sums_it_up(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    running, _ = created(store)
    running.save(7, matrix(7), np.array([1]))
    index = scrub.inspect(store).running
    assert index is not None
    assert (index.generation, index.blocks, index.oldest, index.newest) == (1, 64, 0, 7)
    assert index.bytes == running.bytes


def test_several_writers_each_write_segments_and_one_commits_them(store: Store) -> None:
    state, blocks = _rows(8)
    running = RunningCheckpoint(store, blocks, "controller")
    mine, other = np.arange(0, 8, 2), np.arange(1, 8, 2)
    first = running.reserve()
    segments = [
        segment
        for writer, ids in (("node-0", mine), ("node-1", other))
        for segment in write_segments(
            store, blocks, writer, first, ids, np.zeros(4, np.int64), blocks.pack(state, ids), state["w"].nbytes
        )
    ]
    running.commit(segments)
    changed = {"w": state["w"] + 1}
    running.commit(
        write_segments(
            store,
            blocks,
            "node-1",
            running.reserve(),
            other,
            np.full(4, 3),
            blocks.pack(changed, other),
            changed["w"].nbytes,
        )
    )

    opened = RunningCheckpoint.open(store, blocks)

    assert opened.saved_at.tolist() == [0, 3] * 4
    np.testing.assert_array_equal(opened.load(other)["w"], changed["w"][other])
    # What another process needs to load some blocks is the segments that hold them.
    np.testing.assert_array_equal(load_blocks(store, blocks, running.holding(mine), mine)["w"], state["w"][mine])


def test_segments_of_one_save_that_hold_the_same_block_are_refused(store: Store) -> None:
    state, blocks = _rows(4)
    running = RunningCheckpoint.create(store, blocks, state)
    ids = np.arange(2)
    twice = [
        segment
        for writer in ("a", "b")
        for segment in write_segments(
            store, blocks, writer, running.reserve(), ids, np.ones(2, np.int64), blocks.pack(state, ids), 1
        )
    ]
    with pytest.raises(BadInput, match="two of the segments hold the same"):
        running.commit(twice)


def _rows(count: int) -> tuple[dict[str, np.ndarray], Blocks]:
    state = {"w": np.arange(count * 3, dtype=np.float32).reshape(count, 3)}
    return state, along(state, "w")
