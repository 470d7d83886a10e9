"""Failures as plain data, computed before a run begins, so that a schedule can be printed, stored and replayed."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A planned failure: its step, its kind, the point within the step, and its targets (blocks, nodes or ranks)."""

    step: int
    kind: str = "lose"
    point: str = "boundary"
    targets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.step < 0:
            raise BadInput(f"A failure at step {self.step} can never happen: steps count from 0.")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Failure":
        unknown = set(data) - set(cls.__dataclass_fields__)
        if unknown or "step" not in data:
            raise BadInput(f"{data!r} is not a failure: its fields are step, kind, point and targets.")
        return cls(**{**data, "targets": tuple(data.get("targets", ()))})


Schedule = tuple[Failure, ...]
ENDING = ("exit", "kill", "hang")  # kinds that end a process


def at(steps: Iterable[int], *, kind: str = "lose", point: str = "boundary", targets: tuple[int, ...] = ()) -> Schedule:
    """Return one failure for each of `steps`, sorted by step, all with the same kind, point and targets."""
    return tuple(Failure(step=step, kind=kind, point=point, targets=targets) for step in sorted(steps))


def geometric_steps(mean: float, end: int, count: int, seed: int | Sequence[int]) -> Ids:
    """Return `count` random steps from a geometric distribution with `mean`; a step >= `end` is drawn again."""
    if mean < 1 or end < 2:
        raise BadInput(f"No failure fits: the mean is {mean} (at least 1) and the end is step {end} (at least 2).")
    rng = np.random.default_rng(seed)
    steps: list[int] = []
    while len(steps) < count:
        if (step := int(rng.geometric(1 / mean))) < end:
            steps.append(step)
    return np.array(steps, dtype=np.int64)


def lost_blocks(count: int, fraction: float, rng: np.random.Generator) -> Ids:
    """Return the sorted numbers of a random `fraction` of `count` blocks, at least one."""
    if not 0 < fraction <= 1:
        raise BadInput(f"The lost fraction must be greater than 0 and at most 1 (got {fraction}).")
    return np.sort(rng.choice(count, size=max(1, round(fraction * count)), replace=False))
