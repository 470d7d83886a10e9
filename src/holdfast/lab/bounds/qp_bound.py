"""Figure 3: the cost of one and of many random perturbations of a quadratic program, beside the bound."""

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab.bounds.perturbed_trials import (
    CAPTION,
    PerturbedTrials,
    cost_figure,
    printed_form_remark,
    within_claim,
)
from holdfast.lab.experiment import Experiment, Meter, Options, per_trial
from holdfast.lab.result import Claim, Result
from holdfast.lab.simulate.lanes import Start, iterations_to_criterion, start_as_given
from holdfast.lab.simulate.trajectory import Trajectory, trajectory
from holdfast.theory.perturb import adversarial
from holdfast.theory.rate import Rate, worst_rate
from holdfast.workloads.qp import QuadraticProgram
from holdfast.workloads.workload import Arrays, Clock, stacked, unstacked

STEP = 500  # the single perturbation strikes here; many perturbations strike at every iteration before it
SOURCE = "Theorem 3.2, figure 3"


def run(options: Options, meter: Meter) -> Result:
    """Measure single, repeated and adversarial perturbations."""
    trials = options.trial_count(full=1000, quick=100)
    program = QuadraticProgram(seed=options.seed)
    unperturbed = trajectory(program)
    rate = worst_rate(unperturbed.losses)
    rng = np.random.default_rng(options.seed)
    progress = meter("qp-bound", 2 * trials + trials // 10)

    def costs(starts: list[Arrays]) -> Floats:
        begun = [Start(state, STEP) for state in starts]
        counts = iterations_to_criterion(program, begun, start_as_given, limit=10_000, done=per_trial(progress))
        return STEP + np.ceil(counts) - unperturbed.length

    single, single_starts = _single(unperturbed, trials, rng)
    many, many_starts = _many(program, rate, unperturbed, trials, rng)
    worst, worst_starts = _adversarial(program, unperturbed, max(trials // 10, 1))
    at = np.array([STEP])
    groups = [
        PerturbedTrials("one perturbation", single[:, None], at, costs(single_starts)),
        PerturbedTrials("many perturbations", many, np.arange(STEP), costs(many_starts)),
        PerturbedTrials("adversarial", worst[:, None], at, costs(worst_starts)),
    ]
    return Result(
        experiment="qp-bound",
        config={"seed": options.seed, "trials": trials, "step": STEP, "criterion": program.criterion, "c": rate.c},
        rows=[row for group in groups for row in group.rows(rate)],
        claims=[
            _length_claim(unperturbed),
            *(within_claim(g, rate, SOURCE, 0.999) for g in groups),
            _tight(groups[-1], rate),
        ],
        remarks=[printed_form_remark(groups, rate, float(unperturbed.losses[0])), _negative(groups[0])],
        figures={
            "qp-bound": cost_figure(groups, rate, "Iteration cost of perturbations: gradient descent on a 4-D QP")
        },
        captions={"qp-bound": CAPTION},
    )


def _single(run: Trajectory, trials: int, rng: np.random.Generator) -> tuple[Floats, list[Arrays]]:
    """Draw normal perturbations at one step, from a hundredth to ten times the distance left there."""
    scale = run.losses[STEP] / 2 * 10 ** rng.uniform(-2, 1, size=(trials, 1))  # a 4-D normal vector is about 2 long
    deltas = scale * rng.normal(size=(trials, 4))
    return np.linalg.norm(deltas, axis=1), [{"x": run.states[STEP]["x"] + delta} for delta in deltas]


def _many(
    program: QuadraticProgram, rate: Rate, run: Trajectory, trials: int, rng: np.random.Generator
) -> tuple[Floats, list[Arrays]]:
    """Draw normal perturbations at every iteration before the step, together about as large as the single ones."""
    scale = run.losses[STEP] / 2 * (1 - rate.c) * 10 ** rng.uniform(-2, 1, size=(trials, 1, 1))
    deltas = scale * rng.normal(size=(trials, STEP, 4))
    stack = stacked([program.start()] * trials)
    clock = Clock(
        np.zeros(trials, dtype=np.int64), np.zeros(trials, dtype=np.int64)
    )  # the program draws no random numbers
    for k in range(STEP):
        stack = program.advance({"x": stack["x"] + deltas[:, k].T}, clock)
    return np.linalg.norm(deltas, axis=2), [unstacked(stack, lane) for lane in range(trials)]


def _adversarial(program: QuadraticProgram, run: Trajectory, trials: int) -> tuple[Floats, list[Arrays]]:
    """Perturb straight away from the optimum, in evenly spaced sizes up to ten times the distance left."""
    x = run.states[STEP]["x"]
    sizes = run.losses[STEP] * np.geomspace(0.5, 10, trials)
    return sizes, [{"x": x + adversarial(x, program.optimum, size)} for size in sizes]


def _length_claim(run: Trajectory) -> Claim:
    return Claim(
        id="unperturbed",
        claim="iterations of the unperturbed run, set to be roughly 1,000",
        source="figure 3",
        expected=(800, 1200),
        measured=run.length,
    )


def _tight(worst: PerturbedTrials, rate: Rate) -> Claim:
    return Claim(
        id="tight",
        claim="smallest cost of an adversarial perturbation, as a fraction of its bound",
        source="tightness, after Theorem 3.2",
        expected=(0.9, None),
        measured=float(worst.closeness(rate).min()),
    )


def _negative(single: PerturbedTrials) -> str:
    share = float(np.mean(single.costs < 0))
    return f"{share:.0%} of single random perturbations have a negative cost: they happen to move towards the optimum."


EXPERIMENT = Experiment(
    name="qp-bound",
    title="iteration costs of random and adversarial perturbations on a 4-D quadratic program",
    source="SCAR, figure 3",
    run=run,
)
