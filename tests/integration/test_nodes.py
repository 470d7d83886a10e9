"""Two supervisors, each with an address and a folder of its own, train as one job and fail, restart and end together."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.supervise.nodes.rendezvous import Node, RoundInfo
from listening_ports import free_port, listening
from networks import Networks, joined_networks
from supervisor_process import Start, StartCommand, Supervisor, wait_until


@pytest.fixture
def both(request: pytest.FixtureRequest, start: Start) -> Any:
    """Start the two nodes of a job in two networks of their own, or, where there are none, on loopback addresses.

    With the parameter "loopback" there in any case; with "namespaces" in networks or not at all.
    """
    wanted = getattr(request, "param", "")
    networks = None if wanted == "loopback" else request.getfixturevalue("namespaces")
    if wanted == "namespaces" and isinstance(networks, str):
        pytest.skip(networks)
    spaces, host = (networks.names, networks.host) if isinstance(networks, Networks) else ([None, None], "127.0.0.2")
    endpoint = f"{host}:{free_port('127.0.0.2')}"

    def run(task: dict[str, Any], **config: Any) -> list[Supervisor]:
        return [
            start(
                task,
                nodes={"nnodes": 2, "node_rank": rank, "rendezvous": endpoint},
                workers=2,
                namespace=spaces[rank],
                **config,
            )
            for rank in (0, 1)
        ]

    return run


@pytest.fixture(scope="module")
def namespaces() -> Iterator[Networks | str]:
    """Two networks, or the reason why this machine has none."""
    with joined_networks(7) as networks:
        yield networks


@pytest.mark.parametrize("both", ["loopback", "namespaces"], indirect=True)
def test_two_nodes_train_as_one_job_and_survive_the_loss_of_a_worker(both: Any) -> None:
    first, second = both({"faults": [{"attempt": 1, "rank": 3, "step": 6, "do": "kill"}]})
    for job in (first, second):
        assert job.result() == job.result() | {"verdict": "completed", "attempts": 2}, job.stderr
    detects = [event for who in ("supervisor-0", "supervisor-1") for event in first.events("detect", who)]
    assert [event.what.rank for event in detects if event.what.kind == "signal"] == [3]
    attempts = [first.notes("attempt", rank) for rank in range(4)]
    for at in (0, 1):
        assert len({each[at]["round"] for each in attempts}) == 1  # agreed on by all
        assert {each[at]["world"] for each in attempts} == {4}
        assert {each[at]["first"] for each in attempts} == {4 * at}
    assert attempts[0][0]["round"] != attempts[0][1]["round"]


def test_a_worker_that_is_stuck_is_blamed_by_its_own_node_and_those_that_wait_for_it_by_none(both: Any) -> None:
    first, second = both({"faults": [{"attempt": 1, "rank": 2, "step": 6, "do": "deadlock"}]}, hang_timeout=3.0)
    for job in (first, second):
        assert job.result() == job.result() | {"verdict": "completed", "attempts": 2}, job.stderr
    detects = [event.what for who in ("supervisor-0", "supervisor-1") for event in first.events("detect", who)]
    assert [detect.rank for detect in detects if detect.kind == "hang"] == [2], detects


def test_what_one_node_finds_ends_the_run_on_all(both: Any) -> None:
    first, second = both({"faults": [{"attempt": each, "rank": 2, "step": 2, "do": "raise"} for each in (1, 2)]})
    because = [job.result()["because"] for job in (first, second)]
    assert [job.result()["verdict"] for job in (first, second)] == ["script-error"] * 2, first.stderr + second.stderr
    assert because[0] == because[1]
    assert because[0].startswith("rank 2 raised Mistake")
    assert (first.stderr + second.stderr).count("Traceback") == 1


def test_one_node_that_is_asked_to_stop_stops_both(both: Any) -> None:
    first, second = both({"steps": 100_000, "pause": 0.01, "save_every": 50_000})
    wait_until(lambda: len(first.notes("step")) > 2, "a few steps")
    second.signal(signal.SIGTERM)
    assert [job.result()["verdict"] for job in (first, second)] == ["preempted"] * 2, first.stderr + second.stderr


@pytest.mark.parametrize("host", ["127.0.0.2", "[::1]"])
def test_the_nodes_listen_on_the_address_that_was_given_and_on_no_other(start: Start, host: str) -> None:
    address = host.strip("[]")
    try:
        port = free_port(address)
    except OSError as error:
        pytest.skip(f"this machine has no {address}: {error}")
    task = {"steps": 100_000, "pause": 0.01, "save_every": 50_000}
    nodes = {"nnodes": 2, "rendezvous": f"{host}:{port}"}
    jobs = [start(task, nodes={**nodes, "node_rank": rank}, workers=1) for rank in (0, 1)]
    wait_until(lambda: len(jobs[0].notes("step")) > 0, f"a step; it said {jobs[0].stderr}")
    sockets = set.union(*(listening(job.pid) for job in jobs))
    assert (address, port) in sockets
    assert {where for where, _ in sockets} <= {address, "127.0.0.1"}
    jobs[0].signal(signal.SIGTERM)
    assert [job.result()["verdict"] for job in jobs] == ["preempted"] * 2, jobs[0].stderr + jobs[1].stderr


def test_nodes_that_do_not_belong_together_are_refused(start: Start) -> None:
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    same = [start({}, out=f"same-{i}", nodes={"nnodes": 2, "rendezvous": endpoint}) for i in (0, 1)]
    for job in same:
        assert "have the numbers 0, 0" in job.result()["refused"], job.stderr
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    other = [
        start({"steps": rank}, out=f"other-{rank}", nodes={"nnodes": 2, "node_rank": rank, "rendezvous": endpoint})
        for rank in (0, 1)
    ]
    for job in other:
        assert "differ in the script's argument" in job.result()["refused"], job.stderr
    corrected = [
        start({"steps": 2}, out=f"other-{rank}", nodes={"nnodes": 2, "node_rank": rank, "rendezvous": endpoint})
        for rank in (0, 1)
    ]
    for job in corrected:  # they may use the folders of the refused command, and are refused for another reason
        assert "--out is not shared by the nodes" in job.result()["refused"], job.stderr


def test_the_verdict_is_the_last_thing_that_the_nodes_print(start_command: StartCommand, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    nodes = ["--nnodes", "2", "--rendezvous", f"127.0.0.1:{free_port('127.0.0.1')}", "--out", "out"]
    how: dict[str, Any] = {"cwd": tmp_path, "together": True}
    both = [start_command("run", *nodes, "--node-rank", rank, "script.py", **how) for rank in (0, 1)]
    assert [each.wait() for each in both] == [0, 0], [each.stdout for each in both]
    for text in (each.stdout for each in both):
        assert text.splitlines()[-3].startswith("completed after 1 attempt"), text
        assert text.splitlines()[-2] == "audit: not run; when all nodes have ended: holdfast audit out", text
        assert text.splitlines()[-1] == "run: out", text


def test_a_meeting_tells_who_goes_on_without_whom_and_where_they_meet_now() -> None:
    all_of_them = RoundInfo(attempt=1, round="a", address="", nodes=(0, 1, 2))
    some = RoundInfo(attempt=2, round="b", address="", nodes=(1,), host=1)
    assert all_of_them.news(None, 3) == []
    assert some.news(all_of_them, 3) == ["node 1 of 3 continues without nodes 0, 2", "the nodes now meet at node 1"]
    assert some.news(some, 3) == ["node 1 of 3 continues without nodes 0, 2"]


def test_too_few_nodes_came_or_too_few_are_left() -> None:
    node = Node(rank=1, of=4, endpoint="node0:29400", least=2)
    advice = "the same command continues, or start with a smaller --nnodes, such as --nnodes 1"
    assert node.too_few(have_met=False) == f"fewer than 4 nodes came to node0:29400 in time; {advice}"
    assert node.too_few(have_met=True).startswith("fewer than 2 of 4 nodes are left (--min-nodes)")
