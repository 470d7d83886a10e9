"""Writers: what is captured is what is committed, memory stays bounded, and no failure in the background is lost."""

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.division import Array
from holdfast.checkpoint import manifest, payload, scrub, snapshot
from holdfast.checkpoint.bandwidth import BandwidthLimit
from holdfast.checkpoint.capture import PIECE, BufferPool, HostImage, StateCapture, make_ready
from holdfast.checkpoint.device import ByteRun, _packed
from holdfast.checkpoint.shard_file import SEGMENT
from holdfast.checkpoint.sharding import ShardedTensor, Sharding
from holdfast.checkpoint.store import DirectoryStore, Store, read
from holdfast.checkpoint.writer import Ballot, Saved, Writer, WrittenShard, alone, blocking, overlapped
from holdfast.errors import BadInput, CommitConflict, StorageFailed
from snapshots import same, save_alone, tensors_of
from supervisor_process import StartCommand, alive, wait_until

WRITERS: dict[str, Callable[..., Writer]] = {"blocking": blocking, "overlapped": overlapped}
DEADLINE = 60.0
AT_ONCE = (0.0, 0.0)

each_writer = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)


class Gated(DirectoryStore):
    """A store that writes nothing before its gate is opened, and counts what it reads."""

    def __init__(self, path: Path, *, closed: bool = True) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.opened: list[str] = []
        if not closed:
            self.gate.set()

    def put(self, name, parts):  # type: ignore[no-untyped-def]
        assert self.gate.wait(DEADLINE)
        super().put(name, parts)

    def open(self, name):  # type: ignore[no-untyped-def]
        self.opened.append(name)
        return super().open(name)


class Refusing(DirectoryStore):
    """A store that refuses a number of writes of names with a certain suffix."""

    def __init__(self, path: Path, ending: str, times: int) -> None:
        super().__init__(path)
        self.ending, self.left = ending, times

    def _refuse(self, name: str) -> None:
        if name.endswith(self.ending) and self.left:
            self.left -= 1
            raise StorageFailed(f"cannot write {name}: it was planned so; go on")

    def put(self, name, parts):  # type: ignore[no-untyped-def]
        self._refuse(name)
        super().put(name, parts)

    def create(self, name, parts):  # type: ignore[no-untyped-def]
        super().create(name, parts)
        self._refuse(name)  # only after the name is there: the answer was lost, or the directory not synced


def weights(value: float, count: int = 1000) -> dict[str, Array]:
    return {"weight": torch.full((count,), float(value))}


# What is saved.


@each_writer
def test_a_saved_state_comes_back_exactly_from_every_store(store: Store, writer: Callable[..., Writer]) -> None:
    ours = writer(store, keep_last=2)
    save_alone(ours, 50, tensors_of(50), {"lr": 0.1}, epoch=2, cursor=7, world=4, config="abc")
    (saved,) = ours.close()
    back = snapshot.load(store, 50)
    assert same(back.tensors, tensors_of(50))
    assert back.extra == {"lr": 0.1}
    assert (back.manifest.epoch, back.manifest.cursor, back.manifest.world, back.manifest.config) == (2, 7, 4, "abc")
    assert (saved.step, saved.bytes, saved.retries, saved.removed) == (50, back.manifest.bytes, 0, ())
    assert scrub.verify(store) == []


def test_every_writer_writes_the_same_bytes(tmp_path: Path) -> None:
    for name, writer in WRITERS.items():
        ours = writer(DirectoryStore(tmp_path / name), keep_last=2)
        save_alone(ours, 1, tensors_of(1), {})
        ours.close()
    blocked, overlapping = (
        (tmp_path / name / "step-00000001/shard-00000-of-00001.safetensors").read_bytes() for name in WRITERS
    )
    assert blocked == overlapping


