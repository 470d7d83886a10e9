"""Promises of an object store alone; the suite that every store passes is in test_store.py."""

import pytest

from holdfast.checkpoint.objects import ObjectStore
from holdfast.checkpoint.store import read
from holdfast.errors import StorageFailed
from stores import broken_off, one_line


def test_a_large_upload_that_breaks_off_leaves_the_old_object(s3: dict[str, object]) -> None:
    store = ObjectStore("s3://holdfast/large", **s3)
    store.put("value", [b"old"])
    with pytest.raises(StorageFailed):
        store.put("value", broken_off(*[bytes(1 << 20)] * 40))
    assert read(store, "value") == b"old"


def test_a_large_upload_is_streamed_and_read_back(s3: dict[str, object]) -> None:
    store = ObjectStore("s3://holdfast/streamed", **s3)
    parts = [bytes([i]) * (1 << 20) for i in range(40)]
    store.put("value", iter(parts))
    assert read(store, "value", 1 << 30) == b"".join(parts)


def test_a_name_is_looked_for_without_listing_the_other_names_of_its_folder(s3: dict[str, object]) -> None:
    store = ObjectStore("s3://holdfast/many", **s3)
    for rank in range(30):
        store.put(f"step-00000001/shard-{rank:05d}.safetensors", [b"x"])
    listed: list[int] = []
    find = store._fs.find

    def counting(*place: object, **options: object) -> object:
        paths = find(*place, **options)
        listed.append(len(paths))
        return paths

    store._fs.find = counting
    name = "step-00000001/shard-00007.safetensors"
    assert store.names(name) == [name]
    assert len(store.names("step-00000001/shard-0001")) == 10
    assert listed == [1, 10]


def test_a_bucket_that_does_not_exist_is_one_clear_line(s3: dict[str, object]) -> None:
    store = ObjectStore("s3://nowhere/run", **s3)
    assert store.names() == []
    with pytest.raises(StorageFailed) as error:
        store.create("value", [b"x"])
    assert "s3://nowhere/run/value" in one_line(error)


def test_a_server_that_does_not_answer_is_one_clear_line() -> None:
    patience = {"retries": {"max_attempts": 0}, "connect_timeout": 2}
    # Port 9 (discard) is normally closed on loopback.
    store = ObjectStore(
        "s3://holdfast/run", key="a", secret="b", endpoint_url="http://127.0.0.1:9", config_kwargs=patience
    )
    with pytest.raises(StorageFailed) as error:
        store.names()
    assert "cannot list s3://holdfast/run" in one_line(error)
