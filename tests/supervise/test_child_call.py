"""What a supervisor asks of a store is asked by a process of its own, which answers in time or not at all."""

import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.errors import BadInput, StorageFailed
from holdfast.supervise.child_call import Aside
from supervisor_process import alive, wait_until


def test_what_came_of_it_comes_back_as_a_value_or_as_the_error_it_was() -> None:
    here = os.getpid()
    assert Aside(lambda: [1, None, "a" * 100_000], "it").result(60) == [1, None, "a" * 100_000]
    assert Aside(lambda: os.getpid() != here, "it").result(60) is True

    def refuse() -> None:
        raise BadInput("no such place")

    with pytest.raises(BadInput, match="no such place"):
        Aside(refuse, "it").result(60)

    def stumble() -> None:
        raise KeyError("key")

    with pytest.raises(StorageFailed, match="KeyError"):
        Aside(stumble, "it").result(60)


def test_a_storage_that_does_not_answer_is_given_up_and_leaves_no_process(tmp_path: Path) -> None:
    def wait() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        signal.pause()

    waiting = Aside(wait, "nfs:/data")
    wait_until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()), "it to begin")
    assert not waiting.is_over()
    with pytest.raises(StorageFailed, match="nfs:/data did not answer within 0 s"):
        waiting.result(0)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_it_is_over_when_it_has_answered_and_then_there_is_nothing_left_of_it() -> None:
    done = Aside(os.getpid, "it")
    wait_until(done.is_over, "an answer")
    with pytest.raises(ChildProcessError):
        os.waitpid(done._pid, os.WNOHANG)


def test_it_dies_with_whoever_asked(tmp_path: Path) -> None:
    def ask() -> None:
        def wait() -> None:
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(600)

        Aside(wait, "inner").result(600)

    outer = Aside(ask, "outer")
    wait_until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()), "both to begin")
    with pytest.raises(StorageFailed):
        outer.result(0)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(pid), "the inner one to die")