def test_training_may_change_everything_once_an_overlapped_save_returns(tmp_path: Path) -> None:
    store = Gated(tmp_path)
    ours = overlapped(store, keep_last=2)
    model = torch.nn.Linear(3, 2)
    before = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    extra: dict[str, Any] = {"lr": [0.1]}
    save_alone(ours, 1, {**model.state_dict(keep_vars=True), "array": (array := np.arange(3))}, extra)
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    array[:] = 0
    extra["lr"].append(0.2)
    store.gate.set()
    ours.close()
    back = snapshot.load(store, 1)
    assert all(torch.equal(torch.as_tensor(back.tensors[name]), before[name]) for name in before)
    assert back.tensors["array"].tolist() == [0, 1, 2]
    assert back.extra == {"lr": [0.1]}


def test_a_state_may_change_its_shape_from_save_to_save(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    ours = overlapped(store, keep_last=9)
    states = [weights(1.0, 10), weights(2.0, 3_000_000), {"other": np.arange(5)}, {}, weights(3.0, 20)]
    for step, state in enumerate(states):
        save_alone(ours, step, state, {})
    assert [saved.step for saved in ours.close()] == [0, 1, 2, 3, 4]
    assert all(same(snapshot.load(store, step).tensors, state) for step, state in enumerate(states))


# What it cost.


@each_writer
def test_the_parts_of_a_stall_explain_it(tmp_path: Path, writer: Callable[..., Writer]) -> None:
    ours = writer(DirectoryStore(tmp_path), keep_last=1)
    for step in range(3):
        save_alone(ours, step, weights(1.0), {})
    for saved in ours.close():
        stall = saved.stall
        assert abs(stall.unaccounted) < 1e-9
        assert saved.seconds > 0
        assert (stall.write > 0, stall.overlapped > 0) == ((True, False) if writer is blocking else (False, True))


def test_a_save_waits_for_a_free_image_and_calls_it_backpressure(tmp_path: Path) -> None:
    store = Gated(tmp_path)
    ours = overlapped(store, keep_last=2, max_inflight=1)
    save_alone(ours, 1, weights(1.0), {})
    second = threading.Thread(target=save_alone, args=(ours, 2, weights(2.0), {}))
    second.start()
    second.join(0.05)
    assert second.is_alive()  # the first is still in the air, and there may be no other
    assert ours.finished() == []
    store.gate.set()
    second.join(DEADLINE)
    assert not second.is_alive()
    first, second_saved = ours.close()
    assert (first.step, second_saved.step) == (1, 2)
    assert second_saved.stall.backpressure > first.stall.backpressure


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=30), st.integers(1, 4))
def test_there_are_never_more_images_than_was_allowed(uses: list[tuple[int, bool]], most: int) -> None:
    images = BufferPool(most)
    taken: list[HostImage] = []
    for size, hold in uses:
        if len(taken) == most:  # or else it would wait for ever
            while taken:
                images.give_back(taken.pop())
        image = images.take(size)
        assert image.capacity >= size
        assert len(images._made) <= most
        taken.append(image)
        if not hold:
            images.give_back(taken.pop())


def test_memory_is_flat_over_200_saves(tmp_path: Path) -> None:
    ours = overlapped(DirectoryStore(tmp_path), keep_last=2, max_inflight=2)
    state = weights(0.0, 500_000)
    images = ours._images  # type: ignore[attr-defined]
    sizes: list[tuple[int, int]] = []
    saved: list[Saved] = []
    for step in range(200):
        state["weight"].add_(1.0)
        save_alone(ours, step, state, {"step": step})
        saved += ours.finished()
        sizes.append((resident(), images.bytes))
    settled, *rest = sizes[20:]
    assert {images for _, images in rest} == {settled[1]}
    assert settled[1] <= 2 * (state["weight"].nbytes + 4096)
    assert max(memory for memory, _ in rest) < 1.05 * settled[0]
    assert [save.step for save in saved + ours.close()] == list(range(200))
    assert images.bytes == 0


@each_writer
def test_a_prepared_save_takes_no_memory_of_its_own(tmp_path: Path, writer: Callable[..., Writer]) -> None:
    ours = writer(DirectoryStore(tmp_path), keep_last=2)
    state = weights(7.0, 5_000_000)
    before = resident()
    ours.prepare(state)
    if writer is overlapped:
        until_idle(ours)
        assert resident() - before > 0.9 * state["weight"].nbytes  # an image, every page of it
        made = ours._images.bytes  # type: ignore[attr-defined]
        save_alone(ours, 1, state, {})
        assert ours._images.bytes == made  # type: ignore[attr-defined]
    else:
        save_alone(ours, 1, state, {})
    ours.close()
    assert same(snapshot.load(DirectoryStore(tmp_path), 1).tensors, state)


