"""Figure 5: iteration costs of random and adversarial perturbations of logistic regression, beside the bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.lab.bounds.perturbed_trials import (
    CAPTION,
    PerturbedTrials,
    cost_figure,
    printed_form_remark,
    within_claim,
)
from holdfast.lab.experiment import Experiment, Meter, Options, Progress, per_trial
from holdfast.lab.result import Claim, Result
from holdfast.lab.simulate.lanes import Start, iterations_to_criterion, start_as_given
from holdfast.lab.simulate.trajectory import Trajectory, continue_training, trajectory
from holdfast.theory.perturb import adversarial, gaussian
from holdfast.theory.rate import Rate, worst_rate
from holdfast.workloads.mlr import LogisticRegression, mlr

STEP = 50
BEYOND = 10  # the optimum is out of reach, so the iterate this many times as far as the criterion stands for it
SOURCE = "Theorem 3.2, figure 5"


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The unperturbed run of a workload, a stand-in for the optimum, and the contraction rate towards it."""

    workload: LogisticRegression
    run: Trajectory
    optimum: npt.NDArray[Any]
    rate: Rate

    @property
    def weights(self) -> npt.NDArray[Any]:
        """The state that is perturbed."""
        return self.run.states[STEP]["weights"]

    def distance(self, weights: npt.NDArray[Any]) -> float:
        """How far a state is from the optimum."""
        return float(np.linalg.norm(weights - self.optimum))

    def costs(self, deltas: Sequence[Floats], options: Options, progress: Progress) -> Floats:
        """The iteration cost of each perturbation, in whole iterations as in the theorem."""
        starts = [Start({"weights": (self.weights + delta).astype(np.float32)}, STEP) for delta in deltas]
        limit = 20 * self.run.length
        counts = iterations_to_criterion(
            self.workload, starts, start_as_given, limit=limit, jobs=options.jobs, done=per_trial(progress)
        )
        return STEP + np.ceil(counts) - self.run.length

    def away(self, size: float) -> Floats:
        """The perturbation of this size opposite to the direction of convergence."""
        return adversarial(self.weights, self.optimum, size)

    def config(self, options: Options, trials: int) -> dict[str, Any]:
        """What produced the numbers."""
        model = self.workload
        return {
            "workload": model.name, "seed": options.seed, "trials": trials, "step": STEP, "batch": model.batch,
            "learning rate": model.rate, "criterion": model.criterion, "unperturbed": self.run.length,
            "c": self.rate.c, "optimum": f"iterate {BEYOND * self.run.length}",
        }  # fmt: skip


def reference(options: Options, meter: Meter) -> Reference:
    """Train without failures: to the criterion, and on to a stand-in for the optimum."""
    workload = mlr("digits" if options.quick else "mnist", options.data)
    run = trajectory(workload, progress=meter(f"{workload.name}: unperturbed run", 66))
    far = BEYOND * run.length
    progress = meter(f"{workload.name}: on towards the optimum", far - run.length)
    optimum = continue_training(workload, run.states[-1], run.length, far, progress=progress)["weights"]
    distances = [float(np.linalg.norm(state["weights"] - optimum)) for state in run.states]
    return Reference(workload, run, optimum, worst_rate(distances))


def run(options: Options, meter: Meter) -> Result:
    """Measure random and adversarial perturbations of the same sizes, and state the claims."""
    trials = options.count(full=100, quick=50)
    base = reference(options, meter)
    rng = np.random.default_rng(options.seed)
    sizes = base.distance(base.weights) * rng.uniform(0.005, 0.5, size=trials)
    progress = meter(f"{base.workload.name}: perturbed trials", 2 * trials)
    at = np.array([STEP])
    groups = [
        PerturbedTrials("random", sizes[:, None], at, base.costs([gaussian(base.weights.shape, size, rng) for size in sizes], options, progress)),
        PerturbedTrials("adversarial", sizes[:, None], at, base.costs([base.away(size) for size in sizes], options, progress)),
    ]  # fmt: skip
    return Result(
        experiment="mlr-bound",
        config=base.config(options, trials),
        rows=[row for group in groups for row in group.rows(base.rate)],
        claims=[_length(base), *(within_claim(g, base.rate, SOURCE, 1) for g in groups), _closer(groups, base.rate)],
        remarks=[
            f"Median cost as a fraction of the bound: {_median(groups[0], base.rate):.2f} for random, "
            f"{_median(groups[1], base.rate):.2f} for adversarial perturbations.",
            printed_form_remark(groups, base.rate, base.distance(base.run.states[0]["weights"])),
        ],
        figures={"mlr-bound": cost_figure(groups, base.rate, f"Iteration cost of perturbations: {base.workload.name}")},
        captions={"mlr-bound": CAPTION},
    )


def _length(base: Reference) -> Claim:
    return Claim(
        id="unperturbed",
        claim="iterations of the unperturbed run to the criterion",
        source="appendix C: roughly 60",
        expected=(60, 70),
        measured=base.run.length,
    )


def _closer(groups: list[PerturbedTrials], rate: Rate) -> Claim:
    return Claim(
        id="adversarial-closer",
        claim="median cost as a fraction of the bound: adversarial less random",
        source="figure 5",
        expected=(0, None),
        measured=_median(groups[1], rate) - _median(groups[0], rate),
    )


def _median(group: PerturbedTrials, rate: Rate) -> float:
    return float(np.median(group.closeness(rate)))


EXPERIMENT = Experiment(
    name="mlr-bound",
    title="iteration costs of random and adversarial perturbations of logistic regression on MNIST",
    source="SCAR, figure 5",
    run=run,
)
