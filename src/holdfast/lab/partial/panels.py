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
    panels_of: dict[str, list[str]] = {}
    for panel in chosen(names, PANELS, "panel"):
        if panel.name in NOTES:
            panels_of.setdefault(NOTES[panel.name], []).append(panel.name)
    return [f"{' and '.join(panels)}: {note}" for note, panels in panels_of.items()]


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
    "an iteration trains on 48 batches. To compute the loss after an iteration, the lab averages the 48 versions of the "
    "parameters (one after each batch), and evaluates this average on the first 4,096 training images. The loss of a single "
    "version varies from batch to batch by more than the effect of a failure."
)
NOTES = {  # where a panel differs from the paper's
    "mf-movielens": "a run has converged at a loss of 920, the number that the SCAR paper gives. The loss is the Frobenius norm "
    "of the residual, with zeros for missing ratings. In each iteration, the lab minimizes this loss by least squares for one "
    "column of L after another, and then for one row of R after another. The lab does not solve for all of L at once: a run "
    "would then converge in 2 iterations. A lost row of L would also cost nothing, because each iteration would compute all "
    "of L from R alone.",
    "mf-jester": "the data is part 1 of Jester's dataset 1; the SCAR paper uses dataset 2+. On this data, a run needs only one "
    "iteration to reach the loss at which the SCAR paper counts a run as converged. So the lab uses a lower loss, 3,103. A "
    "still lower loss is no good limit: at about 3,102, the loss of some runs stays nearly constant for up to 150 iterations.",
    "lda-20news": "a run has converged at the same loss as in the SCAR paper. In the paper, a run takes 60 iterations to "
    "reach this loss. In the lab it takes fewer, because the lab splits the texts into words in another way.",
    "lda-reuters": "the data is the first 1,510 training stories of the ModApte split. This number was chosen so that a run "
    "takes about 20 to 30 iterations to reach 850,000, the loss at which the SCAR paper counts a run as converged.",
    "cnn-mnist-layer": _NETWORK,
    "cnn-mnist-shard": _NETWORK,
}