def test_of_many_images_that_may_be_in_flight_only_one_is_made_before_it_is_needed(tmp_path: Path) -> None:
    store = Gated(tmp_path)
    ours = overlapped(store, keep_last=2, max_inflight=4)
    ours.prepare(weights(1.0))
    until_idle(ours)
    assert len(ours._images._made) == 1  # type: ignore[attr-defined]
    for step in range(1, 5):
        save_alone(ours, step, weights(1.0), {})
    assert len(ours._images._made) == 4  # type: ignore[attr-defined]
    store.gate.set()
    assert [saved.step for saved in ours.close()] == [1, 2, 3, 4]


@pytest.mark.parametrize("most", [1, 2])
def test_a_save_that_comes_before_its_memory_waits_for_it_unless_it_may_have_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    gate, done = threading.Event(), threading.Event()

    def slowly(*how: Any) -> None:
        assert gate.wait(DEADLINE)
        make_ready(*how)
        done.set()

    monkeypatch.setattr("holdfast.checkpoint.writer.make_ready", slowly)
    ours = overlapped(DirectoryStore(tmp_path), keep_last=2, max_inflight=most)
    ours.prepare(weights(1.0))
    early = threading.Thread(target=save_alone, args=(ours, 1, weights(1.0), {}))
    early.start()
    early.join(0.05 if most == 1 else DEADLINE)
    assert early.is_alive() == (most == 1)
    gate.set()
    early.join(DEADLINE)
    assert not early.is_alive()
    assert done.wait(DEADLINE)
    assert len(ours._images._made) == most  # type: ignore[attr-defined]
    assert [saved.step for saved in ours.close()] == [1]


def test_memory_is_prepared_again_for_a_state_that_has_grown(tmp_path: Path) -> None:
    store = Gated(tmp_path)
    ours = overlapped(store, keep_last=2, max_inflight=2)
    ours.prepare(weights(1.0, 10))
    save_alone(ours, 1, weights(1.0, 10), {})
    grown = weights(2.0, 300_000)  # as with the moments that an optimizer has after its first step
    ours.prepare(grown)
    store.gate.set()
    until_idle(ours)
    images = ours._images  # type: ignore[attr-defined]
    assert len(images._made) == len(images._free) == 1
    assert all(image.capacity > grown["weight"].nbytes for image in images._made)
    save_alone(ours, 2, grown, {})
    assert [saved.step for saved in ours.close()] == [1, 2]
    assert same(snapshot.newest(store).tensors, grown)


def test_memory_that_cannot_be_prepared_is_taken_by_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise MemoryError("there is none right now")

    monkeypatch.setattr("holdfast.checkpoint.writer.make_ready", refused)
    ours = overlapped(DirectoryStore(tmp_path), keep_last=2)
    ours.prepare(weights(1.0))
    assert [saved.step for saved in saved_to_the_end(ours, 1, weights(1.0))] == [1]


def until_idle(ours: Writer) -> None:
    """Wait until the writer's thread has done what it was given."""
    ours._thread.submit(int).result(DEADLINE)  # type: ignore[attr-defined]


def resident() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# What is kept.


@each_writer
def test_only_the_last_are_kept_and_what_was_just_committed_is_not_read_again(
    tmp_path: Path, writer: Callable[..., Writer]
) -> None:
    store = Gated(tmp_path, closed=False)
    ours = writer(store, keep_last=2)
    for step in range(5):
        save_alone(ours, step, weights(step), {})
    assert [saved.removed for saved in ours.close()] == [(), (), (0,), (1,), (2,)]
    assert manifest.steps(store) == [3, 4]
    assert store.opened == []


