"""All experiments of `holdfast lab`, by name. Importing this module imports all of them."""

from holdfast.lab.advice_check import advice_check
from holdfast.lab.backprop import backprop_tradeoff
from holdfast.lab.bounds import perturbations
from holdfast.lab.experiment import Experiment
from holdfast.lab.matrix import recovery_matrix
from holdfast.lab.partial import early_failures, partial_recovery, priority_checkpoint
from holdfast.lab.server import server_overhead
from holdfast.lab.sharded import sharded_tradeoff

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *perturbations.EXPERIMENTS,
        partial_recovery.EXPERIMENT,
        priority_checkpoint.EXPERIMENT,
        early_failures.EXPERIMENT,
        backprop_tradeoff.EXPERIMENT,
        server_overhead.EXPERIMENT,
        advice_check.EXPERIMENT,
        recovery_matrix.EXPERIMENT,
        sharded_tradeoff.EXPERIMENT,
    )
}
