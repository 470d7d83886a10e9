"""A save that is killed at any system call, or by a power cut, leaves the old version or the new one."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import power_cut
from holdfast.checkpoint import manifest, retention, scrub, snapshot
from holdfast.checkpoint.running import RunningCheckpoint
from holdfast.checkpoint.store import DirectoryStore
from save_subjects import BLOCKS, KILLED, ROWS, SUBJECTS, WRONG, files_of, state, verdict
from snapshots import resume
from supervisor_process import SUPPORT

DEADLINE = 120
Killed = Callable[[str, str, Path], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def attempts() -> Iterator[Killed]:
    """Kills the saves of a subject by a writer in a place; every killed attempt."""
    program = [sys.executable, "-W", "error", str(SUPPORT / "killed_saves.py")]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killer:

        def killed(subject: str, writer: str, place: Path) -> list[dict[str, Any]]:
            assert killer.stdin is not None
            assert killer.stdout is not None
            deadline = threading.Timer(DEADLINE, killer.kill)
            deadline.start()
            killer.stdin.write(json.dumps([subject, writer, str(place)]) + "\n")
            killer.stdin.flush()
            line = killer.stdout.readline()
            deadline.cancel()
            return checked(json.loads(line or "null"), subject, writer)

        yield killed
        killer.kill()


def checked(report: dict[str, Any] | None, subject: str, writer: str) -> list[dict[str, Any]]:
    """The killed attempts; asserts that the kills took place where they should and that no call went unseen."""
    assert report is not None, "it says why on its standard error"
    assert report["unseen"] == 0
    done = [attempt for attempt in report["attempts"] if attempt["status"] == 0]
    dead = [attempt for attempt in report["attempts"] if attempt["status"] == -signal.SIGKILL]
    assert len(done) == 2  # one for kills before a call, one for kills within a write: the save came to its end
    assert len(dead) == len(report["attempts"]) - 2
    assert all(verdict(KILLED[subject], Path(attempt["place"])) == "new" for attempt in done if writer == "right")
    return dead


def verdicts(subject: str, killed: list[dict[str, Any]]) -> list[str]:
    return [verdict(SUBJECTS[subject], Path(attempt["place"])) for attempt in killed]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_kill_at_every_system_call_leaves_the_old_or_the_new(tmp_path: Path, attempts: Killed, subject: str) -> None:
    found = verdicts(subject, attempts(subject, "right", tmp_path))
    assert set(found) == {"old", "new"}
    assert len(found) > 5


@pytest.mark.parametrize("writer", ["in place", "unlink first"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_same_check_catches_writers_that_are_wrong(
    tmp_path: Path, attempts: Killed, subject: str, writer: str
) -> None:
    found = verdicts(subject, attempts(subject, writer, tmp_path))
    assert any(each.startswith("neither") for each in found)


@pytest.fixture(scope="module")
def killed_saves(tmp_path_factory: pytest.TempPathFactory, attempts: Killed) -> list[Path]:
    """What saves of a snapshot leave that were killed at every call; to be copied before it is changed."""
    return [Path(attempt["place"]) for attempt in attempts("snapshot", "right", tmp_path_factory.mktemp("killed"))]


def copies(places: list[Path], where: Path) -> Iterator[DirectoryStore]:
    for place in places:
        yield DirectoryStore(shutil.copytree(place, where / place.name))


def test_whatever_call_a_save_was_killed_at_the_next_one_works_and_clears_up(
    tmp_path: Path, killed_saves: list[Path]
) -> None:
    for store in copies(killed_saves, tmp_path):
        snapshot.save(store, 3, state(3), {"version": 3})
        assert snapshot.newest(store).step == 3
        assert scrub.verify(store) == []
        assert not list(store.path.rglob("*.tmp"))
        assert {name.split("/")[0] for name in store.names("step-")} == {f"step-{s:08d}" for s in manifest.steps(store)}


def test_whatever_call_a_running_save_was_killed_at_the_next_one_works_and_clears_up(
    tmp_path: Path, attempts: Killed
) -> None:
    for attempt in attempts("running", "right", tmp_path):
        store = DirectoryStore(attempt["place"])
        running = RunningCheckpoint.open(store, BLOCKS)
        for iteration in (3, 4):
            running.save(iteration, state(iteration), np.arange(ROWS))
        assert RunningCheckpoint.open(store, BLOCKS).saved_at.tolist() == [4] * ROWS
        assert scrub.verify(store) == []
        assert not list(store.path.rglob("*.tmp"))
        assert len(store.names("running/index")) == 2


def test_whatever_call_a_save_or_removal_was_killed_at_the_next_start_leaves_nothing_behind(
    tmp_path: Path, killed_saves: list[Path]
) -> None:
    """Kills between the last unlink and rmdir, and between a commit and the removal of what it ousted, among them."""
    seen = {"empty folder": 0, "surplus": 0, "temporary": 0, "uncommitted": 0}
    for store in copies(killed_saves, tmp_path):
        folders = [path for path in store.path.iterdir() if path.is_dir()]
        committed = {f"step-{step:08d}" for step in manifest.steps(store)}
        seen["empty folder"] += any(not list(path.iterdir()) for path in folders)
        seen["surplus"] += len(committed) > 1
        seen["temporary"] += bool(list(store.path.rglob("*.tmp")))
        seen["uncommitted"] += any(path.name not in committed and list(path.iterdir()) for path in folders)
        before = verdict(SUBJECTS["snapshot"], store.path)

        found, passed_over = resume(store)
        assert found is not None
        retention.tidy(store, 1, trusted=found.step)

        assert passed_over == ()
        assert verdict(SUBJECTS["snapshot"], store.path) == before
        whole = {
            f"step-{found.step:08d}/{name}"
            for name in ("shard-00000-of-00001.safetensors", "extra.json", "manifest.json")
        }
        left = {str(path.relative_to(store.path)) for path in store.path.rglob("*")}
        assert left - {"latest.json"} == {*whole, f"step-{found.step:08d}"}
    assert all(seen.values()), seen


def test_a_kill_while_a_snapshot_is_set_aside_leaves_it_where_it_was_or_aside(tmp_path: Path, attempts: Killed) -> None:
    for attempt in attempts("aside", "right", tmp_path):
        store = DirectoryStore(attempt["place"])
        assert (manifest.steps(store), retention.aside(store)) in (
            ([1, 2], []),
            ([1], ["set-aside-00000002-0"]),
        )
        found, _ = resume(store)
        assert found is not None
        assert found.step == 1
        assert retention.aside(store) == ["set-aside-00000002-0"]
        assert len(store.names("set-aside-")) == 3


# Power cuts.


def after_power_cuts(subject: str, writer: str, place: Path) -> list[str]:
    """The verdict after a power cut behind every call, at each extreme of what the disk may have kept."""
    chosen = SUBJECTS[subject]
    chosen.old(place / "work")
    disk, calls = power_cut.Disk.of(place / "work"), []
    if writer != "right":
        chosen.alone(place / "alone")
        files = files_of(place / "alone")
    with power_cut.recorded(place / "work", calls):
        if writer == "right":
            chosen.save(place / "work")
        else:
            WRONG[writer](place / "work", files)
    found = []
    for number, call in enumerate(calls):
        disk.apply(call)
        for kept in power_cut.KEPT:
            left = place / f"{number}-{kept}"
            disk.left(kept, left)
            found.append(verdict(chosen, left))
    return found


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_power_cut_after_any_call_leaves_the_old_or_the_new_and_a_finished_save_stays(
    tmp_path: Path, subject: str
) -> None:
    found = after_power_cuts(subject, "right", tmp_path)
    assert set(found) == {"old", "new"}
    assert found[-len(power_cut.KEPT) :] == ["new"] * len(power_cut.KEPT)


@pytest.mark.parametrize("writer", WRONG)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_power_cuts_catch_writers_that_are_wrong(tmp_path: Path, subject: str, writer: str) -> None:
    found = after_power_cuts(subject, writer, tmp_path)
    assert any(each.startswith("neither") for each in found)


def test_a_save_syncs_payloads_before_naming_them_and_commits_last(tmp_path: Path) -> None:
    calls: list[power_cut.Call] = []
    store = DirectoryStore(tmp_path / "store")
    store.put("other", [b"x"])
    with power_cut.recorded(store.path, calls):
        snapshot.save(store, 1, state(1), {})
    order = [name for name, _ in calls if name != "write"]
    whole = ["open", "fsync"]  # a temporary file is written and synced, then
    renamed, linked = ["replace", "fsync"], ["link", "unlink", "fsync"]  # it gets its name, and the directory is synced
    assert order == ["mkdir", "fsync", *whole, *renamed, *whole, *renamed, *whole, *linked, *whole, *renamed]
    named = [arguments[-1] for name, arguments in calls if name in ("replace", "link")]
    folder = "step-00000001"
    assert named == [
        f"{folder}/shard-00000-of-00001.safetensors",
        f"{folder}/extra.json",
        f"{folder}/manifest.json",
        "latest.json",
    ]
    synced = [arguments[0] for name, arguments in calls if name == "fsync"]
    assert [path for path in synced if not path.endswith(".tmp")] == [".", folder, folder, folder, "."]
