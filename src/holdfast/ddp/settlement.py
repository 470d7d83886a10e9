"""Where the members of a run stand after a loss, and what each of them has to do for all to go on alike. Pure.

Members recover at two kinds of places: in a backward whose sums did not all come, or at a boundary. A sum that is done
anywhere holds everybody's gradients, the casualties' too, and is handed to those who lack it; one that is done nowhere
is summed again. Ranks may be on both sides of a boundary: who passed it had every sum of the step, and somebody who
lacks one can have it from nobody, so it takes over the parameters that came out of it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where one member stands: before a window or in it, after so many sums of gradients, and which buckets it has.

    `passes` counts the backward passes of this window that were summed to their end, and `whole` those that the window
    before had in all. In a backward, `buckets` says of each bucket whether its sum is done.
    """

    step: int
    begun: bool = False
    passes: int = 0
    whole: int = 1
    buckets: tuple[bool, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Stand":
        buckets = said["buckets"]
        return cls(**{**said, "buckets": None if buckets is None else tuple(buckets)})

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What is to be done, the same for all members.

    All go on in window `step`; if it was `begun` with the shares of the members that were, it is finished with those.
    Members in `behind` take over the parameters of `giver`. Bucket number b is handed over by `given[b]`, or, where
    nobody has it, summed again.
    """

    step: int
    begun: bool
    behind: tuple[int, ...] = ()
    giver: int = -1
    given: tuple[int | None, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every sum of the window is there: then nobody's samples are lost."""
        return bool(self.given) and None not in self.given


def settled(stands: Mapping[int, Stand]) -> Settlement | str:
    """What the members do, by where each stands; or why it cannot be settled, and the run must start again."""
    top = max(stand.place for stand in stands.values())
    ahead = {member: stand for member, stand in stands.items() if stand.place == top}
    behind = tuple(member for member in stands if member not in ahead)
    for member in behind:
        if why := _too_far(member, stands[member], top, ahead):
            return why
    buckets = [stand.buckets for stand in ahead.values() if stand.buckets is not None]
    if len({len(each) for each in buckets}) > 1:
        return "the members reduce different buckets"
    given = tuple(
        next((member for member, stand in ahead.items() if stand.buckets and stand.buckets[number]), None)
        for number in range(len(buckets[0]) if buckets else 0)
    )
    if any(each is not None for each in given) and len(buckets) < len(stands):
        return "a sum is done that not all members have begun"
    begun = any(stand.begun for stand in stands.values() if stand.step == top[0])
    return Settlement(step=top[0], begun=begun, behind=behind, giver=min(ahead), given=given)


def _too_far(member: int, stand: Stand, top: tuple[int, int], ahead: Mapping[int, Stand]) -> str | None:
    """Why a member that is behind cannot take over: between two backward passes of one window nobody can."""
    last = any(stand.passes == each.whole - 1 for each in ahead.values())
    if top == (stand.step + 1, 0) and stand.buckets is not None and last:
        return None
    return f"member {member} is at pass {stand.passes} of step {stand.step}, and others at {top[1]} of {top[0]}"
