"""Nothing around the training ends it: signals to all, locks of the dead, closed outputs, full disks, idle threads."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.history.log import read_history
from holdfast.runs import lock
from holdfast.runs.config import RunConfig
from holdfast.supervise.workers.entry import WorkerOutput
from supervisor_process import SUPPORT, TRAINEE, Start, alive, descendants, wait_until

LOADING = """
import sys, time, torch
from holdfast.train.attach import attach
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.tensor([float(index)]), torch.tensor([1.0])
run = attach()
model = run.replicate(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
run.protect(model=model, optimizer=optimizer)
for x, y in run.batches(Data(), global_batch=8, num_epochs=10_000, num_workers=1):
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""


INTERRUPTED = """
import signal, time
from holdfast import process as preemption
flag = type(preemption.requested)()
signal.signal(signal.SIGALRM, lambda *_: flag.set())
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
until = time.monotonic() + 0.5
while time.monotonic() < until:
    flag.set()
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_request_to_stop_takes_no_lock_that_the_thread_it_interrupts_may_hold() -> None:
    subprocess.run([sys.executable, "-c", INTERRUPTED], check=True, timeout=120)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_when_all_processes_are_asked_to_stop_at_once_the_run_saves_and_stops_in_order(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "loading.py").write_text(LOADING)
    job = start(script=tmp_path / "loading.py", workers=2, save_every=100_000)
    wait_until(lambda: len(job.events("step", "rank-0")) > 3, f"a few steps; it said\n{job.stderr}")
    processes = [job.pid, *descendants(job.pid)]
    assert len(processes) == 5  # supervisor, workers, and what loads for each
    for pid in processes:
        with suppress(ProcessLookupError):  # those that come first may have ended the others
            os.kill(pid, number)
    assert job.result()["verdict"] == "preempted", job.stderr
    (stopped,) = job.events("preempted", "rank-0")
    assert stopped.what.step == job.events("commit", "rank-0")[-1].what.step > 3
    wait_until(lambda: not any(map(alive, processes[1:])), "all to end")


def test_a_killed_supervisor_leaves_no_process_behind(start: Start, tmp_path: Path) -> None:
    (tmp_path / "loading.py").write_text(LOADING)
    job = start(script=tmp_path / "loading.py", workers=2)
    wait_until(lambda: len(job.events("step", "rank-0")) > 3, "a few steps")
    processes = descendants(job.pid)
    assert len(processes) == 4
    titles = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes}
    assert {"hf-rank-0", "hf-rank-1"} <= titles  # as ps and top show them
    job.signal(signal.SIGKILL)
    wait_until(lambda: not any(map(alive, processes)), "all to die")


ORPHANS = """
import os, time
from pathlib import Path
if (pid := os.fork()) == 0:
    os.setsid()  # it outlives the group it came from
    time.sleep(600)
Path(os.environ["HOLDFAST_OUT"], "orphan").write_text(str(pid))
time.sleep(600 if os.environ["HOLDFAST_ATTEMPT"] == "1" else 0)
"""


def test_an_orphan_of_a_worker_does_not_keep_the_folder_locked(start: Start, tmp_path: Path) -> None:
    (tmp_path / "orphans.py").write_text(ORPHANS)
    orphans: set[int] = set()

    def left() -> bool:
        with suppress(OSError, ValueError):
            orphans.add(int((tmp_path / "out" / "orphan").read_text()))
        return bool(orphans)

    try:
        job = start(script=tmp_path / "orphans.py", workers=1)
        wait_until(left, "the orphan to be born")
        job.signal(signal.SIGKILL)
        again = start(script=tmp_path / "orphans.py", workers=1)
        assert again.result().get("verdict") == "completed", again.result()
        assert all(map(alive, orphans))
        left()
    finally:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)


def test_whoever_attaches_without_a_supervisor_holds_the_folder_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.train.attach import attach

    other = (
        "import sys; from pathlib import Path; from holdfast.runs import lock; lock.FREE_WITHIN = 0.0; "
        "lock.hold(Path(sys.argv[1]))"
    )
    run = attach(tmp_path)
    refused = subprocess.run([sys.executable, "-c", other, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "is in use by another supervisor or training" in refused.stderr
    run.close()
    with lock.hold(tmp_path):
        monkeypatch.setattr(lock, "FREE_WITHIN", 0.0)
        with pytest.raises(BadInput, match="is in use by another supervisor or training: wait for it"):
            attach(tmp_path)
    attach(tmp_path).close()


IDLE = """
import atexit, concurrent.futures, os
pool = concurrent.futures.ThreadPoolExecutor(2)
assert pool.submit(int, "7").result() == 7
atexit.register(lambda: print("the exit handlers ran"))
"""


def test_an_idle_thread_pool_does_not_keep_a_worker_from_ending(start: Start, tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text(IDLE)
    job = start(script=tmp_path / "idle.py", workers=1)
    assert job.result()["verdict"] == "completed", job.stderr
    assert "the exit handlers ran" in job.stdout


def test_a_thread_that_never_ends_does_not_keep_a_run_from_ending(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()\n")
    job = start(script=script, workers=1, hang_timeout=0.7)
    assert job.result() == job.result() | {"verdict": "completed", "attempts": 1}, job.stderr


def test_a_loop_left_one_step_before_its_end_ends_the_worker_and_is_named(start: Start, tmp_path: Path) -> None:
    loop = LOADING.replace("for x, y in", "batches =").replace("workers=1):", "workers=1)").partition("    (model")[0]
    body = "    (model(x) - y).square().mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    (tmp_path / "early.py").write_text(
        loop.replace("10_000", "1") + f"for _ in range(8):\n    x, y = next(batches)\n{body}"
    )
    result = start(script=tmp_path / "early.py", workers=1).result()
    assert result["verdict"] == "script-error", result
    assert "exited with status 0 in the middle of its loop, at step 7" in result["because"]


CONFIGURED = """
import os
from pathlib import Path
from holdfast.runs.config import handed_over
out = Path(os.environ["HOLDFAST_OUT"])
assert handed_over(out).save_every == 7
(out / "run.json").write_text("{")
if os.environ["HOLDFAST_ATTEMPT"] == "1":
    os.kill(os.getpid(), 9)
"""


def test_a_run_goes_on_when_its_run_file_is_damaged(start: Start, tmp_path: Path) -> None:
    (tmp_path / "configured.py").write_text(CONFIGURED)
    job = start(script=tmp_path / "configured.py", workers=1, save_every=7)
    assert job.result() == job.result() | {"verdict": "completed", "attempts": 2}, job.stderr


UNLOGGED = """
import os, shutil
from pathlib import Path
logs = Path(os.environ["HOLDFAST_OUT"], "logs")
if os.environ["HOLDFAST_ATTEMPT"] == "1":
    shutil.rmtree(logs)
    logs.write_text("")
    os.kill(os.getpid(), 9)
print("nobody will read this")
raise ValueError("this is the reason")
"""


def test_where_no_log_can_be_written_the_reason_is_still_known(start: Start, tmp_path: Path) -> None:
    (tmp_path / "unlogged.py").write_text(UNLOGGED)
    result = start(script=tmp_path / "unlogged.py", workers=1).result()
    assert (result["verdict"], result["attempts"]) == ("script-error", 3)
    assert "rank 0 raised ValueError: this is the reason" in result["because"]


def test_what_a_full_disk_does_not_take_of_a_log_is_no_error_of_the_script() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with WorkerOutput(full) as log:
            assert log.write(b"four") == 4
    finally:
        os.close(full)


def test_a_history_that_became_a_directory_does_not_end_the_run(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "directory.py"
    script.write_text(
        "import os, time\nfrom pathlib import Path\n"
        "Path(os.environ['HOLDFAST_OUT'], 'history', 'rank-0.jsonl').mkdir()\nprint('done')\n"
    )
    job = start(script=script, workers=1)
    assert job.result()["verdict"] == "completed", job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize(("thing", "named"), [(os.mkfifo, "a pipe"), (os.mkdir, "a directory")])
@pytest.mark.parametrize("who", ["rank-1", "supervisor"])
def test_what_stands_in_place_of_a_history_is_named_at_once_and_no_worker_is_started(
    start: Start, tmp_path: Path, who: str, thing: Callable[[Path], None], named: str
) -> None:
    (tmp_path / "out" / "history").mkdir(parents=True)
    config = RunConfig(script=str(TRAINEE.resolve()), workers=3)
    (tmp_path / "out" / "run.json").write_text(json.dumps(config.to_json()))
    thing(tmp_path / "out" / "history" / f"{who}.jsonl")
    refused = start().result()["refused"]
    assert f"{who}.jsonl is not a file but {named}: remove it, and start again." in refused
    assert not (tmp_path / "out" / "logs").exists()


def test_an_attempt_to_which_nobody_has_counted_starts_no_worker(start: Start, tmp_path: Path) -> None:
    job = start(script=empty(tmp_path), workers=1)
    assert job.result()["verdict"] == "completed", job.stderr
    history = tmp_path / "out" / "history" / "supervisor.jsonl"
    history.write_text(history.read_text().replace('"attempt": 1,', f'"attempt": {(1 << 63) - 1},'))
    refused = start(script=empty(tmp_path), workers=1).result()["refused"]
    assert "has an attempt 9223372036854775807, which is not possible" in refused


def empty(folder: Path) -> Path:
    """A script that does nothing."""
    script = folder / "empty.py"
    script.write_text("")
    return script


COMMAND = [sys.executable, "-c", "from holdfast.cli import main; main()", "run", "--workers", "1"]


def test_a_command_whose_output_nobody_reads_trains_to_the_end_and_says_so_by_its_status(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = tmp_path / "speaks.py"
    script.write_text("import sys\nfor _ in range(99):\n    print('a line'); sys.stderr.write('another\\n')\n")
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full, os.fdopen(writer, "w") as closed:
        ended = subprocess.run([*COMMAND, "--out", str(out), str(script)], stdout=closed, stderr=full, check=False)
    assert ended.returncode == 0
    verdicts = [event.what for event in read_history(out).events if event.kind == "verdict"]
    assert [verdict.verdict for verdict in verdicts] == ["completed"]
    assert (out / "logs" / "attempt-0001" / "rank-0.out").read_text().count("a line") == 99


def test_a_command_that_is_asked_to_stop_while_it_imports_torch_was_preempted(tmp_path: Path) -> None:
    command = [*COMMAND, "--out", str(tmp_path / "out"), str(TRAINEE), "--", '{"steps": 100000, "pause": 0.01}']
    with subprocess.Popen(command, cwd=SUPPORT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: "libtorch" in maps.read_text(), "torch to be imported")
        process.terminate()
        said, complained = process.communicate(timeout=120)
    assert process.returncode == 75, complained
    assert said.startswith("preempted after")
