"""How long a mini-batch takes when it fails and is recovered, against one that does not fail; and what a restart takes.

Workers that would run beside each other run one after the other here, so a mini-batch takes as many times longer, with
and without a failure alike, and nothing is sent between them: ratios are those of computing. In goes a subject; out come
ratios of times, and seconds.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from holdfast.blocks.division import Floats
from holdfast.checkpoint import snapshot
from holdfast.checkpoint.state_tree import flatten, unflatten
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import WorkerLost
from holdfast.lab.backprop.panels import WORKERS, TrainingTask
from holdfast.lab.backprop.performance_model import Prices, checkpoint_restart, rollback_slowdown
from holdfast.lab.backprop.scenarios import BASELINE, INTERRUPTED, Cell
from holdfast.lab.backprop.simulated_workers import Share, compute_gradients, train_minibatch
from holdfast.lab.backprop.training import State, Training, device
from holdfast.lab.experiment import Progress

REPLAYED = 10  # mini-batches that are replayed after a restart, to compare the performance model with
START_WITHIN = 300.0  # seconds for a fresh process to reach its device


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredTimes:
    """What was measured: the slowdown of each cell in every round, the prices, and how well the model predicts."""

    slowdown: dict[Cell, Floats]
    prices: Prices
    predicted: dict[float, float]  # the slowdown of `replay` by its point, from the performance model
    replayed: tuple[float, float]  # seconds to restore and replay some mini-batches: predicted, measured


def measure_times(subject: TrainingTask, rounds: int, scratch: Path, progress: Progress) -> MeasuredTimes:
    """Measure on a model that has just started; in every round all cells among as many mini-batches that do not fail."""
    torch.set_num_threads(1)  # where cores are shared, threads that wait for each other are what would be measured
    training = Training(subject, 0, device())
    shares = training.shares(0)
    for cell in (BASELINE, *INTERRUPTED[:3]):  # memory and kernels are found in the first ones
        _took(training, shares, cell)
    found = [_round(training, shares, number, progress) for number in range(rounds)]
    slowdown = {cell: np.array([taken[cell] / taken[BASELINE] for taken in found]) for cell in INTERRUPTED}
    whole = float(np.median([taken[BASELINE] for taken in found]))
    measured = MeasuredTimes(slowdown, *_modelled(training, shares, whole, scratch))
    if training.on.type == "cuda":
        torch.cuda.empty_cache()  # the processes that run trials need the memory
    return measured


def _round(training: Training, shares: Sequence[Share], number: int, progress: Progress) -> dict[Cell, float]:
    """Seconds of every cell, in an order of the round's own; Baseline is the median of those before, between and after."""
    baseline, taken = [_took(training, shares, BASELINE)], {}
    for each in np.random.default_rng(number).permutation(len(INTERRUPTED)):
        taken[INTERRUPTED[each]] = _took(training, shares, INTERRUPTED[each])
        baseline.append(_took(training, shares, BASELINE))
    progress(1)
    return taken | {BASELINE: float(np.median(baseline))}


def _took(training: Training, shares: Sequence[Share], cell: Cell) -> float:
    """Seconds of one mini-batch."""
    failure = cell.interruption(list(range(WORKERS)))
    model, optimizer = training.model, training.optimizer
    return _seconds(training.on, lambda: train_minibatch(model, optimizer, shares, cross_entropy, failure))


def _modelled(
    training: Training, shares: Sequence[Share], whole: float, scratch: Path
) -> tuple[Prices, dict[float, float], tuple[float, float]]:
    """The prices, and what the performance model makes of them."""
    on, model = training.on, training.model
    forward = _median(
        on, lambda: compute_gradients(model, shares, cross_entropy, ())
    )  # with the copies of buffers beside it
    gradients = _median(on, lambda: compute_gradients(model, shares, cross_entropy))
    parts = {
        "forward": forward,
        "backward": max(gradients - forward, 0.0),
        "update": max(whole - gradients, 0.0),
    }
    points = sorted({cell.point for cell in INTERRUPTED if cell.point is not None})
    predicted = {point: rollback_slowdown(point=point, **parts) for point in points}
    prices, measured = _prices(training, shares[0], scratch)
    modelled = checkpoint_restart(prices, since=REPLAYED)
    return prices, predicted, (modelled.replay + prices.load, measured)


def _prices(training: Training, share: Share, scratch: Path) -> tuple[Prices, float]:
    """What a worker's mini-batch, a save, a start and a load take; and a load with mini-batches after it."""
    on = training.on

    def one() -> None:
        train_minibatch(training.model, training.optimizer, [share], cross_entropy)

    with TemporaryDirectory(dir=scratch) as folder:
        store = DirectoryStore(folder)
        save = _seconds(on, lambda: _save(store, training))
        load = _median(on, lambda: _load(store, training), 3)

        def replay() -> None:
            _load(store, training)
            for _ in range(REPLAYED):
                one()

        step = _median(on, one, 7)
        measured = _median(on, replay, 3)
    init = _start(on) + _seconds(on, lambda: training.subject.build().to(on))
    return Prices(minibatch=step, save=save, init=init, load=load), measured


def _save(store: DirectoryStore, training: Training) -> None:
    flat = flatten({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()})
    tensors = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in flat.tensors.items()}
    snapshot.save(store, 0, tensors, flat.extra)


def _load(store: DirectoryStore, training: Training) -> None:
    found = snapshot.load(store, 0)
    state = unflatten(found.tensors, {"state": found.extra["state"]})
    training.go_back(State(state["model"], state["optimizer"]))


def _start(on: torch.device) -> float:
    """Seconds until a fresh process has PyTorch and its device."""
    began = perf_counter()
    code = f"import torch; torch.ones(1, device={str(on)!r}).add(1).cpu()"
    try:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=START_WITHIN, capture_output=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise WorkerLost(f"a fresh process did not reach {on} ({error}): see whether torch works there") from error
    return perf_counter() - began


def _median(on: torch.device, what: Callable[[], object], times: int = 5) -> float:
    return float(np.median([_seconds(on, what) for _ in range(times)]))


def _seconds(on: torch.device, what: Callable[[], object]) -> float:
    """How long it takes, until the device is done too."""
    _wait(on)
    began = perf_counter()
    what()
    _wait(on)
    return perf_counter() - began


def _wait(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)
