"""A lost shard, put together on the worker that replaces the lost one, and what the survivors contribute to it.

The worker first loads its rows from the newest snapshot, if there is one. Then the weights that forward has gathered
replace those of the snapshot. States of optimizers that the snapshot lacks come from the surviving rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from holdfast.events import GATHERED, JSON, SNAPSHOT, SURVIVORS
from holdfast.live.sharded import row_sources
from holdfast.live.sharded.lost_shards import fresh_moment
from holdfast.live.sharded.row_sources import RowSource
from holdfast.live.sharded.shadow import MOMENTS, PARAMETERS, OwnShards, trained_by
from holdfast.progress import restart_needed
from holdfast.train.state.shards import local

States: TypeAlias = dict[str, dict[int, dict[str, Any]]]
"""Values by optimizer, by the number of the parameter in it, and by the name of the state."""
Sources: TypeAlias = Sequence[Mapping[str, JSON]]


def state_names(own: OwnShards) -> dict[str, dict[int, list[str]]]:
    """Return the names of the sharded states that the optimizers of this rank, a survivor, have of each parameter."""
    states = own.capture()[MOMENTS]
    return {name: {number: [*values] for number, values in numbers.items()} for name, numbers in states.items()}


def row_sums(own: OwnShards) -> States:
    """Return for each sharded state of an optimizer the sum of this rank's rows, and their number."""
    return {
        name: {
            number: {key: [rows.sum(dim=0, dtype=torch.float32), len(rows)] for key, rows in values.items()}
            for number, values in numbers.items()
        }
        for name, numbers in own.capture()[MOMENTS].items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class LostShard:
    """The shard of a lost rank, on the worker that replaces it.

    `own` has the rows of the snapshot of step `saved`, or initial values if that is None. `gathered` has the rows of
    parameters that the next rank has kept, with the step of the forward. `names` are the `state_names` of a survivor."""

    own: OwnShards
    saved: int | None
    gathered: Mapping[str, tuple[torch.Tensor, int]]
    names: Mapping[str, Mapping[int, Sequence[str]]]

    @property
    def lacks_states(self) -> bool:
        """True if optimizers of the survivors have states that were not in the snapshot, or if there was none."""
        return bool(self._lacking)

    @property
    def _lacking(self) -> list[tuple[str, int, str]]:
        states = self.own.capture()[MOMENTS]
        return [
            (name, number, key)
            for name, numbers in self.names.items()
            for number, keys in numbers.items()
            for key in keys
            if key not in states[name].get(number, {})
        ]

    def load(self, rest: Mapping[str, Any], sums: Sequence[States]) -> None:
        """Load the shard into the protected objects, with `rest`, the state of a survivor that is not sharded.

        `sums` are the `row_sums` of the survivors, if `lacks_states`."""
        weights = {
            name: self.gathered[name][0] for name, source in self._sources().items() if source.origin == GATHERED
        }
        self.own.load({PARAMETERS: weights, MOMENTS: self._states(sums)}, rest)

    def _states(self, sums: Sequence[States]) -> States:
        states: States = self.own.capture()[MOMENTS]
        for name, number, key in self._lacking:
            rows = local(trained_by(self.own.optimizers[name])[number].detach())
            parts = [survivor[name][number][key] for survivor in sums]
            mean = sum(total for total, _ in parts).to(rows.device) / max(1, sum(count for _, count in parts))
            if (values := fresh_moment(key, rows, mean)) is None:
                raise restart_needed(f"there is no snapshot yet, and no rule for lost rows of the optimizer's {key}")
            states[name].setdefault(number, {})[key] = values
        return states

    @property
    def _rows(self) -> dict[str, int]:
        """The number of rows of each parameter on this rank, without parameters of which it has none."""
        rows = {name: len(local(parameter)) for name, parameter in self.own.parameters.items()}
        return {name: count for name, count in rows.items() if count}

    def _sources(self) -> dict[str, RowSource]:
        steps = {name: step for name, (_, step) in self.gathered.items()}
        sources = row_sources.choose_weights(self._rows, steps, self.saved, self.own.untrained)
        if isinstance(sources, str):
            raise restart_needed(f"no rank has the lost weights of {sources}, and there is no snapshot yet")
        return sources

    def parameter_sources(self) -> Sources:
        """Return where the rows of the parameters come from, for the history."""
        return row_sources.to_json(self._sources(), self._rows)

    def state_sources(self, step: int) -> Sources:
        """Return where the optimizers' rows come from, for the history. Call this before `load`.

        Survivors contribute those that they have in `step`."""
        lacking = {(name, number) for name, number, _ in self._lacking}
        sources: dict[str, RowSource] = {}
        rows: dict[str, int] = {}
        for name, numbers in self.names.items():
            parameters = trained_by(self.own.optimizers[name])
            for number in numbers:
                if count := len(local(parameters[number])):
                    label = f"{name}/{number}"
                    is_lacking = (name, number) in lacking
                    sources[label] = RowSource(SURVIVORS, step) if is_lacking else RowSource(SNAPSHOT, self.saved or 0)
                    rows[label] = count
        return row_sources.to_json(sources, rows)

    @property
    def rounded_to(self) -> str | None:
        """The dtype to which forward has rounded the gathered weights, or None if it has not."""
        parameters = self.own.parameters
        dtypes = {rows.dtype for name, (rows, _) in self.gathered.items() if rows.dtype != parameters[name].dtype}
        return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or None
