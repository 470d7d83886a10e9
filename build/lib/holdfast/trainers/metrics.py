"""Running sums that Lightning keeps on every rank during an epoch: values of `self.log(on_epoch=True)`, and metrics.

Lightning's checkpoints leave these sums out. Schedulers and early stopping may read them, so they must be restored when
a run resumes in the middle of an epoch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

METRIC, LOGGED, COUNT = "metric", "logged", "_update_count"


class RunningSums:
    """The sums of logged values and metrics that one rank accumulates during an epoch, as a flat list of numbers."""

    def __init__(self, module: Any) -> None:
        self._device = module.device
        self._metrics = {name: child for name, child in module.named_modules() if hasattr(child, COUNT)}
        self._logged: Any = {}
        self._waiting: dict[tuple[str, str], float] = {}  # restored sums of values that were not logged again yet

    def results(self, before: Any) -> Any:
        """Return an empty collection that replaces `before`, the object in which Lightning collects logged values.

        A metric added to the new collection continues from its sum in the restored snapshot."""
        continue_sum = self._continue

        class Results(type(before)):  # type: ignore[misc]  # Lightning's own collection, a dict
            def __setitem__(self, key: str, metric: Any) -> None:
                continue_sum(key, metric)
                super().__setitem__(key, metric)

        self._logged = Results(training=before.training)
        return self._logged

    def names(self) -> list[list[str]]:
        """Return the kind (metric or logged), owner and name of each running sum that `take` returns, in order."""
        return [name for name, _ in self._sums()]

    def take(self) -> torch.Tensor:
        """Return the running sums of all metrics and logged values, in the order of `names`, as one flat tensor."""
        parts = [value.detach().to(self._device, torch.float64).reshape(-1) for _, value in self._sums()]
        return torch.cat([torch.zeros(0, dtype=torch.float64, device=self._device), *parts])

    def restore(self, names: Sequence[Sequence[str]], row: torch.Tensor) -> None:
        """Restore the running sums from `row`, a result of `take`. `names` are the names of these sums, in order.

        Metrics are set at once. A logged value is set when the script logs it next."""
        place = 0
        for kind, owner, name in names:
            if kind == LOGGED:
                self._waiting[owner, name] = float(row[place])
                place += 1
            else:
                place += _set(self._metrics[owner], name, row[place:])

    def _sums(self) -> Iterator[tuple[list[str], torch.Tensor]]:
        for owner, metric in self._metrics.items():
            yield [METRIC, owner, COUNT], torch.tensor(metric._update_count)
            yield from (([METRIC, owner, name], value) for name, value in _tensors(metric))
        logged = {key: torch.tensor(value, dtype=torch.float64) for key, value in self._waiting.items()}
        for owner, metric in self._logged.items():
            if (
                metric.is_tensor
                and metric.meta.on_epoch
                and not metric.has_reset
                and not metric.meta.sync.rank_zero_only
            ):
                logged |= {(owner, name): value for name, value in _tensors(metric)}
        # By name: what is logged first differs between an attempt that resumed and one that did not.
        yield from (([LOGGED, *key], logged[key]) for key in sorted(logged))

    def _continue(self, owner: str, metric: Any) -> None:
        for name, value in _tensors(metric):
            if (sum_ := self._waiting.pop((owner, name), None)) is not None:
                setattr(metric, name, torch.tensor(sum_, dtype=torch.float64).to(value.dtype))


def _tensors(metric: Any) -> list[tuple[str, torch.Tensor]]:
    states = [(name, getattr(metric, name)) for name in metric._defaults]
    return [(name, value) for name, value in states if isinstance(value, torch.Tensor)]


def _set(metric: Any, name: str, row: torch.Tensor) -> int:
    """Set the state `name` of a metric from the first values of `row`. Return the number of values used."""
    if name == COUNT:
        metric._update_count = int(row[0])
        return 1
    before: torch.Tensor = getattr(metric, name)
    setattr(metric, name, row[: before.numel()].reshape(before.shape).to(before))
    return before.numel()
