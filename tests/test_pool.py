"""Sharing out: whatever goes wrong ends it at once, and no process is left waiting to be heard."""

from multiprocessing import active_children

import pytest

from holdfast.errors import BadInput, StorageFailed
from holdfast.simulate.pool import Tell, share_out


def count(item: int, tell: Tell) -> int:
    """Tells more than a pipe holds."""
    if item < 0:
        raise BadInput("a negative item")
    for number in range(5_000):
        tell(item, number)
    return item


def test_every_item_is_done_and_all_that_is_told_is_heard() -> None:
    heard: list[tuple[int, int]] = []
    assert share_out(count, [3, 1, 2], jobs=2, hear=lambda *what: heard.append(what)) == [3, 1, 2]
    assert sorted(heard) == [(item, number) for item in (1, 2, 3) for number in range(5_000)]


def test_a_listener_that_fails_ends_the_work_and_leaves_no_process_waiting() -> None:
    def full(item: int, number: int) -> None:
        raise StorageFailed("no space left")

    with pytest.raises(StorageFailed, match="no space left"):
        share_out(count, list(range(8)), jobs=2, hear=full)
    assert not active_children()


def test_the_first_item_that_fails_ends_the_work() -> None:
    with pytest.raises(BadInput, match="a negative item"):
        share_out(count, [-1, *range(8)], jobs=2, hear=lambda *what: None)
    assert not active_children()
