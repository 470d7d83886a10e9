"""What breaks, where and when: failures as plain data, computed from a seed before the run begins.

A schedule can be printed, stored, compared and replayed. Nothing here kills anything: the simulator, the DDP run and
the parameter server read the same schedule and each applies it in its own way.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure: at `step`, of `kind`, at a `point` of that step, hitting `targets` (blocks, nodes or ranks).

    `kind` and `point` are open words, because each way to train brings its own; `lose` at a `boundary` is the loss of
    blocks between two steps, which every way to train understands. A point may carry a number, as in `backward=0.5`.
    """

    step: int
    kind: str = "lose"
    point: str = "boundary"
    targets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.step < 0:
            raise BadInput(f"a failure at step {self.step} can never happen: steps count from 0")

    def to_json(self) -> dict[str, Any]:
        """The failure as JSON values."""
        return {**asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Failure":
        """The inverse of `to_json`."""
        unknown = set(data) - set(cls.__dataclass_fields__)
        if unknown or "step" not in data:
            raise BadInput(f"not a failure: {data!r}; its fields are step, kind, point, targets")
        return cls(**{**data, "targets": tuple(data.get("targets", ()))})


Schedule = tuple[Failure, ...]
ENDING = ("exit", "kill", "hang")  # kinds that end a process, by itself or by its supervisor


def at(steps: Iterable[int], *, kind: str = "lose", point: str = "boundary", targets: tuple[int, ...] = ()) -> Schedule:
    """Failures at exactly these steps, in order."""
    return tuple(Failure(step=step, kind=kind, point=point, targets=targets) for step in sorted(steps))


def geometric_steps(mean: float, end: int, count: int, seed: int | Sequence[int]) -> Ids:
    """`count` steps in 1..end-1, each from a geometric distribution of this mean, redrawn when at or past the end."""
    if mean < 1 or end < 2:
        raise BadInput(f"no failure fits: a geometric step of mean {mean} (at least 1) before step {end} (at least 2)")
    rng = np.random.default_rng(seed)
    return np.array([_redrawn(mean, end, rng) for _ in range(count)], dtype=np.int64)


def poisson(mean_gap: float, end: int, seed: int, *, kind: str = "lose", point: str = "boundary") -> Schedule:
    """Failures with independent exponential gaps of this mean, counted in steps, until the end."""
    if mean_gap <= 0:
        raise BadInput(f"a mean gap of {mean_gap} steps between failures is not positive")
    return at(_arrivals(mean_gap, end, np.random.default_rng(seed)), kind=kind, point=point)


def lost_blocks(count: int, fraction: float, rng: np.random.Generator) -> Ids:
    """The given fraction of `count` blocks, chosen uniformly at random, in rising order; at least one is lost."""
    if not 0 < fraction <= 1:
        raise BadInput(f"a lost fraction of {fraction} is outside (0, 1]")
    return np.sort(rng.choice(count, size=max(1, round(fraction * count)), replace=False))


def _redrawn(mean: float, end: int, rng: np.random.Generator) -> int:
    while (step := int(rng.geometric(1 / mean))) >= end:
        pass
    return step


def _arrivals(mean_gap: float, end: int, rng: np.random.Generator) -> Iterator[int]:
    moment = rng.exponential(mean_gap)
    while moment < end:
        yield int(moment)
        moment += rng.exponential(mean_gap)
