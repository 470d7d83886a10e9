"""oneMKL chooses its kernels while one thread calls them: before workers are forked, and before a script trains."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.train import attach
from supervisor_process import Start

CHOSEN = "from holdfast.train import attach as kernels; print('chosen:', kernels.warm_up_math.cache_info().currsize, flush=True)\n"
ALONE = """
import os, torch
import holdfast
from holdfast.train import attach as kernels
before = len(os.listdir("/proc/self/task"))
kernels.warm_up_math()
print(len(os.listdir("/proc/self/task")) - before)
kernels.warm_up_math.cache_clear()
holdfast.attach().close()
print(kernels.warm_up_math.cache_info().currsize)
"""


def test_they_are_chosen_before_workers_are_forked(start: Start, tmp_path: Path) -> None:
    (tmp_path / "chosen.py").write_text(CHOSEN)
    job = start(script=tmp_path / "chosen.py", workers=1)
    assert job.result()["verdict"] == "completed", job.stderr
    assert "chosen: 1" in job.stdout


@pytest.fixture(scope="module")
def alone() -> tuple[int, int]:
    """Of a process of its own: the threads that choosing them starts, and how often attaching chooses them."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    threads, times = map(int, done.stdout.split())
    return threads, times


@pytest.mark.slow
def test_they_are_chosen_before_a_script_trains(alone: tuple[int, int]) -> None:
    assert alone[1] == 1


@pytest.mark.slow
def test_no_thread_is_started_for_it(alone: tuple[int, int]) -> None:
    assert alone[0] == 0


def test_what_optimizers_and_losses_use_is_among_them() -> None:
    used = {"sqrt", "rsqrt", "exp", "log", "log1p", "expm1", "erf", "tanh", "sigmoid"}
    assert used <= set(attach.FUNCTIONS)
    assert all(callable(getattr(torch, name)) for name in attach.FUNCTIONS)
