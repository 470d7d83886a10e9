"""Tests and CPU benchmarks run on any processor: one without bf16 instructions, one that rounds in another way."""

import importlib.util
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.train.attach import attach
from holdfast.workloads.mlr import mlr
from repository import ROOT
from training_script import Task, train

BENCHMARKS = ROOT / "benchmarks"
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


class WithoutBf16(TorchDispatchMode):
    """A CPU whose bf16 products fall back to a slow path: torch warns on ARM, from compiled code that x86 lacks."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in PRODUCTS and args[0].dtype == torch.bfloat16 and args[0].device.type == "cpu":
            warnings.warn("mkldnn_matmul failed, switching to BLAS gemm", stacklevel=2)
        return func(*args, **(kwargs or {}))


def benchmark(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """The script of a benchmark, as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS / name)
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCHMARKS / name / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_product_in_bf16_is_noticed() -> None:
    with WithoutBf16(), pytest.warns(UserWarning, match="switching to BLAS"), torch.autocast("cpu", torch.bfloat16):
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))


def test_training_with_a_gradient_scaler_needs_no_bf16() -> None:
    run = attach()
    try:
        with WithoutBf16():
            train(run, Task(epochs=1, scaler=True))
    finally:
        run.close()


def test_the_checkpoint_benchmark_needs_no_bf16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benchmark(monkeypatch, "checkpoint")
    monkeypatch.setitem(bench.SIZES, "cpu", (2, 8, 4))
    with WithoutBf16():
        bench.Training("cpu").step()


def test_both_sides_of_the_trials_benchmark_count_the_same_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benchmark(monkeypatch, "trials")
    workload = mlr("digits")
    exact = replace(workload, data=replace(workload.data, x=workload.data.x.astype(np.float64)))
    trials = list(bench.draw_trials(2, len(workload.blocks)))
    with threadpool_limits(1):  # products this small only wait for more threads
        together = bench.batched(workload, trials)
        alone = [bench.naive(workload, trial) for trial in trials]
        elsewhere = [bench.naive(exact, trial) for trial in trials]
    assert bench.agree(alone, together)
    assert bench.agree(elsewhere, together)  # as on a processor that rounds in another way
    assert not bench.agree([count + 1 for count in alone], together)


@pytest.mark.parametrize("named", [True, False])
def test_ci_says_on_which_processor_it_runs(tmp_path: Path, named: bool) -> None:
    scripts = {
        "make": "exit 0",
        "chromium": "exit 0",
        "lscpu": "echo 'Model name:   Neoverse-N1'" if named else "exit 1",
    }
    for name, does in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        [ROOT / ".ci/run"], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True, timeout=60
    )
    (said,) = ran.stdout.splitlines()
    name = "Neoverse-N1" if named else "unnamed processor"
    assert said.startswith(f"CI runs on: {name}, {platform.machine()}, {os.cpu_count()} cores, Python ")
    assert said.endswith(f", torch {version('torch')}")
