"""A supervisor keeps a run going through real failures of real workers, and says how it ended."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import manifest
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput
from holdfast.events import Detect, Restart
from holdfast.runs import lock
from holdfast.runs.config import RunConfig
from holdfast.supervise.supervisor import supervise
from supervisor_process import TRAINEE, Start, Supervisor, alive, wait_until


def fault(do: str | int, *, rank: int = 1, step: int = 6, attempt: int = 1) -> dict[str, Any]:
    return {"attempt": attempt, "rank": rank, "step": step, "do": do}


def steps_of(job: Supervisor, rank: int = 0) -> list[int]:
    return [note["step"] for note in job.notes("step", rank)]


@pytest.mark.parametrize(
    ("do", "kind", "status", "name"),
    [("kill", "signal", -9, "SIGKILL"), ("exit", "exit", 137, None), ("raise", "error", 1, None)],
)
def test_a_worker_that_fails_is_named_and_all_go_on_from_the_newest_snapshot(
    start: Start, do: str, kind: str, status: int, name: str | None
) -> None:
    job = start({"faults": [fault(do)]})
    assert job.result()["verdict"] == "completed", job.stderr
    (detect,) = job.events("detect")
    assert detect.what == Detect(1, 1, 1, kind, detect.what.message, status, name, step=6)
    (restart,) = job.events("restart")
    assert restart.what == Restart(2, 3, newest=4, left=2)
    assert "attempt 2: 3 workers started; 2 of 3 restarts left" in job.stderr
    assert [note["first"] for note in job.notes("attempt")] == [0, 4]
    assert steps_of(job)[-8:] == list(range(4, 12))


def test_a_worker_that_is_stopped_is_found(start: Start) -> None:
    job = start({"faults": [fault("stop", rank=2)]}, hang_timeout=2.5)
    assert job.result()["verdict"] == "completed", job.stderr
    (detect,) = job.events("detect")
    assert (detect.what.kind, detect.what.rank) == ("hang", 2)
    assert "was suspended" in detect.what.message


@pytest.mark.parametrize("workers", [1, 3])
def test_a_deadlocked_worker_is_found_blamed_and_its_stack_kept(start: Start, workers: int) -> None:
    rank = workers // 2
    job = start({"faults": [fault("deadlock", rank=rank)]}, workers=workers, hang_timeout=2.5)
    assert job.result()["verdict"] == "completed", job.stderr
    detect = job.events("detect")[0]  # on a machine that stands still, the next attempt may be found stuck, too
    log = f"logs/attempt-0001/rank-{rank}.err"
    assert (detect.what.kind, detect.what.rank, detect.what.step) == ("hang", rank, 6)
    assert re.search(r"passed no step boundary for \d+ s \(deadline 2.5 s; change it with --hang-timeout\)", job.stderr)
    assert f"the stacks of its threads are in {log}" in detect.what.message
    assert 'torch_only_script.py", line' in (job.out / log).read_text()
    assert "Fatal Python error" not in job.stderr


def test_when_peers_give_up_waiting_first_the_one_they_waited_for_is_blamed(start: Start) -> None:
    job = start({"faults": [fault("deadlock", rank=2)], "patience": 3})
    assert job.result()["verdict"] == "completed", job.stderr
    detect = job.events("detect")[0]  # on a machine that stands still, the next attempt may be found stuck, too
    assert (detect.what.kind, detect.what.rank) == ("hang", 2), detect.what.message
    assert 'torch_only_script.py", line' in (job.out / "logs/attempt-0001/rank-2.err").read_text()


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_before_the_first_snapshot_is_tried_again(start: Start, rank: int) -> None:
    job = start({"faults": [fault("raise", rank=rank, step=2)]})
    assert job.result() == job.result() | {"verdict": "completed", "attempts": 2}, job.stderr
    assert job.stderr.count("Traceback") == 1
    assert re.search(rf"rank {rank} \(pid \d+\) raised", job.stderr), job.stderr
    assert "raise Mistake(" in job.stderr
    assert "runpy" not in job.stderr


@pytest.mark.parametrize(("step", "where"), [(6, "at step 6"), (-1, "before the first step")])
def test_the_same_error_at_the_same_step_again_ends_the_run_and_is_shown_once(
    start: Start, step: int, where: str
) -> None:
    job = start({"faults": [fault("raise", attempt=attempt, step=step) for attempt in (1, 2)]})
    result = job.result()
    assert (result["verdict"], result["attempts"]) == ("script-error", 2)
    assert result["because"].startswith("rank 1 raised Mistake: this line is wrong")
    assert f"it came again {where}" in result["because"]
    assert job.stderr.count("Traceback") == 1


def test_another_error_or_another_step_is_another_try(start: Start) -> None:
    faults = [fault("raise"), fault("raise", attempt=2, step=7), fault("other", attempt=3, step=7)]
    job = start({"faults": faults})
    assert job.result() == job.result() | {"verdict": "completed", "attempts": 4}, job.stderr


def test_an_error_of_the_store_is_the_stores_and_tried_again(start: Start) -> None:
    faults = [fault("storage", rank=0, attempt=attempt, step=-2) for attempt in (1, 2, 3)]
    job = start({"faults": faults}, max_restarts=2)
    result = job.result()
    assert (result["verdict"], result["attempts"]) == ("gave-up", 3)
    assert "cannot read shard-00000-of-00001.safetensors: Input/output error" in result["because"]
    assert [event.what.kind for event in job.events("detect")] == ["storage"] * 3


def test_what_holdfast_refuses_is_not_tried_again(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text("from holdfast.errors import BadInput\nraise BadInput('give a batch of 1 or more')\n")
    result = start(script=script).result()
    assert (result["verdict"], result["attempts"]) == ("refused", 1)
    assert result["because"].endswith(": give a batch of 1 or more")


def test_what_a_script_says_when_it_exits_is_the_reason(start: Start) -> None:
    job = start({"faults": [fault("there is no such data set", attempt=attempt, step=1) for attempt in (1, 2)]})
    result = job.result()
    assert result["verdict"] == "script-error"
    assert "there is no such data set" in result["because"]
    assert "Traceback" not in job.stderr


def test_a_status_that_a_script_exits_with_at_the_same_step_again_ends_the_run_and_another_does_not(
    start: Start,
) -> None:
    job = start(
        {"faults": [fault(status, attempt=i + 1, step=1) for i, status in enumerate((3, 4, 3))]}, max_restarts=9
    )
    result = job.result()
    assert (result["verdict"], result["attempts"]) == ("script-error", 3)
    assert "exited with status 3; it came again at step 1" in result["because"]


def test_it_gives_up_after_so_many_restarts(start: Start) -> None:
    faults = [fault("kill", attempt=attempt, step=2) for attempt in range(1, 9)]
    job = start({"faults": faults}, max_restarts=2)
    result = job.result()
    assert (result["verdict"], result["attempts"]) == ("gave-up", 3)
    assert "rank 1 was killed by SIGKILL" in result["because"]
    assert len(job.events("restart")) == 2


def test_progress_fills_the_restarts_up_again(start: Start) -> None:
    faults = [fault("kill", attempt=attempt, step=4 * attempt + 1) for attempt in (1, 2, 3, 4)]
    job = start({"steps": 20, "faults": faults}, workers=2, max_restarts=1)
    assert job.result() == job.result() | {"verdict": "completed", "attempts": 5}, job.stderr
    assert [event.what.newest for event in job.events("restart")] == [4, 8, 12, 16]
    assert "attempt 5: 2 workers started; 0 of 1 restart left" in job.stderr


def test_a_worker_may_die_before_the_others_have_started(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "stillborn.py"
    script.write_text(
        "import os\n"
        "if os.environ['RANK'] == '0' and int(os.environ['HOLDFAST_ATTEMPT']) < 6:\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    job = start(script=script, workers=4, max_restarts=9)
    assert job.result() == job.result() | {"verdict": "completed", "attempts": 6}, job.stderr
    assert {event.what.kind for event in job.events("detect")} == {"signal"}


def test_after_each_failure_there_may_be_another_number_of_workers(start: Start) -> None:
    faults = [fault("kill", attempt=attempt, rank=0, step=4 * attempt + 1) for attempt in (1, 2, 3)]
    job = start({"steps": 16, "faults": faults}, workers=4, workers_after=[2, 3])
    assert job.result()["verdict"] == "completed", job.stderr
    assert [note["world"] for note in job.notes("attempt")] == [4, 2, 3, 3]
    rounds = [note["round"] for note in job.notes("attempt")]
    assert len(set(rounds)) == 4
    assert [note["round"] for note in job.notes("attempt", rank=1)] == rounds


def test_a_run_that_is_asked_to_stop_by_either_signal_saves_and_the_next_start_goes_on(start: Start) -> None:
    job = start({"steps": 100_000, "pause": 0.01, "save_every": 50_000})
    wait_until(lambda: len(job.notes("step")) > 3, "a few steps")
    job.signal(signal.SIGTERM)
    assert job.result()["verdict"] == "preempted", job.stderr
    assert len(job.events("preempt")) == 1
    done = steps_of(job)[-1] + 1
    again = start({"steps": 100_000, "pause": 0.01, "save_every": 50_000}, workers=2)
    wait_until(lambda: len(again.notes("attempt")) > 1, "the next start")
    assert again.notes("attempt")[1] == again.notes("attempt")[1] | {"first": done, "world": 2, "attempt": 2}
    wait_until(lambda: steps_of(again)[-1] > done + 3, "a few steps more")
    again.signal(signal.SIGINT)
    assert again.result() == again.result() | {"verdict": "preempted", "attempts": 2}
    assert len(again.events("preempt")) == 2
    assert manifest.steps(DirectoryStore(again.out / "checkpoints")) == [done, steps_of(again)[-1] + 1]


def test_a_second_signal_kills(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text("import time\nprint('up', flush=True)\nwhile True: time.sleep(1)\n")
    job = start(script=script)
    wait_until(lambda: job.stdout.count("up") == 3, "the workers")
    job.signal(signal.SIGTERM)
    wait_until(lambda: len(job.events("preempt")) == 1, "the first signal to be heard")
    job.signal(signal.SIGTERM)
    assert job.result()["verdict"] == "preempted"
    assert "second signal" in job.result()["because"]


def test_when_the_supervisor_is_killed_the_workers_die_too(start: Start) -> None:
    job = start({"steps": 100_000, "pause": 0.01})
    wait_until(lambda: all(len(job.notes("step", rank)) > 2 for rank in range(3)), "a few steps")
    workers = [job.notes("attempt", rank)[0]["pid"] for rank in range(3)]
    assert all(map(alive, workers))
    job.signal(signal.SIGKILL)
    wait_until(lambda: not any(map(alive, [job.pid, *workers])), "the workers to die")
    again = start({"steps": 100_000, "pause": 0.01})
    wait_until(lambda: len(again.notes("attempt")) > 1 or again.over, "the next start")
    again.signal(signal.SIGTERM)
    assert again.result().get("verdict") == "preempted", again.result()


def test_what_a_killed_worker_has_started_dies_with_it(start: Start) -> None:
    job = start({"faults": [fault("orphan")]})
    assert job.result()["verdict"] == "completed", job.stderr
    (child,) = job.notes("child", rank=1)
    wait_until(lambda: not alive(child["pid"]), "the child to die")


def test_what_workers_print_is_shown_and_kept(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "speaks.py"
    script.write_text(
        "import os, sys\nprint('to stdout from', os.environ['RANK'])\nsys.stderr.write('to stderr, no newline')\n"
    )
    job = start(script=script, workers=2)
    assert job.result()["verdict"] == "completed"
    assert sorted(job.stdout.splitlines()) == ["to stdout from 0", "to stdout from 1"]
    assert job.stderr.count("to stderr, no newline") == 2
    assert (job.out / "logs" / "attempt-0001" / "rank-1.out").read_text() == "to stdout from 1\n"


FACTS = """
import atexit, json, os, random, signal, sys, threading
import torch, torch.distributed as dist, numpy as np
from torch.nn.parallel import DistributedDataParallel
before = set(sys.modules)
dist.init_process_group("gloo")   # as under torchrun: from the environment
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
torch.nn.functional.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 0])).backward()
optimizer.step()
late = sorted(name for name in set(sys.modules) - before if name.startswith("torch"))
from beside import here
facts = {"argv": sys.argv[1:], "name": __name__, "file": __file__, "here": here, "late": late,
         "threads": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"], "random": np.random.rand(),
         "master": os.environ["MASTER_ADDR"], "initialized": dist.is_initialized(), "pgid": os.getpgid(0) == os.getpid()}
