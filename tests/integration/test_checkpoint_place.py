"""Nodes with folders of their own share a place for checkpoints, and any of them can prove the whole run."""

import json
import re
import shutil
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from holdfast import cli
from holdfast.checkpoint import manifest
from holdfast.checkpoint.store import DirectoryStore
from holdfast.supervise import checkpoint_place
from holdfast.supervise.checkpoint_place import Checkpoints
from holdfast.supervise.nodes.connection import is_listening
from supervisor_process import SUPPORT, Start, Supervisor, alive, wait_until

LOOP = SUPPORT / "training_script.py"
TASK = {"epochs": 4}


@pytest.fixture
def holdfast(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """The command in this process: its exit status, and what it printed."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out + err

    return run


@pytest.fixture
def nodes(start: Start) -> Any:
    """Start two nodes, each with a folder of its own."""

    def run(
        task: dict[str, Any] = TASK, *, each: tuple[dict[str, Any], ...] = ({}, {}), **config: Any
    ) -> list[Supervisor]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        return [
            start(
                task,
                out=f"node-{rank}",
                script=LOOP,
                nodes={"nnodes": 2, "node_rank": rank, "rendezvous": endpoint},
                **{"workers": 1, "save_every": 5, **config, **each[rank]},
            )
            for rank in (0, 1)
        ]

    return run


def killed(step: int, rank: int) -> dict[str, Any]:
    return {"step": step, "kind": "kill", "targets": [rank]}


def completed(jobs: list[Supervisor], attempts: int) -> None:
    for job in jobs:
        assert job.result() == job.result() | {"verdict": "completed", "attempts": attempts}, job.stderr


def test_a_run_on_nodes_with_folders_of_their_own_survives_and_is_proved_from_each_of_them(  # type: ignore[no-untyped-def]
    nodes, tmp_path: Path, holdfast
) -> None:
    shared = tmp_path / "shared"
    # After the kill there is one worker a node: rank 1 moves from the first node to the second.
    jobs = nodes(workers=2, workers_after=[1], failures=[killed(12, 3)], checkpoints=str(shared))
    completed(jobs, attempts=2)
    assert manifest.steps(DirectoryStore(shared))[-1] == 24
    outs = [job.out for job in jobs]
    assert not (outs[0] / "checkpoints").exists()
    assert all((out / "history" / "rank-1.jsonl").exists() for out in outs)
    before = {path: path.read_bytes() for out in outs for path in (out / "history").iterdir()}
    costs = []
    for out in outs:
        code, said = holdfast("audit", out)
        assert (code, said.splitlines()[-1]) == (0, "audit: pass"), said
        costs.append(json.loads(holdfast("cost", out, "--json")[1])[str(out)])
    assert costs[0] == costs[1]
    assert costs[0]["steps"]["committed"] == 24
    shutil.rmtree(shared)
    code, said = holdfast("audit", outs[0], "--node-folder", outs[1])
    assert (code, said.splitlines()[-1]) == (0, "audit: pass"), said
    code, said = holdfast("audit", outs[0])
    assert code == 2
    assert "cannot fetch the histories of other nodes" in said
    assert before == {path: path.read_bytes() for out in outs for path in (out / "history").iterdir()}


def test_nodes_train_through_an_object_store_and_the_second_proves_it(  # type: ignore[no-untyped-def]
    nodes, holdfast, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"s3://holdfast/{uuid.uuid4().hex}"
    reach = {
        "AWS_ENDPOINT_URL": s3["endpoint_url"],
        "AWS_ACCESS_KEY_ID": s3["key"],
        "AWS_SECRET_ACCESS_KEY": s3["secret"],
    }
    jobs = nodes({"epochs": 1}, checkpoints=place, environment=reach)
    completed(jobs, attempts=1)
    for name, value in reach.items():
        monkeypatch.setenv(name, value)
    code, said = holdfast("audit", jobs[1].out)
    assert (code, said.splitlines()[-1]) == (0, "audit: pass"), said


def test_the_client_of_an_object_store_is_imported_before_a_process_is_forked_to_ask_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Asked:
        def __init__(self, *what: object) -> None:
            done.append("asked")

        def result(self, within: float) -> int:
            return 7

    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda kind: done.append(f"imported {kind}"))
    monkeypatch.setattr(checkpoint_place, "ChildCall", Asked)
    assert Checkpoints(tmp_path, "s3://bucket/run").newest() == 7
    assert done == ["imported s3", "asked"]


def test_a_run_goes_on_on_a_machine_that_never_saw_it(start: Start, tmp_path: Path, holdfast) -> None:  # type: ignore[no-untyped-def]
    config: dict[str, Any] = {"script": LOOP, "workers": 1, "save_every": 5, "checkpoints": str(tmp_path / "shared")}
    lost = start(TASK, **config, failures=[killed(7, 0)], max_restarts=0)
    assert lost.result()["verdict"] == "gave-up", lost.stderr
    wait_until(lambda: not alive(lost.pid), "the supervisor to be gone")
    shutil.rmtree(lost.out)
    new = start(TASK, out="new", **config)
    completed([new], attempts=2)
    code, said = holdfast("audit", new.out)
    assert (code, said.splitlines()[-1]) == (0, "audit: pass"), said


@pytest.mark.parametrize("given", [True, False])
def test_nodes_that_do_not_see_the_same_place_all_refuse_and_say_what_to_do(  # type: ignore[no-untyped-def]
    nodes, tmp_path: Path, given: bool
) -> None:
    each = tuple({"checkpoints": str(tmp_path / f"local-{rank}")} for rank in (0, 1)) if given else ({}, {})
    jobs = nodes(each=each)
    refused = {job.result().get("refused", job.stderr) for job in jobs}
    assert len(refused) == 1
    (line,) = refused
    # On one machine either of them may be first to listen where they meet, and is then the one that writes.
    assert re.match(r"node [01] cannot use the checkpoints: a file that another node wrote to", line)
    assert "--checkpoints" in line
    assert len(line.splitlines()) == 1
    for rank, job in enumerate(jobs):
        assert not list((job.out / "history").glob("rank-*"))  # no worker was started
        store = DirectoryStore(tmp_path / f"local-{rank}" if given else job.out / "checkpoints")
        assert store.names() == []


def test_no_node_waits_for_one_that_cannot_reach_the_checkpoints(nodes, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("in the way")
    jobs = nodes(each=({"checkpoints": str(tmp_path / "shared")}, {"checkpoints": str(tmp_path / "file" / "here")}))
    for job in jobs:
        assert job.result().get("refused", "").startswith("node 1 cannot use the checkpoints: cannot"), job.stderr


def test_a_place_that_cannot_be_written_is_refused_and_nothing_is_started(holdfast, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("in the way")
    for place, why in (
        (tmp_path / "file" / "here", "file"),
        ("ftq://somewhere/run", "ftq"),
        ("memory://run", "memory"),
        ("", "is empty"),
    ):
        code, said = holdfast("run", "--out", tmp_path / "out", "--checkpoints", place, LOOP)
        assert (code, len(said.splitlines())) == (2, 1), said
        assert why in said
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["s3://bucket/run", "gs://bucket/run", "file:///tmp/run"])
def test_a_url_as_the_folder_of_a_run_is_refused(holdfast, tmp_path: Path, monkeypatch, out: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    code, said = holdfast("run", "--out", out, LOOP)
    assert (code, len(said.splitlines())) == (2, 1)
    assert "--checkpoints" in said
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_snapshots_elsewhere_does_not_begin_anew_in_silence(start: Start, tmp_path: Path) -> None:
    first = start(TASK, script=LOOP, workers=1, checkpoints=str(tmp_path / "one"))
    assert first.result()["verdict"] == "completed", first.stderr
    for place in (str(tmp_path / "two"), None):
        again = start(TASK, script=LOOP, workers=1, checkpoints=place)
        assert f"give --checkpoints {tmp_path / 'one'}" in again.result()["refused"]
    (tmp_path / "two").rmdir()
    (tmp_path / "one").rename(tmp_path / "two")
    moved = start(TASK, script=LOOP, workers=1, checkpoints=str(tmp_path / "two"))
    assert moved.result()["verdict"] == "completed", moved.stderr


def test_histories_of_different_runs_are_not_taken_for_one(holdfast, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"script": "train.py", "seed": seed}))
    code, said = holdfast("audit", tmp_path / "a", "--node-folder", tmp_path / "b")
    assert code == 2
    assert "different runs" in said


def test_a_node_that_waits_on_an_empty_disk_hears_of_the_end_by_the_checkpoints(
    nodes: Any, start: Start, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    completed(nodes({"epochs": 1}, checkpoints=str(shared)), attempts=1)
    (shared / "histories").rename(tmp_path / "on-their-way")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = probe.getsockname()
    task = {"nnodes": 2, "node_rank": 1, "rendezvous": f"{where[0]}:{where[1]}", "lost_after": 4.0}
    how: dict[str, Any] = {"script": LOOP, "workers": 1, "save_every": 5, "checkpoints": str(shared)}
    back = start({"epochs": 1}, out="empty", nodes=task, **how)
    wait_until(lambda: is_listening(f"{where[0]}:{where[1]}"), "the node to wait for the other one")
    (tmp_path / "on-their-way").rename(shared / "histories")
    assert back.result()["verdict"] == "completed", back.stderr
    assert back.result()["because"] == "this run is done, all workers have finished: nothing was started"
