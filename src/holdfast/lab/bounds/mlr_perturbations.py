"""Figures 5 and 6a of the SCAR paper: the cost of perturbing logistic regression, and of resetting some of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.faults.schedule import lost_blocks
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
from holdfast.theory.bounds import adversarial, gaussian
from holdfast.theory.rate import Rate, worst_rate
from holdfast.workloads.mlr import LogisticRegression, mlr

STEP = 50
BEYOND = 10  # the optimum is unknown, so the iterate this many times as far as the criterion takes its place


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The unperturbed run of a workload, the approximate optimum, and the rate of convergence to it."""

    workload: LogisticRegression
    run: Trajectory
    optimum: npt.NDArray[Any]
    rate: Rate

    @property
    def weights(self) -> npt.NDArray[Any]:
        return self.run.states[STEP]["weights"]

    def distance(self, weights: npt.NDArray[Any]) -> float:
        return float(np.linalg.norm(weights - self.optimum))

    def trials(
        self, kind: str, deltas: Sequence[Floats], sizes: Floats, options: Options, progress: Progress
    ) -> PerturbedTrials:
        """Run a trial for each of `deltas`, which is added to the weights at `STEP`; `sizes` are their norms."""
        starts = [Start({"weights": (self.weights + delta).astype(np.float32)}, STEP) for delta in deltas]
        limit, done = 20 * self.run.length, per_trial(progress)
        counts = iterations_to_criterion(
            self.workload, starts, start_as_given, limit=limit, jobs=options.jobs, done=done
        )
        return PerturbedTrials(kind, sizes[:, None], np.array([STEP]), STEP + np.ceil(counts) - self.run.length)

    def result(
        self, name: str, title: str, trials: int, options: Options, groups: list[PerturbedTrials], claims: list[Claim],
        remarks: list[str],
    ) -> Result:  # fmt: skip
        model = self.workload
        start = self.distance(self.run.states[0]["weights"])
        return Result(
            experiment=name,
            config={
                "workload": model.name, "seed": options.seed, "trials": trials, "step": STEP, "batch": model.batch,
                "learning rate": model.rate, "criterion": model.criterion, "unperturbed": self.run.length,
                "c": self.rate.c, "optimum": f"iterate {BEYOND * self.run.length}",
            },
            rows=[row for group in groups for row in group.rows(self.rate)],
            claims=claims,
            remarks=[*remarks, printed_form_remark(groups, self.rate, start)],
            figures={name: cost_figure(groups, self.rate, f"{title}: {model.name}")},
            captions={name: CAPTION},
        )  # fmt: skip


def reference(options: Options, meter: Meter) -> Reference:
    """Train until convergence, and `BEYOND` times as long to approximate the optimum; return the reference run."""
    workload = mlr("digits" if options.quick else "mnist", options.data)
    run = trajectory(workload, progress=meter(f"{workload.name}: unperturbed run", 66))
    far = BEYOND * run.length
    progress = meter(f"{workload.name}: on towards the optimum", far - run.length)
    optimum = continue_training(workload, run.states[-1], run.length, far, progress=progress)["weights"]
    distances = [float(np.linalg.norm(state["weights"] - optimum)) for state in run.states]
    return Reference(workload, run, optimum, worst_rate(distances))


def run_bound(options: Options, meter: Meter) -> Result:
    """Run mlr-bound: measure the costs of random and adversarial perturbations of the same sizes."""
    trials = options.trial_count(full=100, quick=50)
    base = reference(options, meter)
    rng = np.random.default_rng(options.seed)
    sizes = base.distance(base.weights) * rng.uniform(0.005, 0.5, size=trials)
    progress = meter(f"{base.workload.name}: perturbed trials", 2 * trials)
    deltas = {
        "random": [gaussian(base.weights.shape, size, rng) for size in sizes],
        "adversarial": [adversarial(base.weights, base.optimum, size) for size in sizes],
    }
    groups = [base.trials(kind, chosen, sizes, options, progress) for kind, chosen in deltas.items()]
    random, worst = (float(np.median(group.closeness(base.rate))) for group in groups)
    length = "iterations of the unperturbed run to the criterion"
    closer = "median cost as a fraction of the bound: adversarial less random"
    claims = [
        Claim("unperturbed", length, "appendix C: roughly 60", (60, 70), base.run.length),
        *(within_claim(group, base.rate, "Theorem 3.2, figure 5", 1) for group in groups),
        Claim("adversarial-closer", closer, "figure 5", (0, None), worst - random),
    ]
    medians = f"{random:.2f} for random, {worst:.2f} for adversarial perturbations"
    remark = f"Median cost as a fraction of the bound: {medians}."
    return base.result("mlr-bound", "Iteration cost of perturbations", trials, options, groups, claims, [remark])


def run_reset(options: Options, meter: Meter) -> Result:
    """Run mlr-reset: measure resets of random rows, and random and adversarial perturbations of the same sizes."""
    trials = options.trial_count(full=100, quick=50)
    base = reference(options, meter)
    rng = np.random.default_rng(options.seed)
    blocks, resets = base.workload.blocks, []
    for fraction in rng.uniform(0.01, 1, size=trials):
        after = {"weights": base.weights.copy()}
        blocks.copy(base.run.states[0], after, lost_blocks(len(blocks), fraction, rng))
        resets.append(np.asarray(after["weights"] - base.weights, dtype=np.float64))
    sizes = np.array([np.linalg.norm(delta) for delta in resets])
    deltas = {
        "reset": resets,
        "random": [gaussian(base.weights.shape, size, rng) for size in sizes],
        "adversarial": [adversarial(base.weights, base.optimum, size) for size in sizes],
    }
    progress = meter(f"{base.workload.name}: perturbed trials", 3 * trials)
    groups = [base.trials(kind, chosen, sizes, options, progress) for kind, chosen in deltas.items()]
    mean = {group.kind: float(group.costs.mean()) for group in groups}
    between = (
        "mean cost of a reset on the scale from random (0) to adversarial (1) perturbations of the same size; the paper: "
        "closer to adversarial, though not quite as costly"
    )
    place = (mean["reset"] - mean["random"]) / (mean["adversarial"] - mean["random"])
    claims = [
        within_claim(groups[0], base.rate, "Theorem 3.2, figure 6(a)", 1),
        Claim("between", between, "section 5.2", (0.5, 1), place),
    ]
    means = ", ".join(f"{kind} {cost:.1f}" for kind, cost in mean.items())
    reset, _, worst = (group.costs[int(np.argmax(sizes))] for group in groups)
    remarks = [
        f"Mean cost of perturbations of the same sizes: {means} iterations.",
        f"The largest reset costs {reset:.0f} iterations, an adversarial perturbation of its size {worst:.0f}: resetting "
        f"everything returns to the start, which costs only the {STEP} iterations done.",
    ]
    return base.result("mlr-reset", "Rows reset to their initial values", trials, options, groups, claims, remarks)


BOUND = Experiment(
    name="mlr-bound",
    title="iteration costs of random and adversarial perturbations of logistic regression on MNIST",
    source="SCAR, figure 5",
    run=run_bound,
)
RESET = Experiment(
    name="mlr-reset",
    title="iteration costs of resetting a random fraction of logistic regression's rows, on MNIST",
    source="SCAR, figure 6a",
    run=run_reset,
)
