"""The panels of the SCAR paper's figures 7 and 8: pairs of a model and a data set, each with a small version for `--quick`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.lab.experiment import chosen
from holdfast.workloads.registry import load_for_lab
from holdfast.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class Panel:
    """A model on a data set, with functions that load it in full size or, for a quick run, in small size."""

    name: str
    title: str  # the model and its data in words
    small: str  # the same for the quick workload
    full: Callable[[Path | None], Workload]
    quick: Callable[[], Workload]

    def workload(self, data: Path | None, *, quick: bool) -> Workload:
        return self.quick() if quick else self.full(data)


def panel_notes(names: Sequence[str]) -> list[str]:
    """Return notes on how the models and data sets called `names` (all if empty) differ from the SCAR paper's."""
    return [f"{panel.name}: {NOTES[panel.name]}" for panel in chosen(names, PANELS, "panel") if panel.name in NOTES]


def distinct_panels(names: Sequence[str], *, quick: bool) -> list[Panel]:
    """Return the panels (models with data sets) called `names`, or all panels if `names` is empty.

    If `quick`, only the first of the panels with the same small data is returned."""
    panels = chosen(names, PANELS, "panel")
    return list({panel.small: panel for panel in reversed(panels)}.values())[::-1] if quick else panels


def quick_notes(names: Sequence[str]) -> list[str]:
    """Return a note on the panels among `names` that a quick run leaves out because their small data are duplicates."""
    kept = distinct_panels(names, quick=True)
    left_out = [panel.name for panel in chosen(names, PANELS, "panel") if panel not in kept]
    return [f"Left out, because their small data is that of another panel: {', '.join(left_out)}."] if left_out else []


def _cnn(partition: str, dataset: str, data: Path | None = None) -> Workload:
    from holdfast.workloads.cnn import cnn

    return cnn(dataset, data, partition)


_TITLES = {  # of each panel and its quick workload
    "mlr-mnist": ("MLR on MNIST", "MLR on digits", "mlr-digits"),
    "mlr-covtype": ("MLR on CoverType", "MLR on digits", "mlr-digits"),
    "mf-movielens": ("MF on MovieLens", "MF on generated ratings", "mf-generated"),
    "mf-jester": ("MF on Jester", "MF on generated ratings", "mf-generated"),
    "lda-20news": ("LDA on 20 Newsgroups", "LDA on generated texts", "lda-generated"),
    "lda-reuters": ("LDA on Reuters", "LDA on generated texts", "lda-generated"),
}
PANELS: dict[str, Panel] = {
    name: Panel(name, title, small, partial(load_for_lab, name), partial(load_for_lab, quick))
    for name, (title, small, quick) in _TITLES.items()
}
for _by in ("layer", "shard"):
    _titles = f"CNN on MNIST, by {_by}", f"CNN on digits, by {_by}"
    _name, _loaders = f"cnn-mnist-{_by}", (partial(_cnn, _by, "mnist"), partial(_cnn, _by, "digits"))
    PANELS[_name] = Panel(_name, *_titles, *_loaders)
_NETWORK = (
    "an iteration is 48 batches. The loss is computed on the first 4,096 training images, with the mean of the parameters "
    "over the iteration. The loss of the parameters themselves varies from batch to batch by more than a failure costs."
)
NOTES = {  # where a panel differs from the paper's
    "mf-movielens": "the paper's limit of the loss fits the Frobenius norm of the residual, with zeros for missing ratings, "
    "minimized by coordinate-wise least squares. With exact least squares, a run would converge in 2 iterations, and a lost "
    "row of L would cost nothing.",
    "mf-jester": "the data is part 1 of Jester's dataset 1, not dataset 2+ as in the paper. A run on it reaches the paper's "
    "limit of the loss in one iteration, so we set another limit. It is just above 3,102, where the loss of some runs stays "
    "nearly constant for up to 150 iterations.",
    "lda-20news": "the limit of the loss is the paper's. With our tokenisation, a run reaches it in fewer iterations than the "
    "60 of the paper.",
    "lda-reuters": "the data is the first 1,510 training stories of the ModApte split. We chose this number so that a run "
    "reaches the paper's limit of the loss while the loss still falls.",
    "cnn-mnist-layer": _NETWORK,
    "cnn-mnist-shard": _NETWORK,
}