def test_where_only_one_is_kept_it_is_read_before_the_others_go(tmp_path: Path) -> None:
    store = Gated(tmp_path, closed=False)
    ours = blocking(store, keep_last=1)
    save_alone(ours, 1, weights(1.0), {})
    save_alone(ours, 2, weights(2.0), {})
    assert "step-00000002/shard-00000-of-00001.safetensors" in store.opened
    assert [saved.removed for saved in ours.close()] == [(), (1,)]


# What goes wrong.


@each_writer
@pytest.mark.parametrize("ending", ["shard-00000-of-00001.safetensors", "extra.json", "manifest.json", "latest.json"])
def test_a_write_that_is_refused_for_a_while_is_tried_again(
    tmp_path: Path, writer: Callable[..., Writer], ending: str
) -> None:
    store = Refusing(tmp_path, ending, times=2)
    ours = writer(store, keep_last=2, backoff=AT_ONCE)
    save_alone(ours, 1, weights(1.0), {})
    (saved,) = ours.close()
    assert saved.retries == (1 if ending == "manifest.json" else 2), "a manifest that is there is not written again"
    assert same(snapshot.newest(store).tensors, weights(1.0))
    assert scrub.verify(store) == []


@pytest.fixture
def in_the_air(tmp_path: Path) -> Iterator[Writer]:
    """Return a writer with three finished saves that were not yet collected; the second has failed for good."""
    store = Refusing(tmp_path, "step-00000002/extra.json", times=3)
    ours = overlapped(store, keep_last=2, max_inflight=3, backoff=AT_ONCE)
    for step in (1, 2, 3):
        save_alone(ours, step, weights(step), {})
    for save in ours._saves:  # type: ignore[attr-defined]
        save.exception(DEADLINE)
    yield ours
    assert ours.close() == []
    assert manifest.steps(store) == [1, 3]
    assert scrub.verify(store) == []


FAILED = r"^the save of step 2 failed 3 times: cannot write step-00000002/extra.json: it was planned so; go on$"


def test_a_failed_save_is_raised_after_what_landed_before_it_was_told(in_the_air: Writer) -> None:
    assert [saved.step for saved in in_the_air.finished()] == [1]
    with pytest.raises(StorageFailed, match=FAILED):
        in_the_air.finished()
    assert [saved.step for saved in in_the_air.finished()] == [3]


def test_a_failed_save_is_raised_by_the_next(in_the_air: Writer) -> None:
    with pytest.raises(StorageFailed, match=FAILED):
        save_alone(in_the_air, 4, weights(4.0), {})
    assert [saved.step for saved in in_the_air.finished()] == [1, 3]


def test_a_failed_save_is_raised_at_the_end(in_the_air: Writer) -> None:
    with pytest.raises(StorageFailed, match=FAILED):
        in_the_air.close()
    assert [saved.step for saved in in_the_air.finished()] == [1, 3]


def test_a_blocking_save_that_fails_raises_at_once(tmp_path: Path) -> None:
    ours = blocking(Refusing(tmp_path, "step-00000002/extra.json", times=3), keep_last=2, backoff=AT_ONCE)
    save_alone(ours, 1, weights(1.0), {})
    with pytest.raises(StorageFailed, match=FAILED):
        save_alone(ours, 2, weights(2.0), {})
    save_alone(ours, 3, weights(3.0), {})
    assert [saved.step for saved in ours.close()] == [1, 3]


@each_writer
def test_a_step_that_somebody_else_has_saved_is_a_conflict_and_not_tried_again(
    tmp_path: Path, writer: Callable[..., Writer]
) -> None:
    store = DirectoryStore(tmp_path)
    snapshot.save(store, 1, weights(1.0), {})
    ours = writer(store, keep_last=2, backoff=(DEADLINE,))
    with pytest.raises(CommitConflict, match="step 1 is already saved"):
        saved_to_the_end(ours, 1, weights(2.0))
    assert same(snapshot.newest(store).tensors, weights(1.0))


