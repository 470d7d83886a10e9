"""One training of a task: mini-batches in a seeded order, copies of the state to return to, and test accuracy."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn.functional import cross_entropy

from holdfast.lab.backprop.panels import WORKERS, TrainingTask
from holdfast.lab.backprop.simulated_workers import Share, seeded
from holdfast.sampler.plan import SamplePlan

EVALUATED = 4  # workers' shares at once when accuracy is measured: no more memory than a step of several workers needs


def default_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A copy of the states of a model and its optimizer, which later steps do not change."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]

    @property
    def digest(self) -> str:
        """A digest of the model's values, which identify the state: the optimizer has taken the same steps."""
        digest = xxhash.xxh3_128()
        for name, value in self.model.items():
            digest.update(name.encode())
            digest.update(value.contiguous().cpu().numpy().tobytes())
        return str(digest.hexdigest())


class Training:
    """A model in training on a task; `seed` determines all random numbers."""

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
        """Return the samples of mini-batch `number`, divided among the workers."""
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
