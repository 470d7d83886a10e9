"""Where the members of a run stand after a loss, and what each of them has to do for all to go on alike. Pure.

Members recover at two kinds of places: in a backward whose sums did not all come, or at a boundary. A sum that is done
anywhere holds everybody's gradients, the casualties' too, and is handed to those who lack it; one that is done nowhere
is summed again. Ranks may be on both sides of a boundary: who passed it had every sum of the step, and somebody who
lacks one can have it from nobody, so it takes over the parameters that came out of it.

What the loss of members means for a window: how much each of the others counts, and which samples it lacks. Pure.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from holdfast.distributed.script_collectives import SCRIPT_COLLECTIVES
from holdfast.live import lossy_gradient
from holdfast.sampler.plan import SamplePlan

NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where one member stands: before a window or in it, after so many sums of gradients, and which buckets it has.

    `passes` counts the backward passes of this window that were summed to their end, and `whole` those that the window
    before had in all. In a backward, `buckets` says of each bucket whether its sum is done. `basis` are the members
    among whom the window is divided, and `members` those with whom this one was connected. One that is to join stands
    nowhere (`NOWHERE`). `boundaries` and `posted` are what the supervisor compares members by. `synced` counts how often
    rank 0's buffers came in this window, and `model` is the number of the model whose backward it is. `exchanges` says
    that the script has used torch.distributed by itself.
    """

    step: int
    begun: bool = False
    basis: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    boundaries: int = 0
    posted: int = 0
    synced: int = 0
    model: int = 0
    passes: int = 0
    whole: int = 1
    buckets: tuple[bool, ...] | None = None
    exchanges: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Stand":
        buckets = None if said["buckets"] is None else tuple(said["buckets"])
        return cls(**{**said, "buckets": buckets, "basis": tuple(said["basis"]), "members": tuple(said["members"])})

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What is to be done, the same for all members.

    All go on in window `step`; if somebody has begun it, it is finished as it was divided, among `basis`. Members in
    `behind` take over the parameters of `giver`, and those in `joining` its whole state; `lost` are no more. Those in
    `synced` get the buffers that rank 0 had from `syncer`, who got them `syncs` times in this window. Bucket number b of
    a model is handed over by `given[b]`, or, where nobody has it, summed again; in `shared` are those that all have.
    """

    step: int
    begun: bool
    basis: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    asleep: tuple[int, ...] = ()
    joining: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    giver: int = -1
    synced: tuple[int, ...] = ()
    syncer: int = -1
    syncs: int = 0
    model: int = 0
    given: tuple[int | None, ...] = ()
    shared: frozenset[int] = frozenset()

    @property
    def is_complete(self) -> bool:
        """Whether every sum of the window is there: then nobody's samples are lost."""
        return bool(self.given) and None not in self.given


def settle(stands: Mapping[int, Stand], asleep: tuple[int, ...] = ()) -> Settlement | str:
    """What the members do, by where each stands; or why it cannot be settled, and the run must start again.

    Those in `asleep` have left in order, at the boundary to which all others have come.
    """
    joining = tuple(member for member, stand in stands.items() if stand.step == NOWHERE)
    stands = {member: stand for member, stand in stands.items() if member not in joining}
    if any(stand.exchanges for stand in stands.values()):
        return SCRIPT_COLLECTIVES
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
    bases = [stand.basis for stand in stands.values() if stand.step == top[0] and stand.begun]
    if len(set(bases)) > 1:
        return "the members have divided the window among different ones"
    syncs = {member: stand.synced if stand.step == top[0] else 0 for member, stand in stands.items()}
    most = max(syncs.values())
    lacking = tuple(member for member, count in syncs.items() if count < most) + (joining if most else ())
    if lacking and (most > 1 or top[1]):
        return "the members are at different forward passes of a window"
    known = {member for stand in stands.values() for member in stand.members}
    return Settlement(
        step=top[0],
        begun=bool(bases),
        basis=bases[0] if bases else (),
        asleep=asleep,
        lost=tuple(sorted(known - set(stands) - set(asleep))),  # one that joins may have the number of one that is lost
        joining=joining,
        behind=behind,
        giver=min(ahead),
        synced=lacking,
        syncs=most,
        syncer=max(syncs, key=lambda member: (syncs[member], -member)),
        model=max((stand.model for stand in ahead.values() if stand.buckets is not None), default=0),
        given=given,
        shared=frozenset(
            number
            for number in range(len(given))
            if not joining and all(stand.buckets and stand.buckets[number] for stand in stands.values())
        ),
    )


