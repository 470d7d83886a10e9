"""The ways in which a matrix has the same training done: with which recovery, which writer, and whether anything fails."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """One way: its recovery and its writer, as `holdfast run` names them."""

    recovery: str
    writer: str
    fails: bool = True
    is_exact: bool = True  # whether it trains what a run without failures trains, sample by sample

    @property
    def is_live(self) -> bool:
        """Whether the other workers go on where one is lost."""
        return self.recovery != "restart"


# The first three are the paper's; its reference saves as `blocking` does.
VARIANTS = {
    "reference": Variant("restart", "blocking", fails=False),
    "blocking": Variant("restart", "blocking"),
    "overlapped": Variant("restart", "overlapped"),
    "replay": Variant("replay", "overlapped"),
    "forward": Variant("forward", "overlapped", is_exact=False),
    "skip": Variant("skip", "overlapped", is_exact=False),
}
REFERENCE, BLOCKING, OVERLAPPED = "reference", "blocking", "overlapped"
