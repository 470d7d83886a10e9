"""Figure 3 of the SCAR paper: the cost of one or many random perturbations of a quadratic program, with the bound."""

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
from holdfast.theory.bounds import adversarial
from holdfast.theory.rate import Rate, worst_rate
from holdfast.workloads.qp import QuadraticProgram
from holdfast.workloads.workload import Arrays, Clock, stacked, unstacked

STEP = 500  # the single perturbation strikes here; many perturbations strike at every iteration before it
SOURCE = "Theorem 3.2, figure 3"


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: measure the costs of single, repeated and adversarial perturbations."""
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

    x, left, at = unperturbed.states[STEP]["x"], unperturbed.losses[STEP], np.array([STEP])
    # From a hundredth to ten times the distance left; a 4-D normal vector is about 2 long.
    deltas = left / 2 * 10 ** rng.uniform(-2, 1, size=(trials, 1)) * rng.normal(size=(trials, 4))
    many, many_starts = _perturb_often(program, rate, unperturbed, trials, rng)
    sizes = left * np.geomspace(0.5, 10, max(trials // 10, 1))
    away = [{"x": x + adversarial(x, program.optimum, size)} for size in sizes]
    single = np.linalg.norm(deltas, axis=1)[:, None]
    groups = [
        PerturbedTrials("one perturbation", single, at, costs([{"x": x + delta} for delta in deltas])),
        PerturbedTrials("many perturbations", many, np.arange(STEP), costs(many_starts)),
        PerturbedTrials("adversarial", sizes[:, None], at, costs(away)),
    ]
    length = "iterations of the unperturbed run, set to be roughly 1,000"
    tight = "smallest cost of an adversarial perturbation, as a fraction of its bound"
    closest = float(groups[-1].closeness(rate).min())
    negative = float(np.mean(groups[0].costs < 0))
    return Result(
        experiment="qp-bound",
        config={"seed": options.seed, "trials": trials, "step": STEP, "criterion": program.criterion, "c": rate.c},
        rows=[row for group in groups for row in group.rows(rate)],
        claims=[
            Claim("unperturbed", length, "figure 3", (800, 1200), unperturbed.length),
            *(within_claim(g, rate, SOURCE, 0.999) for g in groups),
            Claim("tight", tight, "tightness, after Theorem 3.2", (0.9, None), closest),
        ],
        remarks=[
            printed_form_remark(groups, rate, float(unperturbed.losses[0])),
            f"{negative:.0%} of single random perturbations have a negative cost: they happen to move towards the optimum.",
        ],
        figures={
            "qp-bound": cost_figure(groups, rate, "Iteration cost of perturbations: gradient descent on a 4-D QP")
        },
        captions={"qp-bound": CAPTION},
    )


def _perturb_often(
    program: QuadraticProgram, rate: Rate, run: Trajectory, trials: int, rng: np.random.Generator
) -> tuple[Floats, list[Arrays]]:
    scale = run.losses[STEP] / 2 * (1 - rate.c) * 10 ** rng.uniform(-2, 1, size=(trials, 1, 1))
    deltas = scale * rng.normal(size=(trials, STEP, 4))
    stack = stacked([program.start()] * trials)
    clock = Clock(*np.zeros((2, trials), dtype=np.int64))  # the program draws no random numbers
    for k in range(STEP):
        stack = program.advance({"x": stack["x"] + deltas[:, k].T}, clock)
    return np.linalg.norm(deltas, axis=2), [unstacked(stack, lane) for lane in range(trials)]


EXPERIMENT = Experiment(
    name="qp-bound",
    title="iteration costs of random and adversarial perturbations on a 4-D quadratic program",
    source="SCAR, figure 3",
    run=run,
)
