"""A node is lost with its supervisor, also the one at which the others meet: those that are left go on by themselves."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import cli
from holdfast.supervise.nodes.connection import is_listening, split_address
from networks import Networks, joined_networks
from supervisor_process import SUPPORT, Start, Supervisor, alive, descendants, wait_until

LOOP = SUPPORT / "training_script.py"
LOST_AFTER = 4.0


class Job:
    """Several nodes with one worker each, all in one folder, whose last step waits."""

    def __init__(
        self, start: Start, folder: Path, of: int, spaces: list[str | None], host: str, lost_after: float
    ) -> None:
        self._start, self._gate, self._of, self._spaces = start, folder / "gate", of, spaces
        self._lost_after = lost_after
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._endpoint = f"{host}:{probe.getsockname()[1]}"
        self.nodes = [self.start(0)]  # first: of several on one machine whoever comes first keeps the store
        wait_until(self.is_open, "the first node to listen")
        self.nodes += [self.start(rank) for rank in range(1, of)]

    def start(self, rank: int) -> Supervisor:
        return self._start(
            {"epochs": 4, "gate": str(self._gate)},
            script=LOOP,
            nodes={
                "nnodes": self._of,
                "node_rank": rank,
                "rendezvous": self._endpoint,
                "lost_after": self._lost_after,
                "min_nodes": 1,
            },
            namespace=self._spaces[rank],
            workers=1,
            save_every=5,
        )

    def lose(self, rank: int) -> None:
        """Kill a supervisor, and with it its worker."""
        os.kill(self.nodes[rank].pid, signal.SIGKILL)
        wait_until(lambda: not alive(self.nodes[rank].pid), "the supervisor to be gone")

    def open_gate(self) -> None:
        self._gate.touch()

    def await_world(self, attempt: int, size: int) -> None:
        """Wait until so many workers train in this attempt what comes after the last snapshot but one."""

        def trains() -> bool:
            steps = [each.what for each in self.nodes[0].events("step", "rank-0")]
            return any((each.attempt, each.world) == (attempt, size) and each.step >= 20 for each in steps)

        try:
            wait_until(trains, f"attempt {attempt} with {size} workers")
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *(node.stderr for node in self.nodes)])) from None

    def is_open(self) -> bool:
        if (namespace := self._spaces[0]) is None:
            return is_listening(self._endpoint)
        inside = ["ip", "netns", "exec", namespace]
        probe = f"import socket; socket.create_connection({split_address(self._endpoint)!r}, 1.0)"
        return not subprocess.run([*inside, sys.executable, "-c", probe], check=False, capture_output=True).returncode


@pytest.fixture
def job(start: Start, tmp_path: Path) -> Any:
    def run(
        of: int, spaces: list[str] | None = None, host: str = "127.0.0.1", *, lost_after: float = LOST_AFTER
    ) -> Job:
        return Job(start, tmp_path, of, list(spaces) if spaces else [None] * of, host, lost_after)

    return run


def completed(job: Job, jobs: list[Supervisor], attempts: int) -> None:
    job.open_gate()
    for each in jobs:
        assert each.result() == each.result() | {"verdict": "completed", "attempts": attempts}, each.stderr


def audited(out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["holdfast", "audit", str(out)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, capfd.readouterr().out


@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_go_on_without_a_lost_node_and_let_it_in_when_it_comes_back(
    job: Any, lost: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = job(2)
    run.await_world(1, 2)
    run.lose(lost)
    run.await_world(2, 1)
    left = run.nodes[1 - lost]
    assert f"node {1 - lost} of 2 continues without node {lost}" in left.stderr
    assert ("the nodes now meet at node 1" in left.stderr) == (lost == 0)
    assert "frame #" not in left.stderr  # of the C++ code in torch
    back = run.start(lost)
    run.await_world(3, 2)
    detects = [each.what for each in left.events("detect", f"supervisor-{1 - lost}")]
    assert (detects[-1].kind, detects[-1].message) == ("return", f"node {lost} came back")
    completed(run, [left, back], attempts=3)
    audited(left.out, monkeypatch, capfd)


def test_when_the_node_at_which_they_meet_is_lost_the_lowest_of_the_others_takes_its_place(
    job: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = job(3)
    run.await_world(1, 3)
    run.lose(0)
    run.await_world(2, 2)
    run.lose(1)
    run.await_world(3, 1)
    completed(run, [run.nodes[2]], attempts=3)
    audited(run.nodes[2].out, monkeypatch, capfd)


def test_the_node_at_which_they_meet_is_given_up_while_it_is_suspended(job: Any) -> None:
    run = job(2)
    run.await_world(1, 2)
    suspended = [run.nodes[0].pid, *descendants(run.nodes[0].pid)]
    for pid in suspended:
        os.kill(pid, signal.SIGSTOP)
    run.await_world(2, 1)
    assert "node 1 of 2 continues without node 0" in run.nodes[1].stderr
    os.kill(run.nodes[0].pid, signal.SIGKILL)
    completed(run, [run.nodes[1]], attempts=2)


def test_the_node_at_which_they_meet_may_come_back_before_it_counts_as_lost(job: Any) -> None:
    run = job(2, lost_after=60.0)
    run.await_world(1, 2)
    run.lose(0)
    back = run.start(0)
    run.await_world(2, 2)
    completed(run, [back, run.nodes[1]], attempts=2)
    assert "without" not in run.nodes[1].stderr


def test_a_node_that_waits_while_the_others_come_to_the_end_ends_as_if_it_had_come_after_it(job: Any) -> None:
    run = job(2)
    completed(run, run.nodes, attempts=1)
    history = run.nodes[0].out / "history"
    files = [*history.glob("rank-*.jsonl"), history / "supervisor-0.jsonl"]
    told = {file: file.read_bytes() for file in files}
    for file, text in told.items():
        ends = (b'{"event": "done"', b'{"event": "verdict"')
        file.write_bytes(b"".join(line for line in text.splitlines(keepends=True) if not line.startswith(ends)))
    back = run.start(1)
    wait_until(run.is_open, "the node to wait for the other one")
    for file, text in told.items():
        file.write_bytes(text)
    assert back.result()["verdict"] == "completed", back.stderr
    assert back.result()["because"].startswith("this run is done, trained to its end, step 24: nothing was started")
    assert [len(back.events(kind, "supervisor-1")) for kind in ("launch", "verdict")] == [1, 1]  # of the run itself


def test_of_two_parts_that_do_not_reach_each_other_one_goes_on_and_the_other_comes_back_to_it(
    job: Any,
    networks: Networks,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = job(2, networks.names, networks.host)
    run.await_world(1, 2)
    networks.pull_out()
    run.await_world(2, 1)
    assert sum(" without node" in node.stderr for node in run.nodes) == 1
    networks.plug_in()
    run.await_world(3, 2)
    completed(run, run.nodes, attempts=3)
    assert sum(" without node" in node.stderr for node in run.nodes) == 1
    audited(run.nodes[0].out, monkeypatch, capfd)


@pytest.fixture
def networks() -> Iterator[Networks]:
    with joined_networks(8) as networks:
        if isinstance(networks, str):
            pytest.skip(networks)
        yield networks