def _too_far(member: int, stand: Stand, top: tuple[int, int], ahead: Mapping[int, Stand]) -> str | None:
    """Why a member that is behind cannot take over: between two backward passes of one window nobody can."""
    last = any(stand.passes == each.whole - 1 for each in ahead.values())
    if top == (stand.step + 1, 0) and stand.buckets is not None and last:
        return None
    return f"member {member} is at pass {stand.passes} of step {stand.step}, and others at {top[1]} of {top[0]}"


class WindowState(NamedTuple):
    """The window (one step's samples) that this rank trains or comes to next, and what recoveries changed about it."""

    step: int = 0
    begun: bool = False
    basis: tuple[int, ...] = ()
    """The members among whom the window is divided."""
    passes: int = 0
    """Backward passes of this window whose sums are complete."""
    passes_before: int = 1
    """Backward passes of the window before."""
    staged: dict[str, Any] | None = None
    """The result of this window from a member that has finished it; it replaces this rank's own at the boundary."""
    divides_at: int | None = None
    """After a recovery: the step from which windows are divided among the present members."""
    finish_basis: tuple[int, ...] | None = None
    """After a recovery in a window that was begun: the members among whom it was divided."""
    settled: int | None = None
    """The last step in which members recovered since the last boundary."""
    dropped: int | None = None
    """The last step that was dropped (--recovery skip)."""

    def ended(self) -> "WindowState":
        """Return the state after the window was trained."""
        return self._replace(passes=0, passes_before=max(1, self.passes), staged=None)

    def recovered(self, plan: Settlement) -> "WindowState":
        """Return the state after a recovery: a window that was begun is finished as it was divided, later ones are not."""
        return self._replace(
            divides_at=plan.step + plan.begun,
            settled=max(self.settled or 0, plan.step),
            finish_basis=plan.basis if plan.begun else self.finish_basis,
        )

    def divided(self, members: tuple[int, ...]) -> tuple["WindowState", bool]:
        """Return the state at the boundary before `step`, and True if windows are divided among `members` from here on."""
        if self.divides_at is None:
            return self, False
        if self.step >= self.divides_at:
            return self._replace(divides_at=None, finish_basis=None, basis=members), True
        return self._replace(basis=self.finish_basis or self.basis, finish_basis=None), False

    def suspended(self) -> "WindowState":
        """Return the state of a worker that leaves the members."""
        return self._replace(divides_at=None, finish_basis=None, settled=None)


@dataclass(slots=True, eq=False)
class Losses:
    """The losses of one run, by its strategy."""

    strategy: str
    geometry: SamplePlan
    _spared: tuple[int, tuple[int, ...]] = (-1, ())  # a window, and those lost in it whose gradients are in all sums

    def weight(self, me: int, basis: tuple[int, ...]) -> float:
        """How much a member counts where nobody is lost."""
        return lossy_gradient.normal(self._samples(basis))[basis.index(me)]

    def weight_left(self, me: int, basis: tuple[int, ...], members: tuple[int, ...]) -> float:
        """How much a member counts in a window divided among `basis`, of whom only `members` are left."""
        lost = [rank for rank, member in enumerate(basis) if member not in members]
        found = lossy_gradient.weights("forward", completed=False, samples=self._samples(basis), casualties=lost)
        assert found is not None
        return found[basis.index(me)]

    def missing(self, found: Settlement) -> tuple[int, ...]:
        """The samples that the window lacks for good."""
        before = self._spared[1] if self._spared[0] == found.step else ()
        lost = [*before, *(member for member in found.lost if member in found.basis and member not in before)]
        if found.is_complete:  # for now: whoever has a sum that others lack may be lost before it is handed over
            self._spared = (found.step, tuple(lost))
            return ()
        self._spared = (found.step, ())
        if not found.begun or not lost or self.strategy == "replay":
            return ()
        at, world = self.geometry.position(found.step), len(found.basis)
        if self.strategy == "skip":
            return tuple(self.geometry.window(at).tolist())
        ranks = [found.basis.index(member) for member in lost]
        return tuple(int(each) for rank in ranks for each in self.geometry.share(at, rank, world))

    def _samples(self, basis: tuple[int, ...]) -> list[int]:
        return [self.geometry.share_size(rank, len(basis)) for rank in range(len(basis))]
