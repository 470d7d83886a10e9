"""The parts of a run's snapshot beside its tensors: their names, and the checks of a snapshot that is resumed from.

`save` writes them and `restore` reads them. Nothing here is trusted: a snapshot may have been written by anyone.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
import xxhash

from holdfast.checkpoint.payload import unflatten
from holdfast.checkpoint.snapshot import Snapshot
from holdfast.errors import BadInput, Corrupt
from holdfast.events import JSON

logger = logging.getLogger(__name__)
STATE = "state"  # everything of the protected objects but their tensors
CONFIG = "config"  # the sample plan
CONDITIONS = "conditions"
GENERATORS = "generators"  # the states of the random generators, one entry per rank
OWN = "own"  # plain values that belong to one rank, one entry per rank
POSITIONS = "positions"  # the position of each rank's loader, if loaders feed the run
STOPPED = "stopped"  # the script stopped the run at this step


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that the bits of a run depend on: the samples (a digest of a few), and the threads per worker."""

    data: str | None
    threads: int

    @classmethod
    def now(cls, data: str | None) -> "Conditions":
        """Return the conditions of this process."""
        return cls(data, torch.get_num_threads())

    def to_json(self) -> dict[str, JSON]:
        """Return the conditions as a snapshot holds them."""
        return asdict(self)

    def check(self, saved: Mapping[str, JSON], *, same_world: bool, warns: bool) -> None:
        """Refuse data that differ from the snapshot's; warn about another number of threads, which changes rounding."""
        data, threads = saved.get("data"), saved.get("threads")
        if self.data is not None and data is not None and data != self.data:
            raise BadInput(
                "the dataset holds other samples than when this run was saved. A split or shuffle before attach() "
                "without a seed does that: give the run the same samples, or name another --out."
            )
        if warns and same_world and isinstance(threads, int) and threads != self.threads:
            logger.warning(
                "this run was trained with %d threads per worker and resumes with %d: sums may round differently, so the "
                "result may differ in its last bits from a run that never stopped. Set OMP_NUM_THREADS=%d to avoid that.",
                threads,
                self.threads,
                threads,
            )


def state_digest(tensors: str, tree: str) -> str:
    """Return the digest that the history records for a commit: of the tensor file's digest and that of all the rest."""
    return str(xxhash.xxh3_128_hexdigest(f"{tensors} {tree}".encode()))


def check_of_a_run(snapshot: Snapshot) -> None:
    """Raise Corrupt if the snapshot is not one that a run has saved, whatever its digests say."""
    extra, world_size = snapshot.extra, snapshot.manifest.world
    if not isinstance(unflatten(snapshot.tensors, extra), dict):
        raise Corrupt(f"the snapshot of step {snapshot.step} does not hold the state of a run: use an older one.")
    for name in (CONFIG, CONDITIONS):
        if not isinstance(extra.get(name), dict):
            raise Corrupt(f"the snapshot of step {snapshot.step} lacks the {name} of a run: use an older one.")
    for name in (GENERATORS, POSITIONS):
        entries = extra.get(name, [None] * world_size if name == POSITIONS else None)
        if not (isinstance(entries, list) and len(entries) == world_size):
            raise Corrupt(
                f"the snapshot of step {snapshot.step} lacks the {name} of {world_size} ranks: use an older one."
            )
