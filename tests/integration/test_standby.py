"""With `--recovery restart --spares 1`, the workers of the next attempt wait with their models built, and take over."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from finished_run import different, events, failed_checks
from holdfast.errors import BadInput
from holdfast.runs.config import RunConfig
from holdfast.runs.logs import find_logs
from supervisor_process import SUPPORT, Start, Supervisor, alive, descendants, wait_until

LOOP = SUPPORT / "training_script.py"
HOW: dict[str, Any] = {"script": LOOP, "save_every": 5, "workers": 2}


def completed(job: Supervisor) -> Path:
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    return job.out


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def standby_of(job: Supervisor) -> list[int]:
    return [pid for pid in descendants(job.pid) if title(pid).startswith("hf-standby")]


def wait_for_standby(job: Supervisor, times: int = 1) -> None:
    def is_ready() -> bool:
        assert not job.over, job.stderr
        return job.stderr.count("ready to take over") >= times

    wait_until(is_ready, f"a standby, {times} times: {job.stderr}")


def kill_rank_1(job: Supervisor) -> None:
    (pid,) = [pid for pid in descendants(job.pid) if title(pid) == "hf-rank-1"]
    os.kill(pid, signal.SIGKILL)


def test_killed_twice_the_standby_takes_over_with_the_bits_of_a_run_that_never_failed(
    start: Start, tmp_path: Path
) -> None:
    reference = completed(start({}, out="reference", **HOW))
    job = start({"pause": 0.02, "gate": str(tmp_path / "gate")}, spares=1, **HOW)
    wait_for_standby(job)
    waiting = standby_of(job)
    assert len(waiting) == 2
    assert {event.what.attempt for event in events(job.out, "attempt")} == {1}  # nothing of the next attempt yet
    assert {log.attempt for log in find_logs(job.out)} == {1}
    kill_rank_1(job)
    wait_for_standby(job, 2)
    kill_rank_1(job)
    wait_for_standby(job, 3)
    last = standby_of(job)
    (tmp_path / "gate").touch()
    out = completed(job)
    assert job.stderr.count("2 standby workers took over") == 2
    assert {event.what.pid for event in events(out, "attempt") if event.what.attempt == 2} == {*waiting}
    assert not any(map(alive, last))
    assert sorted({log.attempt for log in find_logs(out)}) == [1, 2, 3]
    assert different(reference, out) == []
    assert failed_checks(out) == []


def test_a_standby_that_dies_is_replaced_and_the_run_goes_on(start: Start, tmp_path: Path) -> None:
    job = start({"pause": 0.02, "gate": str(tmp_path / "gate")}, spares=1, **HOW)
    wait_for_standby(job)
    first = standby_of(job)
    assert title(first[0]) == "hf-standby-0"
    os.kill(first[0], signal.SIGKILL)
    wait_for_standby(job, 2)
    assert (
        f"standby workers were lost (rank 0 (pid {first[0]}) was killed by SIGKILL): others are started" in job.stderr
    )
    assert not {*first} & {*standby_of(job)}
    kill_rank_1(job)
    (tmp_path / "gate").touch()
    out = completed(job)
    assert "2 standby workers took over" in job.stderr
    assert len(events(out, "detect", "supervisor")) == 1  # the death of a standby is no failure of the run
    assert failed_checks(out) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_standby_is_left_when_the_supervisor_is_stopped(start: Start, number: signal.Signals) -> None:
    job = start({"pause": 0.02, "epochs": 1000}, spares=1, **HOW)
    wait_for_standby(job)
    processes = descendants(job.pid)
    job.signal(number)
    wait_until(lambda: not any(map(alive, processes)), "all processes to end")
    if number == signal.SIGTERM:
        assert job.result()["verdict"] == "preempted"
        assert sorted({log.attempt for log in find_logs(job.out)}) == [1]
        assert not (job.out / "logs/attempt-0002").exists()
    again = start({"pause": 0.0, "epochs": 1}, out="other", spares=1, **HOW)
    completed(again)


def test_a_standby_has_the_number_of_workers_that_the_next_attempt_has(start: Start, tmp_path: Path) -> None:
    job = start({"pause": 0.02, "gate": str(tmp_path / "gate")}, spares=1, workers_after=[3], **HOW)
    wait_for_standby(job)
    assert len(standby_of(job)) == 3
    kill_rank_1(job)
    (tmp_path / "gate").touch()
    out = completed(job)
    assert "3 standby workers took over" in job.stderr
    assert [event.what.world for event in events(out, "attempt", "rank-0")] == [2, 3]
    assert failed_checks(out) == []


def test_a_standby_that_fails_again_and_again_is_given_up_and_the_run_completes(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "takes_a_port.py"
    script.write_text(
        "import socket, sys\n"
        f"sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from training_script import Task, attach, train\n"
        "run = attach()\n"
        "server = socket.socket(socket.AF_UNIX)\n"
        f"server.bind('\\0holdfast-{os.getpid()}-' + str(run.rank))\n"
        f"train(run, Task(pause=0.02, gate={str(tmp_path / 'gate')!r}))\n"
    )
    job = start(script=script, save_every=5, workers=2, spares=1)
    wait_until(lambda: "goes on without" in job.stderr or job.over, "the standby to be given up")
    (tmp_path / "gate").touch()
    out = completed(job)
    assert "Address already in use" in job.stderr
    assert failed_checks(out) == []


def test_a_restart_has_one_spare_at_most_and_needs_a_single_node() -> None:
    with pytest.raises(BadInput, match="--spares with --recovery restart is 0 or 1"):
        RunConfig(script="train.py", spares=2)
    with pytest.raises(BadInput, match="--spares with --recovery restart needs a single node"):
        RunConfig(script="train.py", spares=1).check_world(2)
