"""Ray starts and ends with the run, or does not and that is said; a signal that comes while it starts is heeded once it can be."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import WorkerLost
from holdfast.server.cluster import cluster
from server_processes import DEADLINE, until


def group(number: int) -> list[str]:
    """The names of the processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, fields = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            if int(fields.split()[3]) == number and fields.split()[0] != "Z":
                found.append(name)
    return found


def test_a_failed_start_of_ray_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        raise RuntimeError("Timed out while waiting for GCS to become available.\nand much more")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", refused)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray._private.worker._global_node", None)  # other tests may have a Ray here
    with (
        pytest.raises(
            WorkerLost,
            match=r"^Ray did not start: Timed out while waiting for GCS to become available\. If the machine is busy, try again; its logs say more$",
        ),
        cluster(),
    ):
        pass


def test_asked_to_end_while_ray_starts_it_ends_in_order_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "serve", "train", "--workload", "mlr-digits", "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True) as run:
        until(lambda: any(name.startswith("gcs_server") for name in group(run.pid)), "Ray starts")
        os.kill(run.pid, signal.SIGTERM)
        _, said = run.communicate(timeout=DEADLINE)
    assert run.returncode == 130, said.decode()
    assert said.decode().strip().endswith("interrupted")
    until(lambda: not group(run.pid), "nothing of it is left")
