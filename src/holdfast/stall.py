"""The time that training waited for a save, by cause."""

import math
from dataclasses import astuple, dataclass, fields

from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The seconds that training waited for a save, in total and by cause. Stalls of several saves can be added."""

    waited: float = 0.0  # measured around the whole save, the others inside it
    snapshot: float = 0.0
    enqueue: float = 0.0
    backpressure: float = 0.0
    write: float = 0.0  # only the writing that training waited for
    sync: float = 0.0
    overlapped: float = 0.0  # writing in the background, which is not part of the stall

    def __post_init__(self) -> None:
        for name in STALL_TIMES:
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise BadInput(f"the {name} time of a stall must be finite and 0 or more (got {value:g}).")

    def __add__(self, other: "Stall") -> "Stall":
        return Stall(**{n: a + b for n, a, b in zip(STALL_TIMES, astuple(self), astuple(other), strict=True)})

    @property
    def unaccounted(self) -> float:
        """The part of `waited` that no cause explains; negative if a time was counted twice by mistake."""
        return self.waited - (self.snapshot + self.enqueue + self.backpressure + self.write + self.sync)


STALL_TIMES = tuple(part.name for part in fields(Stall))
