"""oneMKL chooses its kernels while one thread calls them: before workers are forked, and before a script trains."""

import subprocess
import sys

import pytest
import torch

from holdfast.ddp import kernels

BEFORE_WORKERS = "from holdfast.supervise.warm import warm; warm()"
BEFORE_TRAINING = "import holdfast; holdfast.attach().close()"
CHOSEN = "from holdfast.ddp import kernels; print(kernels.settle.cache_info().currsize)"


@pytest.mark.parametrize("beginning", [BEFORE_WORKERS, BEFORE_TRAINING])
def test_they_are_chosen_before_anything_is_trained(beginning: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"{beginning}; {CHOSEN}"], capture_output=True, text=True, timeout=120)
    assert done.stdout == "1\n", done.stderr


def test_no_thread_is_started_for_it() -> None:
    count = "import os, torch; n = len(os.listdir('/proc/self/task')); "
    then = "from holdfast.ddp import kernels; kernels.settle(); print(len(os.listdir('/proc/self/task')) - n)"
    done = subprocess.run([sys.executable, "-c", count + then], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0\n", done.stderr


def test_what_optimizers_and_losses_use_is_among_them() -> None:
    used = {"sqrt", "rsqrt", "exp", "log", "log1p", "expm1", "erf", "tanh", "sigmoid"}
    assert used <= set(kernels.FUNCTIONS)
    assert all(callable(getattr(torch, name)) for name in kernels.FUNCTIONS)
