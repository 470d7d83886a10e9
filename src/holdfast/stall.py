"""The time that training waited for a save, by part."""

import math
from dataclasses import astuple, dataclass, fields

from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Seconds that training waited for a save, by part; `+` adds up saves.

    `waited` is measured around the whole save, the parts inside it. `write` is only the writing that training waited
    for. `overlapped` is the writing in the background, which is not part of the stall.
    """

    waited: float = 0.0
    snapshot: float = 0.0
    enqueue: float = 0.0
    backpressure: float = 0.0
    write: float = 0.0
    sync: float = 0.0
    overlapped: float = 0.0

    def __post_init__(self) -> None:
        for part in fields(self):
            if not 0 <= (value := getattr(self, part.name)) < math.inf:
                raise BadInput(f"the {part.name} time of a stall must be finite and 0 or more (got {value:g}).")

    def __add__(self, other: "Stall") -> "Stall":
        names = (part.name for part in fields(self))
        return Stall(**{n: a + b for n, a, b in zip(names, astuple(self), astuple(other), strict=True)})

    @property
    def unaccounted(self) -> float:
        """The wait that no part explains; negative if parts were counted twice, which is a fault of the measurement."""
        return self.waited - (self.snapshot + self.enqueue + self.backpressure + self.write + self.sync)
