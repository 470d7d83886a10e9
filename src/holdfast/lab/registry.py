"""The experiments there are, by name."""

from holdfast.errors import BadInput
from holdfast.lab import (
    backprop_tradeoff,
    early_failures,
    lda_reset,
    mlr_bound,
    mlr_reset,
    partial_recovery,
    priority_checkpoint,
    qp_bound,
    recovery_matrix,
    server_overhead,
)
from holdfast.lab.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        qp_bound,
        mlr_bound,
        mlr_reset,
        lda_reset,
        partial_recovery,
        priority_checkpoint,
        early_failures,
        backprop_tradeoff,
        server_overhead,
        recovery_matrix,
    )
}


def experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise BadInput(f"there is no experiment {name!r}; choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
