"""The start of a run says what it does and how long each part took, and pauses the garbage collector."""

import gc
import os

import pytest

from holdfast.supervise import start_up


def test_a_slow_start_is_explained_once_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "_parts", {"import torch": 4.21, "import its compiler": 1.0})
    assert start_up.take_summary() == "started in 5.2 s: import torch 4.2 s, import its compiler 1.0 s"
    assert start_up.take_summary() is None


def test_a_quick_start_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "_parts", {"import torch": 0.1})
    assert start_up.take_summary() is None


def test_a_part_is_shown_and_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "_parts", {})
    shown: list[str] = []
    with start_up.part("import torch", shown.append):
        assert shown == ["starting: import torch"]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert list(start_up._parts) == ["import torch"]


def test_torch_is_imported_without_the_warnings_of_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "_parts", {})
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    with start_up.importing_torch():
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ  # a process that the script starts has the default


def test_torch_is_imported_with_the_log_level_that_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "_parts", {})
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    with start_up.importing_torch():
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == "WARNING"
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "WARNING"


def test_a_part_that_fails_leaves_the_garbage_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "_parts", {})

    def fail() -> None:
        with start_up.part("import torch", lambda line: None):
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
