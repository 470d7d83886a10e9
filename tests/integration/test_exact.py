"""Runs of real workers that are killed, stopped and slowed down end as if nothing had happened, and the audit agrees."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from finished_run import different, distance, events, failed_checks
from supervisor_process import SUPPORT, Start, Supervisor, wait_until

LOOP = SUPPORT / "training_script.py"
FREE = {"script": LOOP, "save_every": 5}


def completed(job: Supervisor) -> Path:
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    return job.out


def workers_of(pid: int) -> list[int]:
    """The workers that a supervisor has now, from the moment they are forked."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def kill_at_random(job: Supervisor, workers: int, kills: int, longest: float) -> None:
    """Kill a worker at random, a random time after the workers were forked, again and again."""
    seed = time.time_ns() % 2**32
    print(f"kills of seed {seed}")  # noqa: T201 - shown when the test fails
    draw = random.Random(seed)
    dead: set[int] = set()
    for number in range(kills):
        wait_until(lambda: len(set(workers_of(job.pid)) - dead) == workers, f"workers to kill, {number} times so far")
        time.sleep(draw.uniform(0, longest))
        victims = sorted(set(workers_of(job.pid)) - dead)
        assert len(victims) == workers, f"they did not wait to be killed, {number} times so far: {job.stderr}"
        os.kill(draw.choice(victims), signal.SIGKILL)
        dead.update(victims)


def survives(start: Start, gate: Path, task: dict[str, Any], *, workers: int, kills: int, longest: float) -> None:
    """Whatever is killed and whenever, the bits are those of a run that never failed, and the audit passes."""
    how: dict[str, Any] = {"workers": workers, "script": LOOP, "save_every": 5}
    reference = start(task, out="reference", **how)
    job = start(task | {"gate": str(gate)}, max_restarts=kills, **how)
    kill_at_random(job, workers, kills, longest)
    gate.touch()  # the run waits for it before its end: it cannot be over before the last kill
    out = completed(job)
    assert len(events(out, "restart", "supervisor")) == kills
    assert different(completed(reference), out) == []
    assert failed_checks(out) == []


@pytest.mark.parametrize(("model", "workers"), [("tied", 3), ("backwards", 3), ("normed", 2)])
def test_killed_at_three_random_times_it_ends_with_the_bits_of_a_run_that_never_failed(
    start: Start, tmp_path: Path, model: str, workers: int
) -> None:
    """`benchmarks/soak` strikes hundreds of times, and in more ways."""
    survives(start, tmp_path / "gate", {"model": model, "epochs": 6}, workers=workers, kills=3, longest=1.0)


def test_failures_of_a_schedule_strike_once_and_leave_no_trace(start: Start, start_reference: Start) -> None:
    failures = [
        {"step": 7, "kind": "exit"},
        {"step": 12, "kind": "slow", "targets": [1]},
        {"step": 20, "kind": "bit-flip"},
        {"step": 22, "kind": "hang", "targets": [2]},
        {"step": 23, "kind": "io-error", "point": "manifest"},
        {"step": 33, "kind": "kill", "targets": [1]},
    ]
    reference = start_reference({}, **FREE)
    job = start({}, failures=failures, hang_timeout=4.0, writer="blocking", **FREE)
    out = completed(job)
    detected = [(event.what.kind, event.what.rank) for event in events(out, "detect")]
    assert detected == [("exit", 0), ("hang", 2), ("signal", 1)]
    struck = sorted((event.what.step, event.what.kind) for event in events(out, "failure"))
    assert struck == [(each["step"], each["kind"]) for each in failures]
    restored = [event.what.restored for event in events(out, "recover", "rank-0")]
    assert restored == [None, 5, 15, 30]  # the snapshot of step 20 was bad
    assert different(completed(reference), out) == []
    assert failed_checks(out) == []


def test_with_another_number_of_workers_it_agrees_to_rounding_and_the_audit_passes(start: Start) -> None:
    task = {"dropout": 0.0, "augment": False}
    failures = [{"step": step, "kind": "kill"} for step in (12, 27, 44)]
    reference = start(task, out="reference", workers=3, **FREE)
    job = start(task, workers=3, workers_after=[4, 2, 3], failures=failures, **FREE)
    out = completed(job)
    worlds = [event.what.world for event in events(out, "attempt", "rank-0")]
    assert worlds == [3, 4, 2, 3]
    assert {event.what.rng for event in events(out, "recover")} == {"keyed"}
    assert 0 < distance(completed(reference), out) < 1e-5
    assert failed_checks(out) == []


def test_uneven_shares_weigh_what_they_hold(start: Start) -> None:
    task = {"dropout": 0.0, "augment": False, "epochs": 3, "micro_batches": 2}
    alone, uneven = (start(task, out=f"of-{workers}", workers=workers, **FREE) for workers in (1, 3))
    assert 0 < distance(completed(alone), completed(uneven)) < 1e-5


def test_asked_to_stop_it_saves_and_goes_on_later_with_the_same_bits(start: Start, start_reference: Start) -> None:
    task = {"pause": 0.02}
    reference = start_reference({}, **FREE)
    job = start(task, save_every=1000, script=LOOP)
    wait_until(lambda: len(job.events("step", "rank-0")) > 5, "some steps")
    job.signal(signal.SIGTERM)
    assert job.result()["verdict"] == "preempted", job.stderr
    stops = {event.what.step for event in events(job.out, "preempted")}
    assert len(stops) == 1
    assert len(events(job.out, "preempted")) == 3
    out = completed(start(task, save_every=1000, script=LOOP))
    assert [event.what.restored for event in events(out, "recover", "rank-0")] == [None, *stops]
    assert different(completed(reference), out) == []
    assert failed_checks(out) == []


def test_under_torchrun_the_same_script_works_and_goes_on(tmp_path: Path, start: Start) -> None:
    task: dict[str, Any] = {"epochs": 3}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launcher, str(LOOP), json.dumps(task), str(tmp_path / "torchrun")]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    supervised = completed(start(task, workers=2, **FREE))
    assert different(supervised, tmp_path / "torchrun") == []
    assert failed_checks(tmp_path / "torchrun") == []
