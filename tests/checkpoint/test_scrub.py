"""Listing and verifying the contents of a store."""

import json

import pytest
import torch

from holdfast.checkpoint import scrub
from holdfast.checkpoint.digest import seal
from holdfast.checkpoint.store import Store, read
from holdfast.errors import NotAStore
from snapshots import STEP_FILES, damage, saved, saved_by


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


def test_a_listing_names_a_snapshot_with_a_missing_file(store: Store) -> None:
    saved_by(store, 1, 3, {"a": torch.zeros(6, 2)})
    saved_by(store, 2, 3, {"a": torch.zeros(6, 2)})
    store.remove("step-00000002/shard-00001-of-00003.safetensors")
    contents = scrub.inspect(store)
    assert [manifest.step for manifest in contents.snapshots] == [1]
    (bad,) = contents.unreadable
    assert bad.name == "step-00000002/manifest.json"
    assert "1 of the 4 files" in bad.why
    assert "step-00000002/shard-00001-of-00003.safetensors" in bad.why


def test_a_manifest_with_a_rank_too_many_is_named_in_one_clear_line(store: Store) -> None:
    saved_by(store, 1, 3, {"a": torch.zeros(6, 2)})
    record = json.loads(read(store, "step-00000001/manifest.json"))
    del record["digest"]
    record["shards"].append(record["shards"][0])
    store.put("step-00000001/manifest.json", [seal(record)])
    (bad,) = scrub.verify(store)
    assert bad.why == (
        "step-00000001/extra.json: its tensors are divided among 3 ranks, but the manifest lists the files of 4: fall back "
        "to an older snapshot."
    )
    (bad,) = scrub.inspect(store).unreadable
    assert "4 of the 5 files" in bad.why


def test_a_place_without_any_save_is_not_a_store(store: Store) -> None:
    store.put("notes.txt", [b"mine"])
    for look in (scrub.inspect, scrub.verify):
        with pytest.raises(NotAStore, match="neither"):
            look(store)
