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
