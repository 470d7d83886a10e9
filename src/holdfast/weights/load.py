"""What a run has learned, as state_dicts: for inference, for another program, for whatever comes after training."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.digest import unwatched
from holdfast.checkpoint.snapshot import PassedOver, Snapshot
from holdfast.checkpoint.state_tree import unflatten
from holdfast.errors import BadInput, NoSnapshot
from holdfast.train.state.module_names import is_model, own_keys
from holdfast.train.state.snapshot_extra import check_of_a_run
from holdfast.weights.locate import store_of


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """The states of what a run protects, by name, after so many steps; and what was passed over to find them."""

    step: int
    states: Mapping[str, Any]
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def models(self) -> list[str]:
        """The names of those that are models."""
        return [name for name, state in self.states.items() if is_model(state)]

    def named(self, name: str) -> Any:
        """The state of one of them."""
        if name not in self.states:
            raise BadInput(f"nothing of this run is named {name!r}: it protects {', '.join(self.states)}")
        return self.states[name]


def load(run: str | os.PathLike[str], step: int | None = None, name: str | None = None) -> Any:
    """The state_dicts of what a run protects, by the names that the script gave them; with `name`, that of one of them.

    `run` is the folder of a run, or a store of checkpoints. Without a step it is the newest good snapshot. Every byte is
    verified, nothing is unpickled, and tensors are in the memory of the processor:

        model.load_state_dict(hf.load("runs/a", name="model"))
    """
    learned = learned_by(run, step)
    return dict(learned.states) if name is None else learned.named(name)


def learned_by(run: str | os.PathLike[str], step: int | None = None) -> Learned:
    """What the run in this folder, or the store at this place, has saved: of this step, or the newest that is good."""
    found = _found(run, step)
    states = {
        name: own_keys(state) if is_model(state) else state
        for name, state in unflatten(found.tensors, found.extra).items()
    }
    return Learned(found.step, states, found.passed_over)


def _found(run: str | os.PathLike[str], step: int | None) -> Snapshot:
    store = store_of(run)
    if step is not None:
        found = snapshot.load(store, step)
        check_of_a_run(found)
        return found
    newest, bad = snapshot.search(store, (), unwatched, check_of_a_run)
    if newest is None:
        why = "; ".join(each.why for each in bad.values())
        raise NoSnapshot(f"{os.fspath(run)} has no good snapshot ({why or 'none at all'}): there is nothing to take")
    return newest