def saved_to_the_end(ours: Writer, step: int, state: dict[str, Array]) -> list[Saved]:
    save_alone(ours, step, state, {})
    return ours.close()


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"keep_last": 0}, "must be 1 or more"),
        ({"keep_last": 1, "max_inflight": 0}, "must be 1 or more"),
    ],
)
def test_limits_that_allow_no_save_are_refused(tmp_path: Path, limits: dict[str, int], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        save_alone(overlapped(DirectoryStore(tmp_path), **limits), 1, weights(1.0), {})  # type: ignore[arg-type]


def test_a_state_that_cannot_be_saved_is_refused_at_once_and_costs_no_place(tmp_path: Path) -> None:
    ours = overlapped(DirectoryStore(tmp_path), keep_last=1, max_inflight=1)
    for state, extra in (({"w": torch.zeros(2, 2).to_sparse()}, {}), (weights(1.0), {"a": {1}})):
        with pytest.raises(BadInput):
            save_alone(ours, 1, state, extra)
    assert [saved.step for saved in saved_to_the_end(ours, 1, weights(1.0))] == [1]


# The votes of other ranks.


@each_writer
def test_a_rank_votes_when_its_file_is_written_and_the_commit_waits_for_it(
    tmp_path: Path, writer: Callable[..., Writer]
) -> None:
    store = DirectoryStore(tmp_path)
    state, seen = weights(1.0), []
    vote = alone(1, state, {})

    def cast(shard: WrittenShard) -> Ballot | None:
        seen.append((manifest.steps(store), store.names()))
        assert shard.digest.length == len(read(store, store.names()[0]))
        return vote(shard)

    ours = writer(store, keep_last=2)
    ours.save(1, state, cast)
    ours.close()
    assert seen == [([], ["step-00000001/shard-00000-of-00001.safetensors"])]
    assert manifest.steps(store) == [1]


@each_writer
def test_a_save_whose_vote_fails_is_not_committed_and_its_memory_is_used_again(
    tmp_path: Path, writer: Callable[..., Writer]
) -> None:
    def never(shard: WrittenShard) -> Ballot | None:
        raise StorageFailed("the history of rank 1 is not on the disk")

    store = DirectoryStore(tmp_path)
    limit = {"max_inflight": 1} if writer is overlapped else {}
    ours = writer(store, keep_last=2, backoff=AT_ONCE, **limit)

    def fails() -> None:
        ours.save(1, weights(1.0), never)
        until_idle(ours)
        ours.finished()

    for _ in range(2):
        with pytest.raises(StorageFailed, match="the history of rank 1"):
            fails()
    assert manifest.steps(store) == []
    assert [saved.step for saved in saved_to_the_end(ours, 1, weights(2.0))] == [1]
    assert same(snapshot.newest(store).tensors, weights(2.0))


@each_writer
def test_a_rank_that_does_not_commit_reports_no_save(tmp_path: Path, writer: Callable[..., Writer]) -> None:
    store = DirectoryStore(tmp_path)
    ours = writer(store, keep_last=2)
    ours.save(1, weights(1.0), lambda shard: None, rank=1, count=2)
    assert ours.close() == []
    assert not ours.is_busy
    assert store.names() == ["step-00000001/shard-00001-of-00002.safetensors"]


@each_writer
def test_two_ranks_write_their_files_and_the_one_with_all_votes_commits(
    tmp_path: Path, writer: Callable[..., Writer]
) -> None:
    store = DirectoryStore(tmp_path)
    halves = [{"w": torch.arange(0.0, 3.0)}, {"w": torch.arange(3.0, 6.0)}]
    layout = {"w": ShardedTensor("F32", (6,), Sharding((2,), ((0, 0),)))}
    votes: Queue[WrittenShard] = Queue()

    def lead(shard: WrittenShard) -> Ballot:
        other = votes.get(timeout=DEADLINE)
        draft = snapshot.draft(1, {}, layout, world=2)
        return Ballot(draft, [shard.digest, other.digest], max(shard.stall, other.stall, key=lambda s: s.waited), 3)

    follower, leader = writer(store, keep_last=2), writer(store, keep_last=2)
    follower.save(1, halves[1], votes.put, rank=1, count=2)
    leader.save(1, halves[0], lead, rank=0, count=2)
    assert follower.close() == []
    (saved,) = leader.close()
    assert saved.retries == 3
    assert same(snapshot.newest(store).tensors, {"w": torch.arange(6.0)})
    assert scrub.verify(store) == []


@each_writer
def test_progress_is_told_of_every_byte_written_and_read(tmp_path: Path, writer: Callable[..., Writer]) -> None:
    store = DirectoryStore(tmp_path)
    written: list[int] = []
    ours = writer(store, keep_last=2, progress=written.append)
    save_alone(ours, 1, weights(1.0, 5_000_000), {})
    (saved,) = ours.close()
    assert sum(written) == saved.bytes
    assert len(written) > 2 or writer is overlapped
    for reader in (
        lambda progress: snapshot.load(store, 1, progress=progress),
        lambda progress: snapshot.newest(store, progress=progress),
    ):
        counts: list[int] = []
        reader(counts.append)
        assert sum(counts) == saved.bytes
        assert max(counts) <= SEGMENT
        assert len(counts) > 3


# Real kills.

SAVE_FOR_EVER = """
import itertools, sys, torch
from holdfast.checkpoint.store import DirectoryStore
from holdfast.checkpoint.writer import alone, overlapped
ours = overlapped(DirectoryStore(sys.argv[1]), keep_last=2)
for step in itertools.count():
    state = {"weight": torch.full((1_000_000,), float(step))}
    ours.save(step, state, alone(step, state, {"step": step}))
    print([saved.step for saved in ours.finished()], flush=True)
"""


def test_a_kill_at_any_time_leaves_what_was_finished(start_command: StartCommand, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)
    for attempt in range(2):
        place = tmp_path / str(attempt)
        child, lines = start_command(place, instead=SAVE_FOR_EVER), rng.randrange(3, 20)
        wait_until(lambda: child.over or child.stdout.count("\n") >= lines, "saves")  # noqa: B023
        threading.Event().wait(rng.random() * 0.05)
        assert alive(child.pid), child.stderr
        child.signal(signal.SIGKILL)
        wait_until(lambda: not alive(child.pid), "the end of the process")  # noqa: B023
        finished = max([-1, *(step for line in child.stdout.splitlines() for step in json.loads(line))])
        if finished >= 0:
            newest = snapshot.newest(DirectoryStore(place))
            assert newest.step >= finished
            assert newest.extra == {"step": newest.step}
            assert same(newest.tensors, weights(newest.step, 1_000_000))


# On a device.


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=20), st.integers(0, 1000))
def test_a_clone_has_every_span_once_in_order_and_aligned_as_in_the_file(
    sizes: list[tuple[int, bool]], begin: int
) -> None:
    spans: list[tuple[int, int]] = []
    for size, is_device in sizes:
        if is_device:
            spans.append((begin, begin + size))
        begin += size
    runs, places, size = _packed(spans)
    ends = [at + end - start for at, (start, end) in zip(places, spans, strict=True)]
    assert all(end <= at for end, at in zip(ends, places[1:], strict=False))
    assert size == (ends[-1] if ends else 0)
    assert all(
        (at - start) % 64 == 0 for at, (start, _) in zip(places, spans, strict=True) if at in {r.at for r in runs}
    )
    # What is sent run by run puts every byte of every span where the file has it.
    where = {run.start + i: run.at + i for run in runs for i in range(run.end - run.start)}
    assert where == {
        start + i: at + i for at, (start, end) in zip(places, spans, strict=True) for i in range(end - start)
    }
    assert all(isinstance(run, ByteRun) for run in runs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spare", [0.05, 2.0], ids=["clone", "no room for a clone"])
def test_training_on_a_device_goes_on_at_once_and_what_was_there_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: float
) -> None:
    monkeypatch.setattr("holdfast.checkpoint.device.SPARE", spare)
    store = DirectoryStore(tmp_path)
    ours = overlapped(store, keep_last=9)
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
    state: dict[str, Array] = {
        **layers.state_dict(),
        "half": torch.arange(7, device="cuda").half(),
        "columns": torch.rand(300, 200, device="cuda").t(),
        "count": torch.tensor(3, device="cuda"),
        "nothing": torch.zeros(0, device="cuda"),
        "on the host": torch.rand(5),
        "array": np.arange(3),
    }
    expected = []
    for step in range(5):
        expected.append({name: value.cpu().clone() for name, value in state.items() if isinstance(value, torch.Tensor)})
        save_alone(ours, step, state, {})
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.add_(1)
    assert [saved.step for saved in ours.close()] == [0, 1, 2, 3, 4]
    for step, values in enumerate(expected):
        back = snapshot.load(store, step).tensors
        assert all(torch.equal(torch.as_tensor(back[name]), value) for name, value in values.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_for_a_device_is_pinned_before_the_first_save(tmp_path: Path) -> None:
    ours = overlapped(DirectoryStore(tmp_path), keep_last=2)
    ours.prepare({"weight": torch.zeros(1_000_000, device="cuda")})
    until_idle(ours)
    assert [image.pinned for image in ours._images._made] == [True, True]  # type: ignore[attr-defined]
    ours.close()


def test_a_large_state_is_copied_by_several_threads_to_the_last_bit() -> None:
    """Whatever its parts are: larger than what a thread takes at a time, in another order in memory, or no tensors."""
    torch.manual_seed(3)
    state: dict[str, Array] = {
        "large": torch.randn(3 * PIECE // 4 + 5, requires_grad=True),
        "turned": torch.randn(1500, 1000).t(),
        "part": torch.randn(4000, 1000)[:, ::2],
        "half": torch.randn(3 * PIECE).to(torch.bfloat16),
        "array": np.random.default_rng(3).standard_normal((500, 3000)),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    capture = StateCapture()
    layout = capture.layout(state)
    image = HostImage(layout.file_length)
    for _ in range(3):
        assert capture.fill(image, layout, state) == []
        copied = payload.decode(image.bytes[: layout.file_length], "image")
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(copied[name]), torch.as_tensor(value).detach()), name
        image.bytes[len(layout.header) :] = 0


def test_a_state_is_copied_before_its_vote_waits_for_others(tmp_path: Path) -> None:
    store, state = DirectoryStore(tmp_path), {"w": torch.ones(5)}
    vote, gate = alone(1, state, {}), threading.Event()

    def late(shard: WrittenShard) -> Ballot | None:
        assert gate.wait(DEADLINE)
        return vote(shard)

    ours = overlapped(store, keep_last=1)
    ours.save(1, state, late)  # returns although no other rank has voted
    state["w"].fill_(7)
    gate.set()
    (saved,) = ours.close()
    assert saved.stall.sync == 0  # training did not wait for the votes
    assert torch.as_tensor(snapshot.load(store, 1).tensors["w"]).tolist() == [1.0] * 5


@each_writer
def test_what_an_abandoned_save_left_is_removed_by_a_later_one(tmp_path: Path, writer: Callable[..., Writer]) -> None:
    store = DirectoryStore(tmp_path)
    ours = writer(store, keep_last=2)
    save_alone(ours, 1, weights(1.0), {})
    ours.save(2, weights(2.0), lambda shard: None)  # another rank was lost
    for step in (3, 4):
        save_alone(ours, step, weights(step), {})
    assert [saved.step for saved in ours.close()] == [1, 3, 4]
    assert {name.split("/")[0] for name in store.names()} == {"step-00000003", "step-00000004", "latest.json"}


# A limit of the bandwidth.


def test_a_limit_of_the_bandwidth_slows_the_background_and_not_training_until_the_run_ends(tmp_path: Path) -> None:
    slept = threading.Event()

    def sleep(seconds: float) -> None:
        slept.set()
        threading.Event().wait(0.001)

    limit = BandwidthLimit(1000.0, lambda: False, clock=lambda: 0.0, sleep=sleep)
    ours = overlapped(DirectoryStore(tmp_path), keep_last=2, max_inflight=2, limit=limit)
    save_alone(ours, 1, weights(1.0, 1_000_000), {})  # 40,000 pauses, if the limit stays
    save_alone(ours, 2, weights(2.0, 1_000_000), {})  # does not wait for the first
    assert slept.wait(DEADLINE)
    assert ours.finished() == []
    assert [saved.step for saved in ours.close()] == [1, 2]
    assert snapshot.load(DirectoryStore(tmp_path), 2).step == 2
