"""The start of a run says what it does, and pauses the garbage collector."""

import gc

import pytest

from holdfast.supervise import start_up


def test_a_part_is_shown_and_collects_no_garbage() -> None:
    shown: list[str] = []
    with start_up.part("import torch", shown.append):
        assert shown == ["starting: import torch"]
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_part_that_fails_leaves_the_garbage_collector_on() -> None:
    def fail() -> None:
        with start_up.part("import torch", lambda line: None):
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
