"""One training of a task, which can return to earlier states, and measured slowdowns of its mini-batches by failures.

Workers run one after another here, with and without a failure alike, so the ratios compare only computing times.
"""

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn.functional import cross_entropy

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.payload import flatten, unflatten
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import WorkerLost
from holdfast.lab.backprop.claims import MeasuredTimes
from holdfast.lab.backprop.panels import WORKERS, TrainingTask
from holdfast.lab.backprop.performance_model import Prices, checkpoint_restart, rollback_slowdown
from holdfast.lab.backprop.scenarios import BASELINE, INTERRUPTED, FailureCase
from holdfast.lab.backprop.simulated_workers import Share, compute_gradients, seeded, train_minibatch
from holdfast.lab.experiment import Progress
from holdfast.sampler.plan import SamplePlan

EVALUATED = 4  # workers' shares at once when accuracy is measured: no more memory than a step of several workers needs
REPLAYED = 10  # mini-batches replayed after a restart, to test the performance model
START_WITHIN = 300.0  # seconds for a fresh process to reach its device


def default_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A copy of a model's and its optimizer's state, which later training does not change."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]

    @property
    def digest(self) -> str:
        """A hash of the model's tensors, to recognize equal states."""
        digest = xxhash.xxh3_128()
        for name, value in self.model.items():
            digest.update(name.encode())
            digest.update(value.contiguous().cpu().numpy().tobytes())
        return str(digest.hexdigest())


class Training:
    """The model, optimizer and data of a task, trained one mini-batch at a time by simulated workers."""

    def __init__(self, task: TrainingTask, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.task, self.device, self.seed = task, device, seed
        self.model = task.build().to(device)
        self.optimizer = task.optimizer(self.model)
        self._train = tuple(part.to(device) for part in task.train)
        self._test = tuple(part.to(device) for part in task.test)
        epochs = max(task.phases) + 3
        self.plan = SamplePlan(samples=len(task.train[1]), batch=task.batch, epochs=epochs, seed=seed)

    @property
    def epoch(self) -> int:
        return self.plan.steps_per_epoch

    def shares(self, number: int) -> list[Share]:
        position = self.plan.position(number)
        ids = [self.plan.share(position, rank, WORKERS) for rank in range(WORKERS)]
        return [Share(*self._samples(share), self._key(number, rank)) for rank, share in enumerate(ids)]

    def step(self, number: int) -> None:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        if self.task.whole:
            window = self.plan.window(self.plan.position(number))
            shares = [Share(*self._samples(window), self._key(number, WORKERS))]
        else:
            shares = self.shares(number)
        for share in shares:
            with seeded(share.key, self.device):
                mean = cross_entropy(self.model(share.x), share.y)
                (mean * (len(share.y) / self.task.batch)).backward()
        self.optimizer.step()

    def accuracy(self) -> float:
        x, y = self._test
        size = EVALUATED * self.task.share
        self.model.eval()
        with torch.inference_mode():
            parts = zip(x.split(size), y.split(size), strict=True)
            right = [(self.model(images).argmax(1) == labels).sum() for images, labels in parts]
        self.model.train()
        return float(torch.stack(right).sum()) / len(y)

    def state(self) -> State:
        return State(copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict()))

    def restore(self, state: State) -> None:
        self.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(copy.deepcopy(state.optimizer))  # the optimizer keeps the tensors it is given

    def _samples(self, ids: Any) -> tuple[Tensor, Tensor]:
        x, y = self._train
        chosen = torch.from_numpy(ids).to(self.device)
        return x[chosen], y[chosen]

    def _key(self, number: int, rank: int) -> int:
        return int(np.random.SeedSequence((self.seed, number, rank)).generate_state(1, np.uint32)[0])


def measure_times(task: TrainingTask, rounds: int, scratch: Path, progress: Progress) -> MeasuredTimes:
    """Measure `rounds` times how much each kind of failure slows down a mini-batch, and how long a restart takes.

    Snapshots are saved to a temporary folder below `scratch`."""
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
    training: Training, shares: Sequence[Share], batch_time: float, scratch: Path
) -> tuple[Prices, dict[float, float], tuple[float, float]]:
    """Return measured durations, predicted slowdowns by point of failure, and predicted and measured restart seconds."""
    device, model = training.device, training.model
    forward = _median(device, lambda: compute_gradients(model, shares, cross_entropy, ()))  # copies buffers too
    gradients = _median(device, lambda: compute_gradients(model, shares, cross_entropy))
    parts = {"forward": forward, "backward": max(gradients - forward, 0.0), "update": max(batch_time - gradients, 0.0)}
    points = sorted({cell.point for cell in INTERRUPTED if cell.point is not None})
    predicted = {point: rollback_slowdown(point=point, **parts) for point in points}
    prices, measured = _prices(training, shares[0], scratch)
    modelled = checkpoint_restart(prices, since=REPLAYED)
    return prices, predicted, (modelled.replay + prices.load, measured)


def _prices(training: Training, share: Share, scratch: Path) -> tuple[Prices, float]:
    """Measure the seconds of single operations, and the time to load a snapshot and train `REPLAYED` mini-batches."""
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
