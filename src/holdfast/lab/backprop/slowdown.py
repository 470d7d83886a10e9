"""Measure the slowdown of a mini-batch by a failure and its recovery, and the time of a restart.

Workers run one after another here, with and without a failure alike, so the ratios compare only computing times.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.payload import flatten, unflatten
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import WorkerLost
from holdfast.lab.backprop.claims import MeasuredTimes
from holdfast.lab.backprop.panels import WORKERS, TrainingTask
from holdfast.lab.backprop.performance_model import Prices, checkpoint_restart, rollback_slowdown
from holdfast.lab.backprop.scenarios import BASELINE, INTERRUPTED, FailureCase
from holdfast.lab.backprop.simulated_workers import Share, compute_gradients, train_minibatch
from holdfast.lab.backprop.training import State, Training, default_device
from holdfast.lab.experiment import Progress

REPLAYED = 10  # mini-batches replayed after a restart, to test the performance model
START_WITHIN = 300.0  # seconds for a fresh process to reach its device


def measure_times(task: TrainingTask, rounds: int, scratch: Path, progress: Progress) -> MeasuredTimes:
    """Measure `rounds` times, in random order, how much each failure slows down a mini-batch; also the restart time."""
    torch.set_num_threads(1)  # where cores are shared, threads that wait for each other would be measured
    training = Training(task, 0, default_device())
    shares = training.shares(0)
    for cell in (BASELINE, *INTERRUPTED[:3]):  # the first mini-batches allocate memory and choose kernels
        _cell_seconds(training, shares, cell)
    taken = []
    for number in range(rounds):
        baseline, seconds = [_cell_seconds(training, shares, BASELINE)], dict[FailureCase, float]()
        for place in np.random.default_rng(number).permutation(len(INTERRUPTED)):
            seconds[INTERRUPTED[place]] = _cell_seconds(training, shares, INTERRUPTED[place])
            baseline.append(_cell_seconds(training, shares, BASELINE))
        taken.append(seconds | {BASELINE: float(np.median(baseline))})
        progress(1)
    slowdown = {cell: np.array([seconds[cell] / seconds[BASELINE] for seconds in taken]) for cell in INTERRUPTED}
    whole = float(np.median([seconds[BASELINE] for seconds in taken]))
    measured = MeasuredTimes(slowdown, *_predictions(training, shares, whole, scratch))
    if training.device.type == "cuda":
        torch.cuda.empty_cache()  # the processes that run trials need the memory
    return measured


def _cell_seconds(training: Training, shares: Sequence[Share], cell: FailureCase) -> float:
    failure = cell.interruption(list(range(WORKERS)))
    model, optimizer = training.model, training.optimizer
    return _seconds(training.device, lambda: train_minibatch(model, optimizer, shares, cross_entropy, failure))


def _predictions(
    training: Training, shares: Sequence[Share], whole: float, scratch: Path
) -> tuple[Prices, dict[float, float], tuple[float, float]]:
    """Return measured prices, predicted slowdowns by point of failure, and predicted and measured restart seconds."""
    device, model = training.device, training.model
    forward = _median(device, lambda: compute_gradients(model, shares, cross_entropy, ()))  # copies buffers too
    gradients = _median(device, lambda: compute_gradients(model, shares, cross_entropy))
    parts = {"forward": forward, "backward": max(gradients - forward, 0.0), "update": max(whole - gradients, 0.0)}
    points = sorted({cell.point for cell in INTERRUPTED if cell.point is not None})
    predicted = {point: rollback_slowdown(point=point, **parts) for point in points}
    prices, measured = _prices(training, shares[0], scratch)
    modelled = checkpoint_restart(prices, since=REPLAYED)
    return prices, predicted, (modelled.replay + prices.load, measured)


def _prices(training: Training, share: Share, scratch: Path) -> tuple[Prices, float]:
    """Return the measured prices of this training, and the seconds to load a snapshot and train `REPLAYED` batches."""
    device = training.device

    def train_one() -> None:
        train_minibatch(training.model, training.optimizer, [share], cross_entropy)

    def save_state() -> None:
        flat = flatten({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()})
        tensors = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in flat.tensors.items()
        }
        snapshot.save(store, 0, tensors, flat.extra)

    def replay(batches: int) -> None:
        loaded = snapshot.load(store, 0)
        state = unflatten(loaded.tensors, {"state": loaded.extra["state"]})
        training.restore(State(state["model"], state["optimizer"]))
        for _ in range(batches):
            train_one()

    with TemporaryDirectory(dir=scratch) as folder:
        store = DirectoryStore(folder)
        save = _seconds(device, save_state)
        load = _median(device, lambda: replay(0), 3)
        step = _median(device, train_one, 7)
        measured = _median(device, lambda: replay(REPLAYED), 3)
    init = _start_seconds(device) + _seconds(device, lambda: training.task.build().to(device))
    return Prices(minibatch=step, save=save, init=init, load=load), measured


def _start_seconds(device: torch.device) -> float:
    began = perf_counter()
    code = f"import torch; torch.ones(1, device={str(device)!r}).add(1).cpu()"
    try:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=START_WITHIN, capture_output=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise WorkerLost(f"a fresh process did not reach {device} ({error}): check that torch works there.") from error
    return perf_counter() - began


def _median(device: torch.device, action: Callable[[], object], times: int = 5) -> float:
    return float(np.median([_seconds(device, action) for _ in range(times)]))


def _seconds(device: torch.device, action: Callable[[], object]) -> float:
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    began = perf_counter()
    action()
    if is_cuda:
        torch.cuda.synchronize(device)
    return perf_counter() - began