print(json.dumps(facts))
atexit.register(lambda: print(json.dumps({"end": True, "initialized": dist.is_initialized()})))
threading.Thread(target=lambda: (threading.Event().wait(0.2), print(json.dumps({"thread": True})))).start()
"""


def test_a_worker_finds_what_a_fresh_interpreter_under_torchrun_would_give_it(start: Start, tmp_path: Path) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    (tmp_path / "beside.py").write_text("here = True\n")
    job = start(script=tmp_path / "facts.py", workers=2, args=["--flag", "a b"])
    assert job.result()["verdict"] == "completed", job.stderr
    lines = [json.loads(line) for line in job.stdout.splitlines()]
    facts = [line for line in lines if "argv" in line]
    assert len(facts) == 2
    for each in facts:
        assert each == each | {
            "argv": ["--flag", "a b"],
            "name": "__main__",
            "file": str(tmp_path / "facts.py"),
            "here": True,
            "threads": 1,
            "omp": "1",
            "master": "127.0.0.1",
            "pgid": True,
        }
        assert set(each["late"]) <= {"torch.profiler._cupti_monitor"}  # all that matters was imported before the fork
    assert facts[0]["random"] != facts[1]["random"]
    # Threads are waited for, then exit handlers run, and the process group is gone by then.
    assert lines.count({"thread": True}) == 2
    assert lines.count({"end": True, "initialized": False}) == 2


ATTACHED = """
import sys, time, torch
from torch.utils.data import TensorDataset
from holdfast.train.attach import attach
run = attach()
model = run.replicate(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.protect(model=model, optimizer=optimizer)
data = TensorDataset(torch.arange(64.0).reshape(16, 4), torch.arange(16.0))
for batch in run.batches(data, global_batch=8, num_epochs=int(sys.argv[1])):
    x, y = batch
    (model(x / 64).squeeze(1) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(float(sys.argv[2]))
"""


def test_a_run_that_is_attached_recovers_and_stops_when_asked(start: Start, tmp_path: Path) -> None:
    (tmp_path / "attached.py").write_text(ATTACHED)
    failures = [{"step": 7, "kind": "kill", "targets": [1]}]
    common: dict[str, Any] = {"script": tmp_path / "attached.py", "workers": 2, "save_every": 4}
    job = start(args=["10", "0"], failures=failures, **common)
    assert job.result()["verdict"] == "completed", job.stderr
    assert [event.what.restored for event in job.events("recover", "rank-0")] == [None, 4]
    assert [event.what.newest for event in job.events("restart")] == [4]
    assert job.events("done", "rank-0")[0].what.step == 20

    asked = start(args=["10000", "0.01"], out="asked", **common)
    wait_until(lambda: len(asked.events("step", "rank-0")) > 3, "a few steps")
    asked.signal(signal.SIGTERM)
    assert asked.result()["verdict"] == "preempted", asked.stderr


def test_bad_input_is_one_clear_line(start: Start, tmp_path: Path) -> None:
    refused = {
        "there is no script": {"script": tmp_path / "nowhere.py"},
        "--workers must be 1 or more (got 0)": {"workers": 0},
        "there is no recovery 'hope': choose restart": {"recovery": "hope"},
        "there is no writer 'magic': choose overlapped or blocking": {"writer": "magic"},
        "there is no fault 'flood'": {"failures": [{"step": 4, "kind": "flood"}]},
        "2 nodes need --rendezvous host:port": {"nodes": {"nnodes": 2}},
        "--rendezvous must be host:port": {"nodes": {"nnodes": 2, "rendezvous": "elsewhere"}},
        "--node-rank must be between 0 and --nnodes less 1 (got 2 of 2)": {
            "nodes": {"nnodes": 2, "node_rank": 2, "rendezvous": "127.0.0.1:29400"}
        },
        "--min-nodes must be between 1 and 2 (got 3)": {
            "nodes": {"nnodes": 2, "rendezvous": "127.0.0.1:29400", "min_nodes": 3}
        },
        "--lost-after must be greater than 0 (got 0)": {
            "nodes": {"nnodes": 2, "rendezvous": "127.0.0.1:29400", "lost_after": 0}
        },
        "cannot import no_such_module": {"nodes": {"preload": ["no_such_module"]}},
    }
    for line, arguments in refused.items():
        said = start({}, out=line.replace(" ", "-").replace("/", ""), **arguments).result()["refused"]
        assert line in said
        assert "\n" not in said


def test_a_folder_that_holds_another_run_is_refused(start: Start, tmp_path: Path) -> None:
    assert start({"steps": 4}).result()["verdict"] == "completed"
    refused = start({"steps": 5}, seed=1).result()["refused"]
    assert "holds another run" in refused
    assert 'argument 1 was {"steps": 4}, not {"steps": 5}' in refused
    assert "--may-change argument-1" in refused
    assert "seed was not given, not 1" in refused
    assert "script was" not in refused
    assert start({"steps": 4}, save_every=7, workers=2, max_restarts=0).result()["verdict"] == "completed"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    assert "is not empty and holds no run" in start({}, out="photos").result()["refused"]


def test_a_folder_has_one_supervisor_at_a_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"steps": 100_000, "pause": 0.01}
    job = start(task)
    wait_until(lambda: len(job.notes("step")) > 0, "a step")
    monkeypatch.setattr(lock, "FREE_WITHIN", 0.1)
    with pytest.raises(BadInput, match="in use by another supervisor or training"):
        supervise(RunConfig(script=str(TRAINEE), args=(json.dumps(task),), workers=3), job.out)
    job.signal(signal.SIGTERM)
    assert job.result()["verdict"] == "preempted"


def test_a_run_whose_folder_is_moved_ends_and_says_so(start: Start, tmp_path: Path) -> None:
    job = start({"steps": 100_000, "pause": 0.01})
    wait_until(lambda: bool(job.notes("attempt")), "it trains")
    job.out.rename(tmp_path / "moved")
    result = job.result()
    assert result["verdict"] == "gave-up", job.stderr
    assert "was moved or removed while the run trained" in result["because"]
    assert not job.out.exists()
