"""A function is called in a child process, which answers in time or is killed."""

import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.errors import BadInput, StorageFailed
from holdfast.supervise.child_call import ChildCall
from supervisor_process import alive, wait_until


def test_a_call_returns_the_value_or_raises_the_error_of_the_function() -> None:
    here = os.getpid()
    assert ChildCall(lambda: [1, None, "a" * 100_000], "it").result(60) == [1, None, "a" * 100_000]
    assert ChildCall(lambda: os.getpid() != here, "it").result(60) is True

    def refuse() -> None:
        raise BadInput("no such place")

    with pytest.raises(BadInput, match="no such place"):
        ChildCall(refuse, "it").result(60)

    def stumble() -> None:
        raise KeyError("key")

    with pytest.raises(StorageFailed, match="KeyError"):
        ChildCall(stumble, "it").result(60)


def test_a_call_without_an_answer_times_out_and_leaves_no_process(tmp_path: Path) -> None:
    def wait() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        signal.pause()

    waiting = ChildCall(wait, "nfs:/data")
    wait_until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()), "it to begin")
    assert not waiting.is_done()
    with pytest.raises(StorageFailed, match="nfs:/data did not answer within 0 s"):
        waiting.result(0)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_a_call_that_is_done_leaves_no_process() -> None:
    done = ChildCall(os.getpid, "it")
    wait_until(done.is_done, "an answer")
    with pytest.raises(ChildProcessError):
        os.waitpid(done._pid, os.WNOHANG)


def test_a_call_dies_with_its_caller(tmp_path: Path) -> None:
    def ask() -> None:
        def wait() -> None:
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(600)

        ChildCall(wait, "inner").result(600)

    outer = ChildCall(ask, "outer")
    wait_until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()), "both to begin")
    with pytest.raises(StorageFailed):
        outer.result(0)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(pid), "the inner one to die")
