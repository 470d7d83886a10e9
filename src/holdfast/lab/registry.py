"""The experiments there are, by name."""

from holdfast.errors import BadInput
from holdfast.lab.advice_check import advice_check
from holdfast.lab.backprop import backprop_tradeoff as tradeoff
from holdfast.lab.bounds import lda_reset, mlr_bound, mlr_reset, qp_bound
from holdfast.lab.experiment import Experiment
from holdfast.lab.matrix import recovery_matrix
from holdfast.lab.partial import early_failures, partial_recovery, priority_checkpoint
from holdfast.lab.server import server_overhead as overhead

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
        tradeoff,
        overhead,
        advice_check,
        recovery_matrix,
    )
}


def experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise BadInput(f"there is no experiment {name!r}; choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
