"""What a run's bits depend on beside its state: the data, and the threads that compute. A snapshot says both.

Whoever goes on from it compares: other data is refused before it is trained on, other threads are told of.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from holdfast.errors import BadInput
from holdfast.events import JSON

logger = logging.getLogger(__name__)
CONDITIONS = "conditions"  # in the extra of a snapshot


@dataclass(frozen=True, slots=True)
class Conditions:
    """A digest of a few samples, if there are any to look at, and the threads of a worker."""

    data: str | None
    threads: int

    @classmethod
    def now(cls, data: str | None) -> "Conditions":
        """Those of this process."""
        return cls(data, torch.get_num_threads())

    def to_json(self) -> dict[str, JSON]:
        """As a snapshot has them."""
        return asdict(self)

    def check(self, before: Mapping[str, JSON], *, same_world: bool, tells: bool) -> None:
        """Refuse other data than that of a snapshot; tell of other threads, where nothing else changes the rounding."""
        data, threads = before.get("data"), before.get("threads")
        if self.data is not None and data is not None and data != self.data:
            raise BadInput(
                "the data set holds other samples than when this run was saved: a split or shuffle before attach() "
                "without a seed? Give it the samples that it had, or name another --out"
            )
        if tells and same_world and isinstance(threads, int) and threads != self.threads:
            logger.warning(
                "this run was trained with %d threads a worker and goes on with %d: sums may round otherwise, so the result "
                "may differ in its last bits from that of a run that never stopped. OMP_NUM_THREADS=%d keeps them the same",
                threads,
                self.threads,
                threads,
            )
