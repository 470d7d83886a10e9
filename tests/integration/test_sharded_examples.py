"""Sharded examples: PyTorch's own with at most ten changed lines, ours with eight; killed, they end with the same bits."""

import difflib
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from finished_run import different, events, failed_checks
from repository import EXAMPLES, lines
from supervisor_process import Start, StartCommand

FOLDER = EXAMPLES / "pytorch_fsdp2"
CHANGED, NEW = 10, 8
SMALL = ("--explicit-prefetching", "--layers", 2, "--batch-size", 2, "--steps", 8)
SAVED = ("model_state_dict.pt", "optim_state_dict.pt")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def saved(folder: Path) -> dict[str, bytes]:
    """Return the values of all tensors in the checkpoint that the script itself wrote at its end."""
    (checkpoint,) = (folder / "checkpoints" / "dtensor_api").iterdir()
    files = [ZipFile(checkpoint / name) for name in SAVED]
    return {name: file.read(name) for file in files for name in file.namelist() if "/data/" in name}


def test_at_most_ten_lines_of_pytorchs_example_are_added_or_removed() -> None:
    plain, ours = ((FOLDER / name).read_text().splitlines() for name in ("example_plain.py", "example.py"))
    changed = [line for line in difflib.ndiff(plain, ours) if line.startswith(("+ ", "- ")) and line[2:].strip()]
    assert 0 < len(changed) <= CHANGED, changed


def test_pytorchs_example_trains_under_torchrun(tmp_path: Path) -> None:
    command = [*TORCHRUN, FOLDER / "example_plain.py", *SMALL]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert saved(tmp_path)


def test_pytorchs_example_killed_in_forward_and_backward_ends_with_the_bits_of_a_run_that_never_failed(
    start_command: StartCommand, tmp_path: Path
) -> None:
    kills = ("--inject", "kill@4:forward=0.5,rank=1", "--inject", "kill@6:backward=0.5")
    ran = {}
    for name, injected in (("reference", ()), ("killed", kills)):
        (tmp_path / name).mkdir()
        options = ("--workers", 2, "--save-every", 3, "--out", tmp_path / name / "run", *injected)
        ran[name] = start_command("run", *options, FOLDER / "example.py", "--", *SMALL, cwd=tmp_path / name)
    for command in ran.values():
        assert command.wait() == 0, command.stderr
    assert len(events(tmp_path / "killed" / "run", "restart", "supervisor")) == 2
    assert failed_checks(tmp_path / "killed" / "run") == []
    assert saved(tmp_path / "killed") == saved(tmp_path / "reference")


def test_our_example_has_at_most_eight_new_lines() -> None:
    ours, plain = lines("fsdp2"), lines("fsdp2_plain")
    new = [line for line in ours if line not in plain]
    assert 0 < len(new) <= NEW, new


def test_our_example_killed_in_forward_and_backward_ends_with_the_bits_of_a_run_that_never_failed(start: Start) -> None:
    points = ((7, "forward=0.5", 1), (11, "backward=0.5", 0))
    failures = [{"step": step, "kind": "kill", "targets": [rank], "point": point} for step, point, rank in points]
    how = {"script": EXAMPLES / "fsdp2.py", "args": ["--words", "40", "--batch", "16"], "workers": 2, "save_every": 4}
    reference, job = start(out="reference", **how), start(failures=failures, **how)
    for each in (reference, job):
        assert each.result().get("verdict") == "completed", each.stderr
    assert len(events(job.out, "restart", "supervisor")) == len(failures)
    assert failed_checks(job.out) == []
    assert different(reference.out, job.out) == []
