"""Storage faults, every kind at every point of a save: training goes on or stops in one line, and a good state is left."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.blocks.division import Array
from holdfast.checkpoint import manifest, scrub, snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.checkpoint.writer import Saved, Writer, blocking, overlapped
from holdfast.errors import BadInput, StorageFailed
from holdfast.faults.schedule import Failure, at
from holdfast.faults.storage import KINDS, POINTS, FaultyStore
from snapshots import save_alone

BEFORE, STRUCK, AFTER = 20, 30, 40
STATE = "step-00000030/manifest.json"
COMMITTED = ("latest", "removal")  # points that come after the commit
# What `verify` names after a hidden fault in the save of step 30. A name that is lost is missed at once, a pointer that
# was not replaced is still a good one, and a removal looks again for what is left.
NAMED = {
    **{(kind, point): STATE for kind in ("torn-write", "bit-flip") for point in ("tensors", "extra", "manifest")},
    **{(kind, "latest"): manifest.LATEST for kind in ("torn-write", "bit-flip")},
}
TRIED_AGAIN = {*(("io-error", point) for point in POINTS)} | {
    ("lost-rename", point) for point in ("tensors", "extra", "manifest")
}

each_writer = pytest.mark.parametrize("writer", [blocking, overlapped])


def state(step: int) -> dict[str, Array]:
    return {"weight": torch.full((400_000,), float(step)), "step": torch.tensor(step)}


def trained(ours: Writer, *steps: int) -> list[Saved]:
    """Save at these steps, as a training loop does: each save is followed by a boundary."""
    saved: list[Saved] = []
    for step in steps:
        save_alone(ours, step, state(step), {"step": step})
        saved += ours.finished()
    return saved + ours.close()


def prepared(place: Path) -> DirectoryStore:
    """A store with two good snapshots, of steps 10 and 20."""
    store = DirectoryStore(place)
    trained(blocking(store, keep_last=2), 10, BEFORE)
    return store


def assert_good(store: DirectoryStore, step: int) -> None:
    newest = snapshot.newest(store)
    assert newest.step == step
    assert newest.extra == {"step": step}
    assert all(torch.equal(torch.as_tensor(newest.tensors[name]), value) for name, value in state(step).items())


@each_writer
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix(tmp_path: Path, kind: str, point: str, writer: Callable[..., Writer]) -> None:
    store = prepared(tmp_path)
    struck: list[Failure] = []
    faults = at([STRUCK], kind=kind, point=point)
    ours = writer(FaultyStore(store, faults, delay=0.01, record=struck.append), keep_last=2, backoff=(0.0, 0.0))

    if kind == "enospc":
        with pytest.raises(StorageFailed, match=r"^the save of step 30 failed 3 times: .*free some space") as error:
            trained(ours, STRUCK)
        assert "\n" not in str(error.value)
        assert_good(store, STRUCK if point in COMMITTED else BEFORE)
    else:
        (saved,) = trained(ours, STRUCK)
        assert saved.retries == ((kind, point) in TRIED_AGAIN)
        assert_good(store, BEFORE if NAMED.get((kind, point)) == STATE else STRUCK)

    assert struck == list(faults)
    named = [finding.name for finding in scrub.verify(store)]
    assert named == ([NAMED[kind, point]] if (kind, point) in NAMED else [])

    # Whatever it was, the run that comes next saves as if nothing had been, and clears away what is too old.
    trained(writer(store, keep_last=2), AFTER)
    assert_good(store, AFTER)
    assert len(manifest.steps(store)) == 2


@each_writer
@pytest.mark.parametrize("kind", ["torn-write", "bit-flip"])
def test_a_silent_fault_does_not_cost_the_last_good_snapshot_where_one_is_kept(
    tmp_path: Path, kind: str, writer: Callable[..., Writer]
) -> None:
    store = prepared(tmp_path)
    trained(writer(FaultyStore(store, at([STRUCK], kind=kind)), keep_last=1), STRUCK)
    assert_good(store, BEFORE)


def test_a_fault_strikes_once_and_waits_for_a_save_at_or_after_its_step(tmp_path: Path) -> None:
    struck: list[Failure] = []
    faults = at([15, 35], kind="io-error")
    store = FaultyStore(DirectoryStore(tmp_path), faults, record=struck.append)
    saved = trained(blocking(store, keep_last=9, backoff=(0.0,)), 10, 20, 30, 40, 50)
    assert [each.retries for each in saved] == [0, 1, 0, 1, 0]
    assert struck == list(faults)


def test_failures_that_are_not_of_storage_are_ignored(tmp_path: Path) -> None:
    store = FaultyStore(DirectoryStore(tmp_path), at([10], kind="kill"))
    assert [saved.retries for saved in trained(blocking(store, keep_last=1), 10)] == [0]


def test_a_point_that_is_not_in_a_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tensors, extra, manifest, latest, removal"):
        FaultyStore(DirectoryStore(tmp_path), at([10], kind="delay", point="backward"))
