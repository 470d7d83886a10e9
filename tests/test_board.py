"""The run's numbers on TensorBoard: what histories say, as scalars by step; what is trained again takes its place."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import BadInput
from holdfast.events import Judged, Launch, Recover, Restart, Save, Seconds, Step
from holdfast.history.follow import Growing
from holdfast.history.log import HistoryWriter
from holdfast.runs.config import RunConfig
from holdfast.sampler.digest import Samples
from holdfast.stall import Stall
from holdfast.supervise import board as module
from holdfast.supervise.board import Board, follow
from holdfast.supervise.supervisor import supervise


class Recording:
    """A writer that remembers what it was given."""

    def __init__(self, purge: int, into: list[Any]) -> None:
        self.into = into
        into.append(("begin", purge))

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None:
        assert walltime > 0
        self.into.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.into.append("end")


def step(number: int, attempt: int = 1) -> Step:
    return Step(attempt, 1, 0, 0, number, number, Samples.of([]), Seconds(0.25, 1.0, 0.5), loss=4.0 - number)


def test_scalars_are_those_of_the_history(tmp_path: Path) -> None:
    files = [Growing(tmp_path / f"{who}.jsonl") for who in ("supervisor", "rank-0")]
    written: list[Any] = []
    with HistoryWriter(tmp_path, "supervisor") as supervisor, HistoryWriter(tmp_path, "rank-0") as rank:
        supervisor.append(Launch(1, 1), 1.0)
        for number, what in enumerate([Recover(1, None, 0, 0, "keyed", 0.0), step(0), step(1)]):
            rank.append(what, 2.0 + number)
        rank.append(Save(1, 2, "blocking", 1, Stall(waited=0.75)), 5.0)
        supervisor.append(Restart(2, 1), 6.0)
        rank.append(Recover(2, 1, 0, 1, "restored", 0.0), 7.0)
        rank.append(step(1, attempt=2), 8.0)
        supervisor.append(Judged("completed", 2, ""), 9.0)
    follow(Board(lambda purge: Recording(purge, written)), files, pause=0.0)
    parts = [("seconds/step", 1.75), ("seconds/data", 0.25), ("seconds/stall", 0.5)]
    assert written == [
        ("begin", 0),
        ("restarts", 0, 0),
        ("loss", 4.0, 0),
        *((tag, value, 0) for tag, value in parts),
        ("loss", 3.0, 1),
        *((tag, value, 1) for tag, value in parts),
        ("seconds/save", 0.75, 1),
        "end",
        ("begin", 1),
        ("restarts", 1, 1),
        ("loss", 3.0, 1),
        *((tag, value, 1) for tag, value in parts),
        "end",
    ]


def test_without_the_package_it_is_one_line_and_nothing_is_made(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    config = RunConfig(script=__file__)
    with pytest.raises(BadInput, match=r"pip install 'holdfast\[tensorboard\]'"):
        supervise(config, tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()
