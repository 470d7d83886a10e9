"""The snapshot of a run that is compared, without the parts that may differ between runs with equal states.

All protected objects count, with the plain values and buffers that each rank has for itself. The rest of a snapshot does
not count, because it can differ between two runs with equal states:

- the time of the save, the division of the tensors into files, and the number of ranks,
- the random generators, which a run seeds before every step from its seed and the position in the data,
- the position of a loader, the plan of the samples and the conditions of the training, which are no part of the state.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import manifest
from holdfast.checkpoint.index import generations
from holdfast.checkpoint.snapshot import PassedOver
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput, Corrupt
from holdfast.train.state import plain_values
from holdfast.train.state.protected import BUFFERS
from holdfast.train.state.save import CONDITIONS, CONFIG, OWN, TENSOR_PARALLEL
from holdfast.weights.load import SavedStates, from_snapshot
from holdfast.weights.locate import missing_commit_of, store_of


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SavedRun:
    """A snapshot of a run, of which every byte is verified.

    `passed_over` are newer snapshots that are damaged. `missing` is the step of a newer one that is gone, or None."""

    place: str
    store: Store
    saved: SavedStates
    passed_over: tuple[PassedOver, ...] = ()
    missing: int | None = None

    @property
    def step(self) -> int:
        return self.saved.step

    @property
    def world_size(self) -> int:
        return self.saved.reader.manifest.world

    @property
    def steps(self) -> list[int]:
        """The steps of all snapshots of the run."""
        return manifest.steps(self.store)

    @property
    def shares(self) -> tuple[Any, ...]:
        """The number of ranks, and the size of their tensor-parallel groups: they divide the samples among the ranks."""
        return self.world_size, self.saved.reader.extra[CONDITIONS].get(TENSOR_PARALLEL, 1)

    @property
    def has_values_of_ranks(self) -> bool:
        """True if each rank has plain values or buffers of its own."""
        return OWN in self.saved.reader.extra

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the training, which explain a difference: the sample plan, and the numbers of threads and ranks."""
        extra = self.saved.reader.extra
        return {**extra[CONFIG], **extra[CONDITIONS], "ranks": self.world_size}

    def state(self, *, of_all_ranks: bool) -> Mapping[str, Any]:
        """Return the protected state; with `of_all_ranks`, also the values that each rank but the first has for itself."""
        return {**self.saved.states, **(self._values_of_ranks() if of_all_ranks else {})}

    def _values_of_ranks(self) -> dict[str, Any]:
        """Return the plain values and buffers of each rank but rank 0, whose values are in the state."""
        try:
            ranks = self.saved.reader.extra.get(OWN, [])[1:]
            return {
                f"(rank {rank})": {
                    name: plain_values.decode(name.removesuffix(BUFFERS), text) for name, text in values.items()
                }
                for rank, values in enumerate(ranks, 1)
            }
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise Corrupt(
                f"the snapshot of step {self.step} in {self.store} has damaged plain values ({error!r:.200})."
            ) from error


def open_run(place: str, step: int | None) -> SavedRun:
    """Read and verify the newest intact snapshot of the run in `place`, or the snapshot of `step`."""
    store = store_of(place)
    if generations(store) and not manifest.steps(store):
        raise BadInput(
            f"{place} is a run on the parameter server, which saves blocks of its model and no snapshots: compare two runs "
            "of `holdfast run`."
        )
    saved, _, passed_over = from_snapshot(store, step, _verified)
    missing = missing_commit_of(place) if step is None else None
    return SavedRun(place=place, store=store, saved=saved, passed_over=passed_over, missing=missing)


def differing_settings(one: SavedRun, other: SavedRun) -> dict[str, tuple[str, str]]:
    """Return the settings of the training that differ between two runs, as texts. They are no part of the state."""
    here, there = one.settings, other.settings
    return {
        name: (_text(here, name), _text(there, name))
        for name in dict.fromkeys((*here, *there))
        if _text(here, name) != _text(there, name)
    }


def _verified(saved: SavedStates) -> SavedStates:
    saved.reader.check()
    return saved


def _text(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "not given"
