"""Listing and verifying the contents of a store."""

import pytest

from holdfast.checkpoint import scrub
from holdfast.checkpoint.store import Store, read
from holdfast.errors import NotAStore
from snapshots import STEP_FILES, damage, saved


def test_a_sound_store_has_no_findings_and_shows_its_contents(store: Store) -> None:
    saved(store, 1, 2)
    assert scrub.verify(store) == []
    contents = scrub.inspect(store)
    assert [manifest.step for manifest in contents.snapshots] == [1, 2]
    assert contents.running is None
    assert contents.unreadable == ()
    sizes = [len(read(store, f"step-00000001/{name}")) for name in STEP_FILES[:2]]
    assert contents.snapshots[0].bytes == sum(sizes)


def test_everything_bad_is_named(store: Store) -> None:
    saved(store, 1, 2, 3)
    damage(store, "step-00000001/shard-00000-of-00001.safetensors", b"x")
    damage(store, "step-00000003/manifest.json", b"x")
    damage(store, "latest.json", b"x")
    assert [finding.name for finding in scrub.verify(store)] == [
        "step-00000001/manifest.json",
        "step-00000003/manifest.json",
        "latest.json",
    ]
    assert [manifest.step for manifest in scrub.inspect(store).snapshots] == [1, 2]
    assert [finding.name for finding in scrub.inspect(store).unreadable] == ["step-00000003/manifest.json"]


def test_a_place_without_any_save_is_not_a_store(store: Store) -> None:
    store.put("notes.txt", [b"mine"])
    for look in (scrub.inspect, scrub.verify):
        with pytest.raises(NotAStore, match="neither"):
            look(store)
