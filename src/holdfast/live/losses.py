"""What the loss of members means for a window: how much each of the others counts, and which samples it lacks. Pure."""

from dataclasses import dataclass

from holdfast.live import lossy_gradient as salvage
from holdfast.live.settlement import Settlement
from holdfast.sampler.plan import Geometry


@dataclass(slots=True, eq=False)
class Losses:
    """The losses of one run, by its strategy."""

    strategy: str
    geometry: Geometry
    _spared: tuple[int, tuple[int, ...]] = (-1, ())  # a window, and those lost in it whose gradients are in all sums

    def weight(self, me: int, basis: tuple[int, ...]) -> float:
        """How much a member counts where nobody is lost."""
        return salvage.normal(self._samples(basis))[basis.index(me)]

    def weight_left(self, me: int, basis: tuple[int, ...], members: tuple[int, ...]) -> float:
        """How much a member counts in a window divided among `basis`, of whom only `members` are left."""
        lost = [rank for rank, member in enumerate(basis) if member not in members]
        found = salvage.weights("forward", completed=False, samples=self._samples(basis), casualties=lost)
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
