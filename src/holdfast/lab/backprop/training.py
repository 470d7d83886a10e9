"""One training of a subject: mini-batches in an order that follows from a seed, states to go back to, and accuracy.

In go a subject, a seed and a device; out come states and accuracies.
"""

import copy
from collections.abc import Iterator
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

EVALUATED = 4  # workers' shares at once when accuracy is taken: no more memory than a step of several workers has


def device() -> torch.device:
    """Where to train: on the first GPU if there is one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A model and its optimizer at one moment; no later step changes it."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]

    @property
    def digest(self) -> str:
        """A digest of all its values: equal for equal states."""
        found = xxhash.xxh3_128()
        for name, value in self.model.items():
            found.update(name.encode())
            found.update(value.contiguous().cpu().numpy().tobytes())
        return str(found.hexdigest())


class Training:
    """A subject in training, with all that is random drawn from a seed."""

    def __init__(self, subject: TrainingTask, seed: int, on: torch.device) -> None:
        torch.manual_seed(seed)
        self.subject, self.on, self.seed = subject, on, seed
        self.model = subject.build().to(on)
        self.optimizer = subject.optimizer(self.model)
        self._train = tuple(part.to(on) for part in subject.train)
        self._test = tuple(part.to(on) for part in subject.test)
        epochs = max(subject.phases) + 3
        self.geometry = SamplePlan(samples=len(subject.train[1]), batch=subject.batch, epochs=epochs, seed=seed)

    @property
    def epoch(self) -> int:
        """Mini-batches in an epoch."""
        return self.geometry.steps_per_epoch

    def shares(self, number: int) -> list[Share]:
        """The mini-batch of this number as its workers have it."""
        at = self.geometry.position(number)
        ids = [self.geometry.share(at, rank, WORKERS) for rank in range(WORKERS)]
        return [Share(*self._samples(each), self._key(number, rank)) for rank, each in enumerate(ids)]

    def step(self, number: int) -> None:
        """Train the mini-batch of this number; nothing fails."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        for share in self._parts(number):
            with seeded(share.key, self.on):
                mean = cross_entropy(self.model(share.x), share.y)
                (mean * (len(share.y) / self.subject.batch)).backward()
        self.optimizer.step()

    def steps(self, first: int, end: int) -> None:
        """Train these mini-batches."""
        for number in range(first, end):
            self.step(number)

    def accuracy(self) -> float:
        """The fraction of test samples whose class is found."""
        x, y = self._test
        some = EVALUATED * self.subject.share
        self.model.eval()
        with torch.inference_mode():
            right = [
                (self.model(each).argmax(1) == label).sum()
                for each, label in zip(x.split(some), y.split(some), strict=True)
            ]
        self.model.train()
        return float(torch.stack(right).sum()) / len(y)

    def state(self) -> State:
        """A copy of the model and the optimizer as they are now."""
        return State(copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict()))

    def go_back(self, state: State) -> None:
        """Put the model and the optimizer back to this state."""
        self.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(copy.deepcopy(state.optimizer))  # it keeps the tensors that it is given

    def _parts(self, number: int) -> Iterator[Share]:
        if not self.subject.whole:
            yield from self.shares(number)
            return
        window = self.geometry.window(self.geometry.position(number))
        yield Share(*self._samples(window), self._key(number, WORKERS))

    def _samples(self, ids: Any) -> tuple[Tensor, Tensor]:
        x, y = self._train
        chosen = torch.from_numpy(ids).to(self.on)
        return x[chosen], y[chosen]

    def _key(self, number: int, rank: int) -> int:
        return int(np.random.SeedSequence((self.seed, number, rank)).generate_state(1, np.uint32)[0])
