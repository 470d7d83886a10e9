"""Figure 6a: logistic regression after a random subset of its rows is reset to the initial values."""

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.faults.schedule import lost_blocks
from holdfast.lab.bounds.mlr_bound import STEP, Reference, reference
from holdfast.lab.bounds.perturbed_trials import (
    CAPTION,
    PerturbedTrials,
    cost_figure,
    printed_form_remark,
    within_claim,
)
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.result import Claim, Result
from holdfast.theory.perturb import gaussian

SOURCE = "Theorem 3.2, figure 6(a)"


def run(options: Options, meter: Meter) -> Result:
    """Measure resets, and beside each a random and an adversarial perturbation of the same size."""
    trials = options.count(full=100, quick=50)
    base = reference(options, meter)
    rng = np.random.default_rng(options.seed)
    resets = [_reset(base, fraction, rng) for fraction in rng.uniform(0.01, 1, size=trials)]
    sizes = np.array([np.linalg.norm(delta) for delta in resets])
    deltas = {
        "reset": resets,
        "random": [gaussian(base.weights.shape, size, rng) for size in sizes],
        "adversarial": [base.away(size) for size in sizes],
    }
    progress = meter(f"{base.workload.name}: perturbed trials", 3 * trials)
    groups = [
        PerturbedTrials(kind, sizes[:, None], np.array([STEP]), base.costs(chosen, options, progress))
        for kind, chosen in deltas.items()
    ]
    mean = {group.kind: float(group.costs.mean()) for group in groups}
    return Result(
        experiment="mlr-reset",
        config=base.config(options, trials),
        rows=[row for group in groups for row in group.rows(base.rate)],
        claims=[within_claim(groups[0], base.rate, SOURCE, 1), _between(mean)],
        remarks=[
            "Mean cost of perturbations of the same sizes: "
            + ", ".join(f"{kind} {cost:.1f}" for kind, cost in mean.items())
            + " iterations.",
            _largest(sizes, groups),
            printed_form_remark(groups, base.rate, base.distance(base.run.states[0]["weights"])),
        ],
        figures={
            "mlr-reset": cost_figure(groups, base.rate, f"Rows reset to their initial values: {base.workload.name}")
        },
        captions={"mlr-reset": CAPTION},
    )


def _reset(base: Reference, fraction: float, rng: np.random.Generator) -> Floats:
    """The perturbation that takes a random fraction of the blocks back to where they started."""
    blocks = base.workload.blocks
    after = {"weights": base.weights.copy()}
    blocks.copy(base.run.states[0], after, lost_blocks(len(blocks), fraction, rng))
    return np.asarray(after["weights"] - base.weights, dtype=np.float64)


def _largest(sizes: Floats, groups: list[PerturbedTrials]) -> str:
    """Why large resets cost less than adversarial perturbations: they return to the start, and no farther."""
    trial = int(np.argmax(sizes))
    reset, _, adversarial = (group.costs[trial] for group in groups)
    return (
        f"The largest reset costs {reset:.0f} iterations, an adversarial perturbation of its size {adversarial:.0f}: resetting "
        f"everything returns to the start, which costs the {STEP} iterations done and no more."
    )


def _between(mean: dict[str, float]) -> Claim:
    return Claim(
        id="between",
        claim="mean cost of a reset on the scale from random (0) to adversarial (1) perturbations of the same size; "
        "the paper: closer to adversarial, though not quite as costly",
        source="section 5.2",
        expected=(0.5, 1),
        measured=(mean["reset"] - mean["random"]) / (mean["adversarial"] - mean["random"]),
    )


EXPERIMENT = Experiment(
    name="mlr-reset",
    title="iteration costs of resetting a random fraction of logistic regression's rows, on MNIST",
    source="SCAR, figure 6a",
    run=run,
)
