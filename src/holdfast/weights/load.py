"""Load the states of a run as state_dicts, or a single tensor of a state, for inference or another program."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.payload import unflatten
from holdfast.checkpoint.reader import SnapshotReader
from holdfast.checkpoint.snapshot import PassedOver
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.stored_tensor import StoredTensor, of_snapshot, read_all, tensors_in
from holdfast.errors import BadInput, NoSnapshot
from holdfast.train.state.differences import SHOWN
from holdfast.train.state.restore import check_of_a_run
from holdfast.train.state.unwrapped_models import is_model_state, unwrapped_state
from holdfast.weights.locate import store_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class SavedStates:
    """The state_dicts in a snapshot of a run, by name. Their tensors are not read yet."""

    reader: SnapshotReader
    states: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.reader.step

    @property
    def models(self) -> list[str]:
        return [name for name, state in self.states.items() if is_model_state(state)]

    def state(self, name: str) -> Any:
        if name not in self.states:
            raise BadInput(f"this run has no state named {name!r}: it protects {', '.join(self.states)}.")
        return self.states[name]

    def only_model(self, advice: str) -> str:
        """Return the name of the only model; raise BadInput with `advice` if there are several models, or none."""
        if len(self.models) != 1:
            many = f"{len(self.models)} models" if self.models else "no model"
            raise BadInput(f"this run protects {many}: {advice} one of {', '.join(self.states)}.")
        return self.models[0]


def load(
    run: str | os.PathLike[str], step: int | None = None, name: str | None = None, tensor: str | None = None
) -> Any:
    """Return the state_dicts in a snapshot of a run, as a dict with the names that the script passed to `run.protect`.

    `run` is the folder of a run, or a checkpoint store. `step` is the step of the snapshot; the default is the newest
    intact one. All bytes that are read are verified, nothing is unpickled, and the tensors are on the CPU. With `name`,
    the function returns only the state_dict of this name:

        model.load_state_dict(hf.load("runs/a", name="model"))

    A protected dict, list or tensor comes back as `{"value": ...}`, with the values of rank 0.

    With `tensor`, the function reads and returns only this tensor of the state `name`. If the run has a single model,
    you may leave out `name`: the tensor is then taken from this model. The keys of nested dicts are joined by slashes:

        hf.load("runs/a", tensor="layers.0.weight")
        hf.load("runs/a", name="optimizer", tensor="state/0/exp_avg")"""

    def read(saved: SavedStates) -> Any:
        if tensor is not None:
            return _tensor(saved, name, tensor).read()
        return read_all(dict(saved.states) if name is None else saved.state(name))

    return from_snapshot(store_of(run), step, read)[0]


def from_snapshot(
    store: Store, step: int | None, read: Callable[[SavedStates], T]
) -> tuple[T, int, tuple[PassedOver, ...]]:
    """Return the result of `read` for a snapshot, the step of that snapshot, and the damaged snapshots passed over.

    If `step` is None, use the newest snapshot that `read` can read without finding damage."""
    if step is not None:
        return read(open_states(store, step)), step, ()
    found, bad = snapshot.search(store, lambda step: (read(open_states(store, step)), step))
    if found is None:
        if not bad:
            raise NoSnapshot(f"{store} has no verified snapshot: train it first.")
        damage = "; ".join(passed_over.why for passed_over in bad.values())
        raise NoSnapshot(f"{store} has only damaged snapshots ({damage}): restore it from a copy, or name another run.")
    return *found, tuple(bad.values())


def open_states(store: Store, step: int) -> SavedStates:
    """Return the state_dicts in the snapshot of `step`; raise Corrupt if they are damaged. No tensor is read."""
    reader = SnapshotReader(store, step)
    check_of_a_run(reader.extra, reader.manifest)
    tensors: dict[str, Any] = {
        name: of_snapshot(reader, name, position) for position, name in enumerate(reader.in_file_order())
    }
    states = unflatten(tensors, reader.extra).items()
    return SavedStates(
        reader, {name: unwrapped_state(state) if is_model_state(state) else state for name, state in states}
    )


def _tensor(saved: SavedStates, name: str | None, tensor: str) -> StoredTensor:
    chosen = name or saved.only_model("give name as")
    tensors = dict(tensors_in(saved.state(chosen)))
    if tensor not in tensors:
        rest = len(tensors) - SHOWN
        names = ", ".join([*tensors][:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
        raise BadInput(f"{chosen} has no tensor named {tensor!r}: it has {names or 'none'}.")
    return tensors[tensor]
