"""Ray starts and ends with the run, or does not and that is said; a signal that comes while it starts is heeded once it can be."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.audit.verdicts import audit_run, worst
from holdfast.errors import WorkerLost
from holdfast.server.cluster import LocalRay, cluster
from server_processes import DEADLINE, until


def group(number: int) -> dict[str, int]:
    """The processes of a session that still run, by name."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, fields = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            if int(fields.split()[3]) == number and fields.split()[0] != "Z":
                found[name] = int(entry.name)
    return found


def until_begun(run: subprocess.Popen[bytes], true: Callable[[], bool], what: str) -> None:
    """Wait until something is true of a run, and show what the run wrote if it ends before."""
    until(lambda: true() or run.poll() is not None, what)
    assert run.poll() is None, run.communicate()[1].decode()


def test_a_failed_start_of_ray_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        raise RuntimeError("Timed out while waiting for GCS to become available.\nand much more")

    monkeypatch.setenv("RAY_TMPDIR", "/spare")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", refused)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray._private.worker._global_node", None)  # other tests may have a Ray here
    with (
        pytest.raises(
            WorkerLost,
            match=r"^Ray did not start: Timed out while waiting for GCS to become available\. If the machine is busy, repeat the "
            r"same command, with the same --out\. Ray's logs in /spare/ray/session_latest/logs may say why\.$",
        ),
        cluster(),
    ):
        pass


def test_asked_to_end_while_ray_starts_it_ends_in_order_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "serve", "train", "--workload", "mlr-digits", "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True) as run:
        until_begun(run, lambda: any(name.startswith("gcs_server") for name in group(run.pid)), "Ray starts")
        os.kill(run.pid, signal.SIGTERM)
        _, said = run.communicate(timeout=DEADLINE)
    assert run.returncode == 130, said.decode()
    assert said.decode().strip().endswith("interrupted")
    until(lambda: not group(run.pid), "nothing of it is left")


def test_a_run_whose_raylet_is_killed_says_so_keeps_its_history_and_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "serve", "train", "--workload", "mlr-digits", "--out", "run"]
    command += ["--nodes", "1", "--workers", "1"]
    history = tmp_path / "run" / "history" / "controller.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True) as run:
        until_begun(run, lambda: history.exists() and '"iterate"' in history.read_text(), "the first iteration is done")
        killed = group(run.pid)["raylet"]
        os.kill(killed, signal.SIGKILL)
        _, said = run.communicate(timeout=DEADLINE)

    assert run.returncode == 2, said.decode()
    started, line = said.decode().splitlines()
    assert started == "training on 1 node and 1 worker"
    assert line.startswith(f"holdfast: Ray's process raylet (pid {killed}) was ended by SIGKILL after ")
    assert f"history is kept in {history.parent}, and its checkpoints in {tmp_path / 'run' / 'checkpoints'}" in line
    assert line.endswith("Start the run again with another --out.")
    until(lambda: not group(run.pid), "nothing of it is left")
    assert worst(audit_run(tmp_path / "run")) != "fail"


def test_rays_logs_may_end_but_not_the_process_that_finds_actors() -> None:
    with subprocess.Popen(["false"]) as ended:
        ended.wait(DEADLINE)

    def ray_with(name: str) -> LocalRay:
        processes = {name: [SimpleNamespace(process=ended)]}
        node = SimpleNamespace(all_processes=processes, get_logs_dir_path=lambda: "logs")
        worker = SimpleNamespace(_global_node=node)
        return LocalRay(SimpleNamespace(_private=SimpleNamespace(worker=worker)))  # type: ignore[arg-type]

    assert ray_with("log_monitor").ended() is None
    assert ray_with("gcs_server").ended() == f"Ray's process gcs_server (pid {ended.pid}) ended with status 1"
