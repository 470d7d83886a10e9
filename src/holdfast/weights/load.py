"""Load the states of a run as state_dicts, for inference or another program."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.payload import unflatten
from holdfast.checkpoint.snapshot import PassedOver, Snapshot
from holdfast.errors import BadInput, NoSnapshot
from holdfast.train.state.protected import is_model, own_keys
from holdfast.train.state.restore import check_of_a_run
from holdfast.weights.locate import store_of


@dataclass(frozen=True, slots=True, eq=False)
class LoadedStates:
    """The state_dicts saved by a run, by name; the step of the snapshot; and damaged snapshots that were skipped."""

    step: int
    states: Mapping[str, Any]
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def models(self) -> list[str]:
        return [name for name, state in self.states.items() if is_model(state)]

    def state(self, name: str) -> Any:
        if name not in self.states:
            raise BadInput(f"this run has no state named {name!r}: it protects {', '.join(self.states)}.")
        return self.states[name]


def load(run: str | os.PathLike[str], step: int | None = None, name: str | None = None) -> Any:
    """Return the state_dicts that a run saved, by the names passed to `run.protect()`; with `name`, only that one.

    `run` is the folder of a run or a checkpoint store. Without `step`, the newest intact snapshot is loaded. Every byte
    is verified, nothing is unpickled, and the tensors are on the CPU:

        model.load_state_dict(hf.load("runs/a", name="model"))"""
    loaded = load_states(run, step)
    return dict(loaded.states) if name is None else loaded.state(name)


def load_states(run: str | os.PathLike[str], step: int | None = None) -> LoadedStates:
    """Return all state_dicts in the snapshot of `step`, by default in the newest intact snapshot of `run`."""
    store = store_of(run)

    def attempt(step: int) -> Snapshot:
        loaded = snapshot.load(store, step)
        check_of_a_run(loaded.extra, loaded.manifest)
        return loaded

    if step is not None:
        loaded = attempt(step)
    else:
        newest, bad = snapshot.search(store, attempt)
        if newest is None:
            why = "; ".join(passed_over.why for passed_over in bad.values())
            raise NoSnapshot(f"{os.fspath(run)} has no verified snapshot ({why or 'it has none'}): train it first.")
        loaded = replace(newest, passed_over=tuple(bad.values()))
    states = {
        name: own_keys(state) if is_model(state) else state
        for name, state in unflatten(loaded.tensors, loaded.extra).items()
    }
    return LoadedStates(loaded.step, states, loaded.passed_over)
