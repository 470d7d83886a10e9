"""Panels: the steps that the ranks of one node trained together, as one array for each field, a row for each rank.

The digest of the samples of a rank is not stored where it is that of the run's plan. A digest of every block of them is
stored, so that the digests that the plan gives can be proved to be those that the rank recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.errors import BadInput, Corrupt
from holdfast.history.step_table import COLUMNS, Stretch
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import SamplePlan

BLOCK = 256  # steps whose recorded sample digests have one digest
DIGESTS = ("digest_high", "digest_low")
PROOFS = "proofs"
_IDS_AT_ONCE = 1 << 14  # intermediate results stay in the processor's cache
_LARGEST_BATCH = 1 << 24
Digests = NDArray[np.uint64]  # two words for each step


class PanelRow(NamedTuple):
    """A stretch within a panel: its rank, and how many of the panel's steps it has."""

    who: str
    rank: int
    steps: int


class PlannedPhase(NamedTuple):
    """The numbers that determine the samples of each step in the phase of a plan that begins with step `first`."""

    first: int
    samples: int
    batch: int
    seed: int
    tensor_parallel: int

    def digests(self, first: int, steps: int, rank: int, world: int) -> tuple[int, Digests] | None:
        """Return the planned number and digests of the samples of `rank` in `steps` steps; None if it has no share."""
        share, shares = rank // self.tensor_parallel, world // self.tensor_parallel
        if first < self.first or self.batch > _LARGEST_BATCH or not share < shares <= self.batch:
            return None
        try:
            epochs = (first + steps - self.first) // (self.samples // self.batch) + 1
            plan = SamplePlan(samples=self.samples, batch=self.batch, seed=self.seed, epochs=epochs)
        except (BadInput, ZeroDivisionError):
            return None
        places = plan.places(share, shares)
        numbers, size = np.arange(first, first + steps) - self.first, max(1, _IDS_AT_ONCE // len(places))
        parts = [Samples.sums(plan.windows(numbers[at : at + size], places)) for at in range(0, steps, size)]
        return len(places), np.concatenate(parts)


@dataclass(frozen=True, slots=True, eq=False)
class StepPanel:
    """Steps of several ranks that trained them together; `columns` has one array (rank, step) for each field.

    Beyond the last step of a row, its values have no meaning. `planned` has True for each rank whose samples are all
    those of `phase`. The sample digests of the other ranks are in `columns`, one row for each of them. The column `proofs`
    has a digest of every `BLOCK` sample digests of each rank."""

    attempt: int
    world: int
    first: int
    rows: Sequence[PanelRow]
    columns: Mapping[str, NDArray[Any]]
    phase: PlannedPhase | None
    planned: Sequence[bool]

    @property
    def steps(self) -> int:
        return max(row.steps for row in self.rows)


def build_panel(stretches: Sequence[Stretch], phase: PlannedPhase | None) -> StepPanel:
    """Return the panel of `stretches`, which have the same attempt, world size and first step."""
    longest = max(stretches, key=lambda stretch: stretch.steps)
    columns = {
        name: np.stack([_lengthened(stretch.columns[name], longest.columns[name]) for stretch in stretches])
        for name in COLUMNS
    }
    rows = [PanelRow(stretch.who, stretch.rank, stretch.steps) for stretch in stretches]
    recorded = np.stack([columns.pop(name) for name in DIGESTS], axis=2)
    _, attempt, world, _, first, _ = longest
    planned = [_is_planned(phase, stretch, recorded[i, : stretch.steps]) for i, stretch in enumerate(stretches)]
    proofs = np.zeros((len(rows), -(-longest.steps // BLOCK)), np.uint64)
    for i, row in enumerate(rows):
        of_row = proofs_of(recorded[i, : row.steps])
        proofs[i, : len(of_row)] = of_row
    others = recorded[[not row for row in planned]]
    if len(others):
        columns |= {name: np.ascontiguousarray(others[:, :, i]) for i, name in enumerate(DIGESTS)}
    columns[PROOFS] = proofs
    return StepPanel(attempt, world, first, rows, columns, phase, planned)


def group(stretches: Sequence[Stretch]) -> list[list[int]]:
    """Return the indices of the `stretches` of each panel: those of similar length that began together."""
    panels: dict[tuple[int, ...], list[int]] = {}
    for i, stretch in enumerate(stretches):
        size = stretch.steps.bit_length()  # a short row beside long ones would waste memory
        panels.setdefault((stretch.attempt, stretch.world, stretch.first, size), []).append(i)
    return list(panels.values())


def proofs_of(digests: Digests) -> NDArray[np.uint64]:
    """Return a digest of every `BLOCK` of the recorded sample `digests` of one rank."""
    words = np.ascontiguousarray(digests, "<u8")
    starts = range(0, len(words), BLOCK)
    return np.array([xxhash.xxh3_64_intdigest(words[at : at + BLOCK].tobytes()) for at in starts], np.uint64)


def planned_digests(panel: StepPanel, row: int) -> Digests:
    """Return the sample digests of a row of `panel` that has those of the plan; raise Corrupt if it had others."""
    of_row, phase = panel.rows[row], panel.phase
    planned = phase and phase.digests(panel.first, of_row.steps, of_row.rank, panel.world)
    if not planned or (proofs_of(planned[1]) != panel.columns[PROOFS][row, : -(-of_row.steps // BLOCK)]).any():
        raise Corrupt(f"the samples of {of_row.who} in its steps from {panel.first} on are not those it recorded")
    return planned[1]


def prove_block(panel: StepPanel, row: int, block: int) -> None:
    """Compute a block of the sample digests of a row that has those of the plan; raise Corrupt if it had others."""
    of_row, phase, start = panel.rows[row], panel.phase, block * BLOCK
    steps = min(BLOCK, of_row.steps - start)
    planned = phase and phase.digests(panel.first + start, steps, of_row.rank, panel.world)
    if not planned or proofs_of(planned[1]) != panel.columns[PROOFS][row, block : block + 1]:
        raise Corrupt(f"the samples of {of_row.who} from step {panel.first + start} on are not those it recorded")


def stretch_of(panel: StepPanel, row: int) -> Stretch:
    """Return the stretch from which `build_panel` made a row of `panel`."""
    of_row = panel.rows[row]
    columns = {name: panel.columns[name][row, : of_row.steps] for name in COLUMNS if name not in DIGESTS}
    digests = digests_of(panel, row)
    columns |= {name: digests[:, word] for word, name in enumerate(DIGESTS)}
    return Stretch(of_row.who, panel.attempt, panel.world, of_row.rank, panel.first, columns)


def digests_of(panel: StepPanel, row: int) -> Digests:
    """Return the recorded sample digests of a row of `panel`; those of the plan are computed and compared."""
    if panel.planned[row]:
        return planned_digests(panel, row)
    stored, steps = sum(not planned for planned in panel.planned[:row]), panel.rows[row].steps
    return np.stack([panel.columns[name][stored, :steps] for name in DIGESTS], axis=1)


def _lengthened(column: NDArray[Any], longest: NDArray[Any]) -> NDArray[Any]:
    return column if len(column) == len(longest) else np.concatenate([column, longest[len(column) :]])


def _is_planned(phase: PlannedPhase | None, stretch: Stretch, recorded: Digests) -> bool:
    planned = phase and phase.digests(stretch.first, stretch.steps, stretch.rank, stretch.world)
    if not planned:
        return False
    count, digests = planned
    return bool((stretch.columns["count"] == count).all() and (digests == recorded).all())
