"""What an advice is asked: how often something fails, how much is lost at a time, and of how large a job."""

from dataclasses import dataclass
from fractions import Fraction

from holdfast.advice.durations import DAY
from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Seconds, workers and parts of them; None is left to the history, or else to published figures.

    `restart` and `stall` replace what the history tells of a restart and a save: a large job pays other prices.
    """

    mtbf: float | None = None
    mtbf_per_worker: float | None = None
    lost: Fraction | None = None
    workers: int | None = None
    restart: float | None = None
    stall: float | None = None
    length: float = 54 * DAY
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise BadInput(f"--workers {self.workers} is no job: give 1 or more")
        if self.mtbf is not None and self.mtbf_per_worker is not None:
            raise BadInput("--mtbf is of the whole job and --mtbf-per-worker of one worker: give one of them")
